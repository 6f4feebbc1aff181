"""What a tokenizer.json claims of itself, checked before the library reads it.

The `tokenizers` library trusts some of these claims. It panics where one does not hold, which prints lines before ours,
or aborts the process.
"""

from __future__ import annotations

import base64
import re
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from dovetail.base.model_files import check_is_file
from dovetail.contracts.errors import ModelError
from dovetail.text.tokenizer.bounded import parts_of
from dovetail.text.tokenizer.spm import check_table

_TABLE = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"]*)"')
_INSIDE = frozenset(bytes([code]) for code in range(0x80, 0xC0))
"""Bytes within a character of UTF-8."""


class _Model(msgspec.Struct):
    """What is asked of a model's part of the file."""

    vocab: msgspec.Raw = msgspec.Raw(b"{}")
    merges: msgspec.Raw = msgspec.Raw(b"[]")
    continuing_subword_prefix: str | None = None


class _File(msgspec.Struct):
    """What is asked of the file."""

    model: _Model
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None


def check_claims(path: Path) -> None:
    """Refuse a tokenizer.json about which the library would panic.

    Raises:
        ModelError: The file cannot be read, its table of characters is broken, a merge is longer than every token or
            shorter than its prefix, or a step of its normalizer, pre-tokenizer or post-processor has an impossible
            value.
    """
    raw, file = _read(path)
    try:
        for found in _TABLE.finditer(raw):
            check_table(base64.b64decode(found[1], validate=True))
    except ValueError as error:
        raise ModelError(f"{path}: its precompiled_charsmap cannot be read: {error}; download it again") from error
    if file is None:
        return
    steps = chain.from_iterable(map(parts_of, (file.normalizer, file.pre_tokenizer, file.post_processor)))
    wrong = _wrong_merge(file.model) or next(filter(None, map(_wrong_step, steps)), None)
    if wrong is not None:
        raise ModelError(f"{path}: not a tokenizer.json that can be read: {wrong}; download it again")


def check_form(path: Path) -> None:
    """Refuse a tokenizer.json that is none, by its outermost form alone: 15 ms of a large one.

    Raises:
        ModelError: The file cannot be read, or is no JSON object.
    """
    _read(path)


def _read(path: Path) -> tuple[bytes, _File | None]:
    """Return a file's bytes and its parts; None for parts of another form: the library says what is wrong with them.

    Raises:
        ModelError: As `check_form`.
    """
    try:
        check_is_file(path)
        raw = path.read_bytes()
        return raw, msgspec.json.decode(raw, type=_File)
    except msgspec.ValidationError as error:
        is_object = raw.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
        if not is_object or "missing required field `model`" in str(error):
            what = "it has no `model`" if is_object else "a JSON object is expected"
            raise ModelError(f"{path}: is no tokenizer: {what}; download it again") from error
        return raw, None
    except RecursionError:
        return raw, None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}; download it again") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def check_merges(vocab: Path, merges: Path) -> None:
    """As `check_claims`, of the older form of a BPE model: vocab.json, and merges.txt with a pair on each line.

    Raises:
        ModelError: A merge is longer than every token.
        OSError: A file cannot be read.
    """
    lines = merges.read_text(encoding="utf-8", errors="replace").splitlines()
    pairs = [line.split() for line in lines if line.strip() and not line.startswith("#version")]
    wrong = _wrong_merge(_Model(msgspec.Raw(vocab.read_bytes()), msgspec.Raw(msgspec.json.encode(pairs))))
    if wrong is not None:
        raise ModelError(f"{merges}: {wrong}; download both files again")


def _wrong_merge(model: _Model) -> str | None:
    """Say which merge the library cannot join."""
    pairs = _pairs(model.merges)
    prefix = (model.continuing_subword_prefix or "").encode()
    if not pairs:
        return None
    if prefix and (wrong := _wrong_second(pairs, len(prefix))) is not None:
        return wrong
    longest = max(pairs, key=lambda pair: len((pair[0] + pair[1]).encode()))
    joined = longest[0].encode() + longest[1].encode()[len(prefix) :]
    if b'"%s"' % joined in bytes(model.vocab) or len(joined) <= _longest_token(model.vocab):  # the first says so sooner
        return None
    return f"the merge {longest!r} makes a token that is longer than every token of its vocabulary"


def _pairs(merges: msgspec.Raw) -> list[tuple[str, str]]:
    """Return merges, in either form; none where the library does not read them."""
    try:
        return msgspec.json.decode(merges, type=list[tuple[str, str]])
    except msgspec.MsgspecError:
        pass
    try:
        found = [merge.split(" ") for merge in msgspec.json.decode(merges, type=list[str])]
    except msgspec.MsgspecError:
        return []
    return [(parts[0], parts[1]) for parts in found] if all(len(parts) == 2 for parts in found) else []


def _wrong_second(pairs: list[tuple[str, str]], size: int) -> str | None:
    """Say which second piece has no prefix: the library cuts so many bytes off, whatever the piece begins with."""
    for pair in pairs:
        second = pair[1].encode()
        if len(second) < size or second[size : size + 1] in _INSIDE:
            return f"the second piece of the merge {pair!r} is shorter than its continuing_subword_prefix"
    return None


def _longest_token(vocab: msgspec.Raw) -> int:
    """Return the bytes of the longest token of a BPE model."""
    try:
        return max((len(token.encode()) for token in msgspec.json.decode(vocab, type=dict[str, int])), default=0)
    except msgspec.MsgspecError:
        return sys.maxsize  # not one that the library reads


def _wrong_step(step: dict[str, Any]) -> str | None:
    """Say what the library cannot do of a step."""
    kind = step.get("type")
    if kind == "Prepend" and step.get("prepend") == "":
        return "its normalizer Prepend puts nothing in front"
    if kind == "FixedLength" and step.get("length") == 0:
        return "its pre-tokenizer FixedLength has length 0"
    if kind == "TemplateProcessing":
        return _wrong_template(step)
    return None


def _wrong_template(step: dict[str, Any]) -> str | None:
    """Say what a template names that is not there. The library looks when it has a text."""
    tokens, single = step.get("special_tokens"), step.get("single")
    if not isinstance(tokens, dict) or not isinstance(single, list):
        return None  # written in another way, which the library checks
    pieces = [piece for piece in single if isinstance(piece, dict)]
    named = [piece["SpecialToken"].get("id") for piece in pieces if isinstance(piece.get("SpecialToken"), dict)]
    missing = next((name for name in named if isinstance(name, str) and name not in tokens), None)
    if missing is not None:
        return f"its post-processor TemplateProcessing names the special token {missing!r}, which it does not have"
    parts = [piece["Sequence"].get("id") for piece in pieces if isinstance(piece.get("Sequence"), dict)]
    return "its post-processor TemplateProcessing asks for a second text" if "B" in parts else None
