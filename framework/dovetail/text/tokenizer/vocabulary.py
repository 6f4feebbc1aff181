"""Which bytes each token stands for, read from the tokenizer's decoder.

Knowing bytes per token makes streaming exact: text is the UTF-8 decoding of the concatenated bytes, however the
tokens arrive. Three families cover the models that are served: byte-level BPE (every character of a token is one
byte), sentencepiece with byte fallback (`▁` is a space, `<0x0A>` a byte), and word pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

from dovetail.contracts.errors import ModelError
from dovetail.text.tokenizer.bounded import parts_of, state
from dovetail.text.tokenizer.expressions import is_linear


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's printable alphabet)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(rest)})
    return alphabet


_ALPHABET = byte_alphabet()
MAX_CONTENT = 64
"""Characters that a decoder may put in the place of others."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Step = Callable[[str], str | bytes]


def _byte_level(token: str) -> str | bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token


def _byte_fallback(token: str) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token


def _replace(pattern: Mapping[str, str], content: str) -> Step:
    if len(content) > MAX_CONTENT:
        raise ModelError(f"the tokenizer's decoder writes {len(content)} characters for one; at most {MAX_CONTENT}")
    if "Regex" in pattern:
        if not is_linear(pattern["Regex"]):
            text = f"the tokenizer's decoder replaces {pattern['Regex'][:100]!r}, which may take more than linear time"
            raise ModelError(f"{text}; give another tokenizer, by --tokenizer-path")
        regex = re.compile(pattern["Regex"])
        return lambda token: regex.sub(lambda _: content, token)
    return lambda token: token.replace(pattern["String"], content)


def _word_piece(prefix: str) -> Step:
    return lambda token: token[len(prefix) :] if token.startswith(prefix) else f" {token}"


_STEPS: dict[str, Callable[[Mapping[str, Any]], Step]] = {
    "ByteLevel": lambda step: _byte_level,
    "ByteFallback": lambda step: _byte_fallback,
    "Replace": lambda step: _replace(step["pattern"], step["content"]),
    "Metaspace": lambda step: _replace({"String": step["replacement"]}, " "),
    "WordPiece": lambda step: _word_piece(step["prefix"]),
    "BPEDecoder": lambda step: _replace({"String": step["suffix"]}, " "),
}
"""What becomes of a token by one decoder as `tokenizer.json` writes it. The other kinds change no bytes."""


def _strips(step: Mapping[str, Any]) -> bool:
    """Whether a decoder drops the first space of a text."""
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return step["type"] == "WordPiece" or bool(step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)


class TokenBytes(dict[int, bytes]):
    """The bytes of each token id, as one tokenizer's decoder makes them, computed at first use.

    Attributes:
        strips_leading_space: Whether decoding a text from its start drops one leading space (the sentencepiece
            prefix space). Text that continues a prompt keeps it.
    """

    def __init__(self, backend: tokenizers.Tokenizer, added: Mapping[int, str]) -> None:
        """`added` are texts of added tokens, which no decoder changes."""
        self._backend, self._added = backend, added
        decoders = list(parts_of(state(backend.decoder) or {"type": "WordPiece", "prefix": ""}))
        self._steps = [_STEPS[step["type"]](step) for step in decoders if step["type"] in _STEPS]
        self.strips_leading_space = any(map(_strips, decoders))

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id < 1 << 32:
            return b""
        if token_id in self._added:
            value = self._added[token_id].encode()
        else:
            token = self._backend.id_to_token(token_id)
            value = b"" if token is None else self._converted(token)
        self[token_id] = value
        return value

    def _converted(self, token: str) -> bytes:
        """Return the bytes of a token of the base vocabulary, given as the vocabulary spells it."""
        for step in self._steps:
            piece = step(token)
            if isinstance(piece, bytes):
                return piece
            token = piece
        return token.encode()
