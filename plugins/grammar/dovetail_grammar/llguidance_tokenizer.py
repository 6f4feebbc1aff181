"""The llguidance library and its form of a vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.contracts.errors import PluginError
from dovetail.contracts.grammar import Vocabulary

MAX_TOKEN = 32
MAX_SHORT, MAX_KEPT = 16, 1024
"""Characters of a text whose tokens are kept, and how many such texts."""
SLICES = (
    "[A-Za-z0-9]{1,30}",
    r'[^"\\\x00-\x1F\x7F]{1,10}',
    r'[^"\\\x00-\x1F\x7F]{1,30}',
    r'[^"\\\x00-\x1F\x7F]+',
)
"""Classes of tokens that are allowed or not together, for masks within long strings: the library's, and words.

Each costs every grammar's compilation a thirtieth. One of whitespace, and one of small letters, made no mask cheaper.
"""


class _Wrapped:
    """The vocabulary as llguidance asks for it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = {token_id: text.encode() for text, token_id in vocabulary.added.items()}
        tokens = list(vocabulary.tokens) + [b""] * (vocabulary.size - len(vocabulary.tokens))
        for token_id in vocabulary.special_ids:
            tokens[token_id] = names.get(token_id, b"<|special_%d|>" % token_id)
        self.eos_token_id = min(vocabulary.eos_ids)
        self.bos_token_id = None
        self.tokens = tokens
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._encode = vocabulary.encode
        self._longest: dict[bytes, int] = {}
        self._short: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Encode. Without the model's encoder, by the longest token that fits."""
        if self._encode is not None:
            return self._encode(text) if len(text) > MAX_SHORT else self._encode_short(text, self._encode)
        if not self._longest:
            self._longest = {token: token_id for token_id, token in enumerate(self.tokens) if token}
        data, ids, at = text.encode(), [], 0
        while at < len(data):
            end = next(end for end in range(min(len(data), at + MAX_TOKEN), at, -1) if data[at:end] in self._longest)
            ids.append(self._longest[data[at:end]])
            at = end
        return ids

    def _encode_short(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Encode what most grammars begin with, such as `{`, once: the model's encoder takes as long as a mask."""
        known = self._short.get(text)
        if known is None:
            if len(self._short) >= MAX_KEPT:
                self._short.clear()
            known = self._short[text] = encode(text)
        return known


def make_tokenizer(library: Any, vocabulary: Vocabulary) -> Any:
    """Make the library's tokenizer.

    Raises:
        PluginError: The vocabulary has no token that ends a reply.
    """
    if not vocabulary.eos_ids:
        raise PluginError(
            "the model names no end-of-sequence token, which grammars need; set eos_token_id in config.json"
        )
    wrapped = library.TokenizerWrapper(_Wrapped(vocabulary))
    return library.LLTokenizer(
        wrapped, n_vocab=vocabulary.size, eos_token=sorted(vocabulary.eos_ids), slices=list(SLICES)
    )
