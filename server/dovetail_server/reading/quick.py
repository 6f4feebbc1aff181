"""Which requests the event loop prepares itself, because they cannot hold others up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeVar

import msgspec

from dovetail.contracts.requests import Ids, Request

T = TypeVar("T")
TEXT_BYTES = 1 << 13
"""Bodies up to this size are quick: tokenizing so much takes a millisecond or two. Beside a busy event loop, a thread
waits up to 5 ms for Python's lock, several times: 256 prompts of 200 tokens waited for two seconds."""
IDS_BYTES = 1 << 15
"""The same where the prompt is a list of ids, which are only checked."""
MAX_CHOICES = 8
KNOWN_S = 0.005
"""Processor time within which a request was quick: the event loop may wait as long for a thread."""
MAX_KNOWN = 1024


class QuickRequests:
    """One per server. Knows grammars and tools by how long a request with them took before.

    A grammar may take any time to choose a backend for, but applications send the same ones again and again. Of 64
    streams with a schema, two threads prepared each request a few milliseconds later than the event loop does.
    """

    def __init__(self) -> None:
        """Know none."""
        self._known: set[bytes] = set()

    def has(self, requests: Sequence[Request], num_bytes: int) -> bool:
        """Whether preparing requests whose body had so many bytes cannot hold others up.

        Expressions, and whatever needs the tokenizer beside the prompt, may take longer.
        """
        if len(requests) > 1:
            return False
        request = requests[0]
        sampling = request.sampling
        if (request.candidates or request.n) > MAX_CHOICES or request.thinking_budget is not None:
            return False
        if sampling.stop_regex or sampling.bad_words or sampling.logits_processors:
            return False
        if num_bytes > (IDS_BYTES if isinstance(request.prompts[0], Ids) else TEXT_BYTES):
            return False
        return not is_constrained(request) or key_of(request) in self._known

    def timed(self, work: Callable[[], T], requests: Sequence[Request]) -> Callable[[], T]:
        """Return `work` for a thread, which remembers the request's grammar and tools if it was quick."""
        if len(requests) > 1 or not is_constrained(requests[0]):
            return work
        key = key_of(requests[0])

        def run() -> T:
            began = time.thread_time()
            made = work()
            if time.thread_time() - began <= KNOWN_S:
                self._known = set() if len(self._known) >= MAX_KNOWN else self._known
                self._known.add(key)
            return made

        return run


def is_constrained(request: Request) -> bool:
    """Whether a request has a grammar or tools."""
    return bool(request.grammar) or request.tools is not None


def key_of(request: Request) -> bytes:
    """Return a digest of a request's grammar and tools."""
    return blake2b(msgspec.json.encode([request.grammar, request.grammar_backend, request.tools])).digest()
