"""Reads what a model folder says of its tokenizer, and how replies end. Imports no tokenizers.

| file | what is taken from it |
|---|---|
| `tokenizer.json` | ids of added tokens; the tokenizer itself is for `backend.py` |
| `tokenizer.model`, `added_tokens.json`, without it | special and added tokens |
| `tokenizer_config.json`, `special_tokens_map.json` | special tokens, `add_bos_token`, chat templates |
| `generation_config.json`, `config.json` | end-of-sequence ids, sampling defaults |
| `chat_template.jinja`, `chat_template.json`, `additional_chat_templates/*.jinja` | chat templates |

A format of the plugin kind may say any of it itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dovetail.base.model_files import MAX_ID, check_is_file, is_there, object_if_there, read_text
from dovetail.checkpoint.formats import Formats, StoredFormat
from dovetail.checkpoint.spm_model import spm_model
from dovetail.contracts.errors import ModelError

TEKKEN = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
"""What every `tekken.json` of Mistral's means and only its library says."""
_SPECIAL_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "eot", "eom"))


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What a model folder says about its tokenizer, besides the tokenizer itself.

    Attributes:
        folder: Where it was read; None: it was not.
        tokenizer_config: As in `tokenizer_config.json`.
        special_tokens_map: As in `special_tokens_map.json`.
        generation_config: The model's `generation_config.json`.
        model_config: Its `config.json`.
        chat_templates: Sources by name; the model's own is `default`.
        stored: What a format reads there; None: the usual files.
    """

    folder: Path | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    special_tokens_map: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    model_config: Mapping[str, Any] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    stored: StoredFormat | None = None

    @classmethod
    def read(cls, folder: Path, model: Path | None = None) -> TokenizerFiles:
        """Read whatever is there, by whichever installed format; see `of`."""
        own = Formats.installed().at(folder, is_model=False)
        if model is None or model == folder:
            return cls.of(folder, own, folder, own)
        return cls.of(folder, own, model, Formats.installed().at(model))

    @classmethod
    def of(
        cls,
        folder: Path,
        stored: StoredFormat | None,
        model: Path,
        model_stored: StoredFormat | None,
        config: Mapping[str, Any] | None = None,
    ) -> TokenizerFiles:
        """Read whatever is there.

        Args:
            folder: The tokenizer's.
            stored: What a format reads of it.
            model: The model's, with its configuration; mostly the same.
            model_stored: What a format reads of that.
            config: That configuration, where it has been read.

        Raises:
            ModelError: A file is not the JSON object, or the text, that it should be.
        """
        generation, described = _of_model(model, model_stored, config)
        said = None if stored is None else stored.ask("tokenizer_config")
        templates = None if stored is None else stored.ask("chat_templates")
        folder = folder if stored is None else stored.folder
        named: Mapping[str, Any] = {}
        if said is None:
            if is_there(folder / "tokenizer.json"):
                check_is_file(folder / "tokenizer.json")  # so that this is told before a process starts
            given = object_if_there(folder / "tokenizer_config.json")
            said = {**_of_older(folder), **{name: each for name, each in given.items() if each is not None}}
            named = object_if_there(folder / "special_tokens_map.json")
            templates = _read_templates(folder, said) if templates is None else templates
        return cls(
            folder=folder,
            tokenizer_config=said,
            special_tokens_map=named,
            generation_config=generation,
            model_config=described,
            chat_templates=templates or {},
            stored=stored,
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

    def configured_ends(self) -> tuple[int, ...]:
        """Return the ids that `generation_config.json`, else `config.json`, else its text part says end a reply.

        Raises:
            ModelError: One is no id of a token.
        """
        return self._ends()[0]

    def _ends(self) -> tuple[tuple[int, ...], list[str]]:
        """Return the configured ids, and what is odd about what the files say of them; errors of `configured_ends`."""
        text = self.model_config.get("text_config")
        places = {
            "generation_config.json: eos_token_id": self.generation_config,
            "config.json: eos_token_id": self.model_config,
            "config.json: text_config.eos_token_id": text if isinstance(text, dict) else {},
        }
        found: tuple[int, ...] = ()
        odd = []
        for where, source in places.items():
            value = source.get("eos_token_id")
            try:
                ids = _ids(where, value)
            except ModelError as error:
                if not found:
                    raise
                odd.append(f"{error}. It is left out, as another file says {', '.join(map(str, found))}.")
                continue
            if -1 in (value if isinstance(value, list) else [value]):
                odd.append(f"{where} is {value}; -1 is no token: it is left out.")
            found = found or ids
        return found, odd

    def odd_ends(self, id_of: Callable[[str], int | None]) -> tuple[str, ...]:
        """Return what the files say of ends and what cannot be, in sentences; arguments and errors of `end_ids`."""
        token = self.special_tokens().get("eos_token")
        lost = token is not None and id_of(token) is None
        text = f"The tokenizer's eos_token, {token!r}, is not in its vocabulary: it is left out."
        return (*self._ends()[1], *([text] if lost else []))

    def end_ids(self, id_of: Callable[[str], int | None]) -> tuple[int, ...]:
        """Return the ids that end a reply: the configured ones and that of the tokenizer's own `eos_token`.

        Chat models often name the end of a turn in the tokenizer's files alone.

        Args:
            id_of: Returns a token's id, None where there is no such token.

        Raises:
            ModelError: A configured one is no id of a token.
        """
        token = self.special_tokens().get("eos_token")
        own = None if token is None else id_of(token)
        return tuple(dict.fromkeys([*self.configured_ends(), *([] if own is None else [own])]))

    def listed_id(self, token: str) -> int | None:
        """Return the id of the `eos_token` as the files list it: in milliseconds, where loading takes a second.

        Args:
            token: Its text.
        """
        if self.folder is None:
            return None
        if self.stored is not None and (end := self.stored.ask("end_id")) is not None:
            return int(end)
        path = self.folder / "tokenizer.json"
        try:
            listed = msgspec.json.decode(path.read_bytes(), type=_Listed).added_tokens if path.is_file() else []
        except (OSError, msgspec.MsgspecError):
            return None  # who loads the tokenizer says what is wrong with the file
        pieces = spm_model(self.folder)
        if pieces is not None and token in pieces.tokens:
            return pieces.tokens.index(token)
        entries = self.tokenizer_config.get("added_tokens_decoder") or {}
        ids = [each.id for each in listed if each.content == token]
        ids += [int(key) for key, entry in entries.items() if _token_text(entry) == token]
        return next(iter(ids), None)


class _Added(msgspec.Struct):
    id: int
    content: str


class _Listed(msgspec.Struct):
    added_tokens: list[_Added] = []


def _of_older(folder: Path) -> Mapping[str, Any]:
    """Return what `tokenizer.model` with its added tokens, or `tekken.json`, says as tokenizer_config.json would."""
    if (pieces := spm_model(folder)) is None:
        is_tekken = (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file()
        return TEKKEN if is_tekken else {}
    added = {
        str(token_id): {"content": token} for token, token_id in object_if_there(folder / "added_tokens.json").items()
    }
    return {"added_tokens_decoder": added, **pieces.special_tokens()}


def _of_model(
    model: Path, stored: StoredFormat | None, config: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what a model says of generation and of itself."""
    if stored is not None:
        if (own := stored.ask("generation_config")) is not None:
            return own, {}
        model = stored.folder
    described = object_if_there(model / "config.json") if config is None else config
    return object_if_there(model / "generation_config.json"), described


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Collect named chat templates; files of their own win over tokenizer_config.json."""
    found: dict[str, str] = {}
    for value in (object_if_there(folder / "chat_template.json").get("chat_template"), config.get("chat_template")):
        try:
            found.update(_named_templates(value))
        except (KeyError, TypeError) as error:
            raise ModelError(
                f"{folder}: chat_template must be text or a list of {{name, template}}; got {type(value).__name__}"
            ) from error
    if is_there(path := folder / "chat_template.jinja"):
        found["default"] = read_text(path)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = read_text(path)
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


def _ids(where: str, value: object) -> tuple[int, ...]:
    """Read what is configured as ids; some files write -1 for none.

    Raises:
        ModelError: One is no id of a token.
    """
    ids: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    for one in ids:
        if type(one) is not int or not -1 <= one <= MAX_ID:
            text = "; its text belongs to eos_token in tokenizer_config.json" if isinstance(one, str) else ""
            raise ModelError(f"{where} is {one!r}; give the number of a token, or a list of them{text}")
    return tuple(dict.fromkeys(one for one in ids if one >= 0))
