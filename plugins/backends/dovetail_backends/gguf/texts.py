"""What a GGUF file says of its tokenizer in words: special tokens and chat templates. Does not import tokenizers."""

from __future__ import annotations

from dovetail.contracts.errors import ModelError
from dovetail_backends.gguf.reader import Gguf

NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"} | {
    "seperator": "sep_token",  # codespell:ignore seperator - llama.cpp spells it so
    "mask": "mask_token",
    "eot": "eot_token",
    "eom": "eom_token",
}
START = "tokenizer.ggml."
FIX = "give a folder with the model's tokenizer.json as --tokenizer-path"


def special_tokens(gguf: Gguf) -> dict[str, str]:
    """Return the named special tokens (`bos_token`, `eos_token`, …) of a file.

    Raises:
        ModelError: One is no token of the vocabulary.
    """
    tokens = texts(gguf, "tokens")
    ids = {name: gguf.token_id(key) for key, name in NAMES.items()}
    for name, token_id in ids.items():
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise wrong_tokenizer(gguf, f"says that {name} is token {token_id} of {len(tokens):,}")
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def chat_templates(gguf: Gguf) -> dict[str, str]:
    """Return the chat templates of a file by name; `default` is the usual one."""
    start = "tokenizer.chat_template."
    named = {key.removeprefix(start): value for key, value in gguf.metadata.items() if key.startswith(start)}
    default = gguf.metadata.get("tokenizer.chat_template")
    found = named | ({} if default is None else {"default": default})
    return {name: source for name, source in found.items() if isinstance(source, str)}


def texts(gguf: Gguf, key: str) -> list[str]:
    """Return a list of texts of the tokenizer.

    Raises:
        ModelError: There is none.
    """
    found = gguf.texts(START + key)
    if not found:
        raise wrong_tokenizer(gguf, f"has no {START}{key}")
    return found


def wrong_tokenizer(gguf: Gguf, what: str) -> ModelError:
    """Return the error about a tokenizer, with the way out."""
    return ModelError(f"{gguf.files[0]}: its tokenizer {what}; {FIX}")
