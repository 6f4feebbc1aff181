"""Loads a model folder's tokenizer: without transformers where there is a tokenizer.json."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import tokenizers

from dovetail.errors import ModelError
from dovetail.gguf.reader import gguf_of
from dovetail.model_files import check_is_file
from dovetail.panics import is_panic
from dovetail.text.tokenizer.gguf import backend_of

_TABLE = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"]*)"')
CONVERTIBLE = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tiktoken.model", "tekken.json")
FORMATS = ("tokenizer.json", *CONVERTIBLE)


def load_backend(folder: Path) -> tokenizers.Tokenizer:
    """Load tokenizer.json or what a GGUF file has, or convert an older format through transformers.

    Raises:
        ModelError: There is no tokenizer, or it cannot be read or converted.
    """
    if (gguf := gguf_of(folder)) is not None:
        return backend_of(gguf)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _convert(folder)
    _check_tables(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:  # the library raises bare Exception, or panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelError(f"{path}: not a tokenizer.json that this version reads: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _check_tables(path: Path) -> None:
    """Refuse a table of characters that the library would panic about, which prints lines before ours."""
    try:
        check_is_file(path)
        for found in _TABLE.finditer(path.read_bytes()):
            table = base64.b64decode(found[1], validate=True)
            size = int.from_bytes(table[:4], "little")
            if len(table) < 4 + size or size % 4:
                raise ValueError(f"a trie of {size} bytes in a table of {len(table)}")
            table[4 + size :].decode()
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: its precompiled_charsmap, or the file, cannot be read: {error}") from error


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """Let transformers build a fast tokenizer from an older format. Costs seconds, and imports torch."""
    if not any((folder / name).is_file() for name in CONVERTIBLE):
        raise ModelError(
            f"{folder}: no tokenizer: tokenizer.json is missing (and no {', '.join(CONVERTIBLE)} to convert); "
            "copy the model's tokenizer files there, or name their folder with --tokenizer-path"
        )
    fix = "save it once with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder), use_fast=True, trust_remote_code=False)
        backend = tokenizer.backend_tokenizer
    except Exception as error:  # whatever transformers and its optional parts raise
        reason = str(error).strip().split("\n", 1)[0]
        raise ModelError(f"{folder}: tokenizer.json is missing and converting failed: {reason}; {fix}") from error
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{folder}: tokenizer.json is missing and the tokenizer has no fast form; {fix}")
    backend.no_truncation()
    backend.no_padding()
    return backend
