"""Which bytes each token stands for, read from the tokenizer's decoder.

Knowing bytes per token makes streaming exact: text is the UTF-8 decoding of the concatenated bytes, however the
tokens arrive. Three families cover the models that are served: byte-level BPE (every character of a token is one
byte), sentencepiece with byte fallback (`▁` is a space, `<0x0A>` a byte), and word pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

from dovetail.contracts.errors import ModelError
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


class VocabularyBytes:
    """Token strings to bytes, as one tokenizer's decoder does it.

    Attributes:
        strips_leading_space: Whether decoding a text from its start drops one leading space (the sentencepiece
            prefix space). Text that continues a prompt keeps it.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.strips_leading_space = False
        self._steps: list[Step] = []
        decoder = backend.decoder
        if decoder is None:
            self._add({"type": "WordPiece", "prefix": ""})
        else:
            self._add(json.loads(decoder.__getstate__()))

    def _add(self, step: Mapping[str, Any]) -> None:
        """Add one decoder as `tokenizer.json` writes it. A kind that changes no bytes adds nothing."""
        kind = step["type"]
        if kind == "Sequence":
            for inner in step["decoders"]:
                self._add(inner)
        elif kind == "ByteLevel":
            self._steps.append(_byte_level)
        elif kind == "ByteFallback":
            self._steps.append(_byte_fallback)
        elif kind == "Replace":
            self._steps.append(_replace(step["pattern"], step["content"]))
        elif kind == "Strip":
            self.strips_leading_space |= step["content"] == " " and step["start"] > 0
        elif kind == "Metaspace":
            self.strips_leading_space |= step.get("prepend_scheme", "always") != "never"
            self._steps.append(_replace({"String": step["replacement"]}, " "))
        elif kind == "WordPiece":
            self.strips_leading_space = True
            self._steps.append(_word_piece(step["prefix"]))
        elif kind == "BPEDecoder":
            self._steps.append(_replace({"String": step["suffix"]}, " "))

    def __call__(self, token: str) -> bytes:
        """Return the bytes of a token of the base vocabulary, given as the vocabulary spells it."""
        for step in self._steps:
            piece = step(token)
            if isinstance(piece, bytes):
                return piece
            token = piece
        return token.encode()
