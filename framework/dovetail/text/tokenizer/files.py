"""Reading a model folder's tokenizer files, without transformers where there is a tokenizer.json.

| file | what is taken from it |
|---|---|
| `tokenizer.json` | the tokenizer itself |
| `tokenizer_config.json`, `special_tokens_map.json` | special tokens, `add_bos_token`, chat templates |
| `generation_config.json`, `config.json` | end-of-sequence ids, sampling defaults |
| `chat_template.jinja`, `chat_template.json`, `additional_chat_templates/*.jinja` | chat templates |

A GGUF file has all of it in its metadata.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from dovetail.errors import ModelError
from dovetail.gguf.config import generation_config
from dovetail.gguf.reader import gguf_of
from dovetail.panics import is_panic
from dovetail.text.tokenizer.gguf import backend_of, chat_templates, special_tokens

_TABLE = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"]*)"')
_CONVERTIBLE = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tiktoken.model", "tekken.json")
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "eot_token",
    "eom_token",
)


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What a model folder says about its tokenizer, besides the tokenizer itself."""

    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    special_tokens_map: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    model_config: Mapping[str, Any] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> TokenizerFiles:
        """Read whatever is there.

        Raises:
            ModelError: A file is not the JSON object, or the text, that it should be.
        """
        if (gguf := gguf_of(folder)) is not None:
            return cls(
                tokenizer_config=special_tokens(gguf),
                generation_config=generation_config(gguf),
                chat_templates=chat_templates(gguf),
            )
        config = _read_json(folder / "tokenizer_config.json")
        return cls(
            tokenizer_config=config,
            special_tokens_map=_read_json(folder / "special_tokens_map.json"),
            generation_config=_read_json(folder / "generation_config.json"),
            model_config=_read_json(folder / "config.json"),
            chat_templates=_read_templates(folder, config),
        )

    def special_tokens(self) -> dict[str, str]:
        """Return the named special tokens (`bos_token`, `eos_token`, …) that are set."""
        found = {}
        for source in (self.special_tokens_map, self.tokenizer_config):
            for name in _SPECIAL_NAMES:
                if (text := _token_text(source.get(name))) is not None:
                    found[name] = text
        return found

    def extra_special_tokens(self) -> set[str]:
        """Return the contents of special tokens without a name of their own."""
        found: set[str | None] = set()
        for source in (self.special_tokens_map, self.tokenizer_config):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                value = source.get(key) or ()
                found.update(_token_text(token) for token in (value.values() if isinstance(value, dict) else value))
        return {text for text in found if text}

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids that end a reply: generation_config's, else config.json's."""
        text_config = self.model_config.get("text_config")
        for source in (self.generation_config, self.model_config, text_config if isinstance(text_config, dict) else {}):
            if ids := _ids(source.get("eos_token_id")):
                return ids
        return ()


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
    if not any((folder / name).is_file() for name in _CONVERTIBLE):
        raise ModelError(
            f"{folder}: no tokenizer: tokenizer.json is missing (and no {', '.join(_CONVERTIBLE)} to convert); "
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


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Collect named chat templates; files of their own win over tokenizer_config.json."""
    found: dict[str, str] = {}
    for value in (_read_json(folder / "chat_template.json").get("chat_template"), config.get("chat_template")):
        try:
            found.update(_named_templates(value))
        except (KeyError, TypeError) as error:
            raise ModelError(
                f"{folder}: chat_template must be text or a list of {{name, template}}; got {type(value).__name__}"
            ) from error
    if (path := folder / "chat_template.jinja").is_file():
        found["default"] = _read_text(path)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read_text(path)
    return found


def _named_templates(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named = value if isinstance(value, dict) else {entry["name"]: entry["template"] for entry in value}
    if not all(isinstance(source, str) for source in named.values()):
        raise TypeError("a template is not text")
    return dict(named)


def _token_text(value: object) -> str | None:
    """Read a token written as text or as `{"content": ...}`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _ids(value: object) -> tuple[int, ...]:
    values: Iterable[object] = value if isinstance(value, list) else (value,)
    return tuple(dict.fromkeys(item for item in values if type(item) is int))
