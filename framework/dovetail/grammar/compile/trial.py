"""Trying a compiled grammar out before anybody is given it: what fails at its first texts is refused in time."""

from __future__ import annotations

import math
import random
import time

import numpy as np

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, Vocabulary
from dovetail.grammar.spec.refusals import TOO_COMPLEX
from dovetail.sdk.masks import draw_ids

NUM_WALKS, NUM_TOKENS = 2, 8
MAX_MASK_S = 0.005
"""Processor time of a mask: all requests of a step wait for each other's, and those of usual grammars take 0.05 ms."""
MAX_TRIAL_S = 0.5
"""Processor time after which that much is known."""


def try_out(grammar: CompiledGrammar, vocabulary: Vocabulary) -> None:
    """Follow a grammar for a few tokens.

    Raises:
        RequestError: It fails there, or no text begins by it (`$ref`s that lead in a circle, for instance), or even the
            fastest mask takes too long (a hundred thousand characters that are forced).
    """
    fastest, spent = math.inf, 0.0
    mask = np.zeros((1, vocabulary.mask_words), dtype=np.int32)
    rng = random.Random(0)
    for _ in range(NUM_WALKS):
        matcher = grammar.matcher()
        for place in range(NUM_TOKENS):
            began = time.process_time()
            if not matcher.fill(mask, 0):
                return
            took = time.process_time() - began
            spent += took
            if place:  # a grammar's first mask is kept when it is compiled, and copied here
                fastest = min(fastest, took)
            if spent >= MAX_TRIAL_S and fastest >= MAX_MASK_S:
                raise _too_slow()
            if matcher.error is None and not mask.any() and not place:
                raise RequestError("the grammar cannot be enforced: it allows no text", code="unsupported_grammar")
            drawn = [i for i in draw_ids(mask[0], 8, rng) if i not in vocabulary.special_ids]
            taken = [min(drawn, key=lambda i: vocabulary.tokens[i].isspace())] if drawn else []
            if matcher.error is not None or (taken and matcher.accept(taken) != 1):
                why = matcher.error or "it refuses what it allows"
                raise RequestError(f"the grammar cannot be enforced: {why}", code="unsupported_grammar")
            if not taken:
                break
    if MAX_MASK_S <= fastest < math.inf:
        raise _too_slow()


def _too_slow() -> RequestError:
    text = f"the grammar cannot be enforced: each token's mask takes more than {MAX_MASK_S * 1e3:.0f} ms"
    return RequestError(f"{text}; make it simpler", code=TOO_COMPLEX)
