"""The llguidance library alone, as its own users call it: what the time to a first mask is compared with."""

from __future__ import annotations

import json
import time

import llguidance
import numpy as np

from dovetail.contracts.grammar import GrammarSpec, Kind, Vocabulary


class _Tokens:
    """A vocabulary as the library asks for it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens) + [b""] * (vocabulary.size - len(vocabulary.tokens))
        for token_id in vocabulary.special_ids:
            self.tokens[token_id] = b"<|special_%d|>" % token_id
        self.eos_token_id = min(vocabulary.eos_ids)
        self.bos_token_id = None
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._ids = {token: token_id for token_id, token in enumerate(self.tokens)}

    def __call__(self, text: str) -> list[int]:
        """Encode byte by byte: the library asks how its tokens are cut, which does not matter to a first mask."""
        return [self._ids[bytes([byte])] for byte in text.encode()]


class RawLibrary:
    """Its tokenizer with the library's own settings; no checks, no routing, no other process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Make the tokenizer, and use it once."""
        wrapped = llguidance.TokenizerWrapper(_Tokens(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(wrapped, n_vocab=vocabulary.size, eos_token=sorted(vocabulary.eos_ids))
        self._row = np.zeros((1, vocabulary.mask_words), dtype=np.int32)
        self.time(GrammarSpec(kind=Kind.JSON, source='{"type": "null"}'))

    def time(self, spec: GrammarSpec) -> tuple[float, float] | None:
        """Return seconds and processor seconds from a schema to its first mask; None where it is refused."""
        given = json.loads(spec.source)
        started, worked = time.perf_counter(), time.process_time()
        source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(given))
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            return None
        matcher.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        return time.perf_counter() - started, time.process_time() - worked
