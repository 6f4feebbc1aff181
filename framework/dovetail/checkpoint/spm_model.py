"""Reads `tokenizer.model`, a vocabulary of SentencePiece, without its library. Does not import tokenizers.

The file is a protobuf message, of which these fields are read:

| message | fields |
|---|---|
| the file | 1 a piece, repeated · 2 how it was trained · 3 how text is normalised |
| piece | 1 text · 2 score, float32 · 3 type: 1 normal, 2 unknown, 3 control, 4 defined by a user, 5 unused, 6 a byte |
| trained | 3 algorithm (1 Unigram, 2 BPE) · 40, 41, 42 ids of the unknown token, BOS and EOS |
| normalised | 2 table of characters · 3 prefix of a space · 4 spaces are collapsed |

Source: `sentencepiece_model.proto` of google/sentencepiece, read November 2026.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from dovetail.base.model_files import check_is_file
from dovetail.contracts.errors import ModelError

FILE = "tokenizer.model"
MAX_BYTES = 64 << 20
"""Fourteen times Gemma 3's 262,144 pieces."""
BPE = 2
TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
"""A line of the other format that has this name."""
FIX = "name a folder with the same model's tokenizer.json as --tokenizer-path"


@dataclass(slots=True)
class SpmModel:
    """What the file says.

    Attributes:
        tokens: Pieces by id, with `▁` for spaces.
        scores: By id.
        types: By id, as the module's table has them.
        algorithm: 1 Unigram, 2 BPE.
        unknown: Id of the unknown token.
        named: Ids of BOS and EOS by their names in tokenizer_config.json; -1 for none.
        table: Of characters, which the normaliser replaces; empty for none.
        has_prefix: Text gets a space in front.
        collapses: Spaces at the ends go, and several become one.
    """

    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    algorithm: int = 1
    unknown: int = 0
    named: dict[str, int] = field(default_factory=lambda: {"bos_token": 1, "eos_token": 2})
    table: bytes = b""
    has_prefix: bool = True
    collapses: bool = True

    def special_tokens(self) -> dict[str, str]:
        """Return BOS, EOS and the unknown token by their names in tokenizer_config.json."""
        ids = {**self.named, "unk_token": self.unknown}
        return {name: self.tokens[at] for name, at in ids.items() if 0 <= at < len(self.tokens)}


def spm_model(folder: Path) -> SpmModel | None:
    """Return what a folder's `tokenizer.model` says; None where it has none, or a tokenizer.json, which is read then.

    Raises:
        ModelError: It cannot be read, or is a file of tiktoken.
    """
    path = folder / FILE
    if not path.is_file() or (folder / "tokenizer.json").is_file():
        return None
    stat = path.stat()
    return _read(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=2)
def _read(path: Path, _stamp: int, size: int) -> SpmModel:
    try:
        check_is_file(path)
        if size > MAX_BYTES:
            raise ModelError(f"{path}: {size:,} bytes; at most {MAX_BYTES:,} are read of such a file")
        data = path.read_bytes()
        if TIKTOKEN.match(data):
            raise ModelError(
                f"{path}: is a file of tiktoken, which does not say how text is cut nor what its special tokens are; "
                f"{FIX}"
            )
        return _model(data)
    except (OSError, ValueError, TypeError, struct.error) as error:
        raise ModelError(f"{path}: not a SentencePiece model that can be read ({error}); download it again") from error


def _model(data: bytes) -> SpmModel:
    made = SpmModel()
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(_bytes(value)))
            made.tokens.append(_bytes(piece.get(1, b"")).decode())
            made.scores.append(struct.unpack("<f", _bytes(piece[2]))[0] if 2 in piece else 0.0)
            made.types.append(_int(piece.get(3, 1)))
        elif number == 2:
            given = dict(_fields(_bytes(value)))
            made.algorithm, made.unknown = _int(given.get(3, 1)), _int(given.get(40, 0))
            made.named = {"bos_token": _int(given.get(41, 1)), "eos_token": _int(given.get(42, 2))}
        elif number == 3:
            given = dict(_fields(_bytes(value)))
            made.table = _bytes(given.get(2, b""))
            made.has_prefix, made.collapses = bool(given.get(3, 1)), bool(given.get(4, 1))
    if not made.tokens or not 0 <= made.unknown < len(made.tokens):
        raise ValueError(f"{len(made.tokens)} pieces, of which {made.unknown} is the unknown one")
    if len(set(made.tokens)) != len(made.tokens):
        raise ValueError("a piece is there twice")
    return made


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a message: integers, or bytes of anything else.

    Raises:
        ValueError: It is no message, or cut short.
    """
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(wire, -1)
        if not 0 <= size <= len(data) - at:
            raise ValueError(f"a field of {size} bytes at byte {at} of {len(data)}")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a signed number of at most ten bytes, and where the next field begins."""
    value = 0
    for place in range(10):
        if at + place >= len(data):
            break
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value - (1 << 64) if value >> 63 else value, at + place + 1
    raise ValueError(f"a number at byte {at} does not end")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise TypeError("a number stands where text should")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise TypeError("text stands where a number should")
    return value
