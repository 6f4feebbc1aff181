"""Which captured graphs serve a step, and in which order its rows then stand.

The engine decides, so that all ranks replay the same. A graph that is missing is captured when it has been missed
often; until then a larger one stands in, or the step runs without.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence

from dovetail.engine.prefix_order import PrefixOrder
from dovetail.engine.request import PromptChunk, StepPlan
from dovetail.messages.step import (
    MOST_VERIFIED,
    DecodeGraph,
    ExecutorInfo,
    GraphKey,
    PrefillGraph,
    PrepareResult,
)

DECODE_PATIENCE = 40
"""Decode steps without their graph before it is captured under load: about what the capture itself costs."""
PREFILL_PATIENCE = 8
"""The same for prefills, …"""
STAND_IN_PATIENCE = 40
"""… and while a larger graph stands in for one, which costs less."""

EAGER = [PrefillGraph(tokens, tokens) for tokens in (16, 64, MOST_VERIFIED)]
"""Tokens by which steps with drafts are told apart that run without graphs."""


class GraphChooser:
    """Knows which graphs there are."""

    def __init__(self, info: ExecutorInfo, prepare: Callable[[GraphKey], PrepareResult]) -> None:
        """`prepare` is the executor's."""
        self._prepare = prepare
        self._decode = [key for key in info.graphs if isinstance(key, DecodeGraph) and not key.shares]
        self._sharing = [key for key in info.graphs if isinstance(key, DecodeGraph) and key.shares]
        self._prefill = [key for key in info.graphs if isinstance(key, PrefillGraph)]
        self._longest_single = max((key.tokens for key in self._prefill if key.chunks == 1), default=0)
        self._captured = set(info.prepared.captured)
        self._hopeless: set[GraphKey] = set()
        self._missed: dict[GraphKey, int] = {}
        self._prefixes = PrefixOrder(info.prefix_group, info.page_size) if info.prefix_group > 1 else None

    def verifying(self) -> list[PrefillGraph]:
        """Return the graphs that can verify drafts now, or the sizes of such steps where no prefill is captured."""
        if not self._prefill:
            return EAGER
        return [key for key in self._prefill if key.tokens <= MOST_VERIFIED and key in self._captured]

    def prepared(self, outcome: PrepareResult) -> None:
        """Note what was captured."""
        self._captured.update(outcome.captured)

    def choose(self, plan: StepPlan) -> tuple[DecodeGraph | None, PrefillGraph | None]:
        """Return what to replay for the decode rows and the chunks of a step, both or, to run it eagerly, neither.

        The rows that decode are put into the order that the graph is best read in.
        """
        prefill = self._prefill_graph(plan.chunks) if plan.chunks and self._prefill else None
        if plan.chunks and prefill is None:
            return None, None
        decode = self._decode_graph(plan) if plan.decode and self._decode else None
        if plan.decode and decode is None:
            return None, None
        return decode, prefill

    def _decode_graph(self, plan: StepPlan) -> DecodeGraph | None:
        """Where reading common prefixes once pays, that is the graph that does so, once it is there."""
        num = len(plan.decode)
        place = bisect_left(self._sharing, num, key=_rows)
        if self._prefixes is not None and place < len(self._sharing):
            ordered = self._prefixes.order(plan.decode)
            if ordered is not None and self._is_ready(self._sharing[place], DECODE_PATIENCE):
                plan.decode = ordered
                return self._sharing[place]
        return self.decode_graph_for(num)

    def decode_graph_for(self, num_rows: int) -> DecodeGraph | None:
        """Return the graph for `num_rows` rows in any order, or a larger one in its place."""
        place = bisect_left(self._decode, num_rows, key=_rows)
        if place == len(self._decode):
            return None
        if self._is_ready(self._decode[place], DECODE_PATIENCE):
            return self._decode[place]
        return next((key for key in self._decode[place:] if key in self._captured), None)

    def _prefill_graph(self, chunks: Sequence[PromptChunk]) -> PrefillGraph | None:
        """Return a graph that fits the chunks: of at most 512 tokens, or of twice as many as needed."""
        for request in (chunk.request for chunk in chunks):
            if request.prompt_logprobs is not None or request.pool is not None or request.media is not None:
                return None  # it needs logits or hidden states of several tokens, or has embeddings and positions
        tokens = sum(chunk.num_new for chunk in chunks)
        limit = MOST_VERIFIED if any(chunk.drafts for chunk in chunks) else sys.maxsize
        fitting = [
            key
            for key in self._prefill
            if tokens <= key.tokens <= limit and key.chunks >= len(chunks) and key not in self._hopeless
        ]
        if not fitting:
            return None
        wanted, most = fitting[0], max(self._longest_single, 2 * fitting[0].tokens)
        found = next((key for key in fitting if key in self._captured and key.tokens <= most), None)
        if found != wanted and self._is_ready(wanted, PREFILL_PATIENCE if found is None else STAND_IN_PATIENCE):
            return wanted
        return found

    def _is_ready(self, key: GraphKey, patience: int) -> bool:
        """Whether a graph is there; it is captured if it has been missed often."""
        if key in self._captured:
            return True
        self._missed[key] = self._missed.get(key, 0) + 1
        if self._missed[key] <= patience or key in self._hopeless:
            return False
        self.prepared(self._prepare(key))
        if key not in self._captured:
            self._hopeless.add(key)
        return key in self._captured


def _rows(key: DecodeGraph) -> int:
    return key.rows
