"""Tiny tokenizers of the two families that models use, made in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.text.tokenizer.tokenizer import Tokenizer

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_CORPUS = [
    "the quick brown fox thinks about the capital of France, and the answer is Paris",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}\n' * 3,
    "\n\n\n  \n élève élève naïve 中文 中文 中国 🎉🎉",
]


def byte_level(added: Sequence[str] = MARKERS) -> Tokenizer:
    """Return a byte-level BPE tokenizer of about 430 tokens.

    Args:
        added: Added tokens that are not special: a format's markers.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens(list(added))
    return Tokenizer(backend, TokenizerFiles(tokenizer_config={"eos_token": "<|im_end|>"}))


def byte_fallback() -> Tokenizer:
    """Return a sentencepiece-like tokenizer of about 280 tokens: `▁` for a space, `<0x0A>` for bytes."""
    words = ["▁", "t", "h", "e", "a", "P", "r", "i", "s", "th", "▁th", "▁the", "Pa", "ris", "▁Paris", "▁a"]
    vocab = {token: n for n, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    vocab.update({word: 259 + n for n, word in enumerate(words)})
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("P", "a"), ("r", "i"), ("▁", "a")]
    vocab["ri"] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, TokenizerFiles(tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}}))


CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_tokenizer(folder: Path, *, added: Sequence[str] = MARKERS, chat_template: str = CHAT_TEMPLATE) -> Path:
    """Write a model folder that holds all but weights: one token per byte, ChatML, the added tokens given.

    Args:
        folder: Where to write; made if it does not exist.
        added: Added tokens that are not special: a format's markers.
        chat_template: Its source.

    Returns:
        `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens(list(added))
    backend.save(str(folder / "tokenizer.json"))
    files = {"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "config.json": {"architectures": ["Scripted"]}}
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return folder
