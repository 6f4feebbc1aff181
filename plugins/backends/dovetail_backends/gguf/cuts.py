"""How byte-level tokenizers of GGUF files cut text before they merge, by the name in `tokenizer.ggml.pre`.

Each expression cuts what the one before left. Where llama.cpp's own engine cannot say what a model's `tokenizer.json`
says, the latter is here.

Sources: llama.cpp's `llama-vocab.cpp` and the `tokenizer.json` files that it names, read November 2026.
"""

from __future__ import annotations

_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",)
LLAMA3 = (rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",)
QWEN2 = (rf"{_SHORT}|{_WORD}|\p{{N}}|{_REST}",)
DIGITS = (r"\p{N}", *GPT2)
TEKKEN = (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SLASHED}",)
GPT4O = (rf"{_CASED[0]}{_SHORT}?|{_CASED[1]}{_SHORT}?|\p{{N}}{{1,3}}|{_SLASHED}",)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", *GPT2, "[0-9][0-9][0-9]")
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

CUTS: dict[str, tuple[str, ...]] = {
    "default": DEFAULT,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), QWEN2),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4", "mellum"), GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), DIGITS),
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
    "falcon": FALCON,
    "deepseek-coder": DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK_V3),
}
"""Expressions by name."""
IGNORES_MERGES = frozenset(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
)
"""A word that is a token is taken as it is, whatever the merges make of it."""
ADDS_BOS = IGNORES_MERGES
"""Whose texts begin with BOS where the file says nothing of it."""
COMPOSED = frozenset(("qwen2", "deepseek-r1-qwen"))
"""Whose `tokenizer.json` composes characters first (NFC)."""
