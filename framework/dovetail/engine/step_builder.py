"""Turns a step's plan into the arrays that an executor takes."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dovetail.engine.device_rows import DeviceRows
from dovetail.engine.request import EngineRequest, PromptChunk, StepPlan
from dovetail.messages.step import (
    AT_DEVICE,
    MOST_VERIFIED,
    NONE,
    POOL,
    SAMPLE,
    Admit,
    DecodeGraph,
    ExecutorInfo,
    GraphKey,
    Ints,
    PrefillGraph,
    PrepareResult,
    StepInput,
    Want,
    no_ints,
)

NO_IDS = no_ints()


class StepBatch:
    """The arrays of a step's rows: those of a step that only decodes are kept while its requests are the same."""

    __slots__ = ("num_drafts", "num_new", "rows", "start", "task", "waits")

    def __init__(self, plan: StepPlan) -> None:
        n, chunks = len(plan.decode), plan.chunks
        num = n + len(chunks)
        self.rows = np.fromiter((request.row for request in plan.requests), np.int32, num)
        self.start = np.full(num, AT_DEVICE, dtype=np.int32)
        self.num_new = np.ones(num, dtype=np.int32)
        self.task = np.full(num, SAMPLE, dtype=np.int32)
        self.waits = np.zeros(num, dtype=np.bool_)
        for i, chunk in enumerate(chunks, n):
            self.start[i], self.num_new[i] = chunk.start, chunk.num_new
            self.task[i] = SAMPLE if chunk.samples else POOL if chunk.pools else NONE
        drafts = [0] * n + [len(chunk.drafts) for chunk in chunks]
        self.num_drafts = np.array(drafts, dtype=np.int32) if any(drafts) else None


class StepBuilder:
    """Makes the `StepInput`s of one engine, in the order in which they are launched."""

    def __init__(self, rows: DeviceRows, graphs: GraphChooser) -> None:
        self._rows, self._graphs = rows, graphs
        self._decode: list[EngineRequest] = []
        self._batch: StepBatch | None = None

    def build(self, plan: StepPlan) -> StepInput:
        """Return the step; the plan's requests are put into the order of its rows.

        Whatever comes of the step: it tells of all changes of rows and pages up to now.
        """
        plan.chunks.sort(key=lambda chunk: not chunk.samples)  # those that get a token stand side by side
        decode_graph, prefill_graph = self._graphs.choose(plan)
        plan.has_graphs = decode_graph is not None or prefill_graph is not None
        batch = self._batch_of(plan)
        waits = [r.waiting_for_grammar or r.constraint is not None for r in plan.sampled]
        changes = self._rows.drain()
        return StepInput(
            step=plan.number,
            decode_graph=decode_graph,
            prefill_graph=prefill_graph,
            zeroed=changes.zeroed,
            cleared=changes.cleared,
            admit=tuple(_admit(chunk.request) for chunk in plan.chunks if not chunk.request.is_admitted),
            tables=changes.tables,
            rows=batch.rows,
            start=batch.start,
            num_new=batch.num_new,
            task=batch.task,
            waits=_waits(batch, waits),
            ids=_ids(plan.chunks),
            prompt_logprobs=_wants(plan) if plan.chunks else (),
            loads=changes.loads,
            saves=changes.saves,
            num_drafts=batch.num_drafts,
            encode=tuple(plan.encode),
            dropped=tuple(plan.dropped),
        )

    def _batch_of(self, plan: StepPlan) -> StepBatch:
        if plan.chunks:
            self._batch = None  # with chunks, requests come to other rows
            return StepBatch(plan)
        if self._batch is None or plan.decode != self._decode:
            self._decode, self._batch = list(plan.decode), StepBatch(plan)
        return self._batch


def _admit(request: EngineRequest) -> Admit:
    """Introduce a request that has taken a row."""
    request.is_admitted = True
    return Admit(
        row=request.row,
        seed=request.seed,
        num_prompt=request.num_prompt,
        params=request.params,
        stop_ids=request.stop_ids,
        history=tuple(request.model_ids(0, len(request.ids))) if request.params.looks_back else (),
        pool=request.pool,
        second=request.second,
        media=() if request.media is None else request.media.spans,
    )


def _waits(batch: StepBatch, flags: list[bool]) -> npt.NDArray[np.bool_]:
    """Which rows wait for what the host has yet to say; chunks that are not sampled do not."""
    if True not in flags:
        return batch.waits
    waits = batch.waits.copy()
    waits[: len(flags)] = flags
    return waits


def _ids(chunks: list[PromptChunk]) -> Ints:
    """The ids of all chunks."""
    if not chunks:
        return NO_IDS
    parts: list[Ints] = []
    for chunk in chunks:
        parts.append(np.frombuffer(chunk.request.model_ids(chunk.start, chunk.start + chunk.num_new), np.int32))
        if chunk.drafts:
            parts.append(np.array(chunk.drafts, dtype=np.int32))
    return np.concatenate(parts)


def _wants(plan: StepPlan) -> tuple[Want, ...]:
    """Each chunk's successors within its prompt, where asked for: the state at p gives the probability of p + 1."""
    found = []
    for at, chunk in enumerate(plan.chunks, len(plan.decode)):
        request, num_top = chunk.request, chunk.request.params.prompt_logprobs
        if request.prompt_logprobs is None or num_top is None:
            continue
        first = max(chunk.start, request.params.prompt_logprobs_start - 1)
        last = min(chunk.start + chunk.num_new, request.num_prompt - 1)
        if first < last:
            ids, named = tuple(request.model_ids(first + 1, last + 1)), request.params.logprob_token_ids
            found.append(Want(at, first - chunk.start, ids, num_top, named))
    return tuple(found)


# Which captured graphs serve a step, and in which order its rows then stand.
#
# The engine decides, so that all ranks replay the same. A graph that is missing is captured when it has been missed
# often; until then a larger one stands in, or the step runs without.

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


# In which order decode rows stand, so that a backend can read what they have in common once, and whether that pays.
#
# This is an estimate on the host: what rows share is found again on the device, exactly
# (`ForwardBatch.shares_prefixes`). A page stands at one place of one prefix for as long as somebody holds it. So two
# requests with the same page at some place have the same pages before it too, and the length of what they share is
# found by bisection.

MIN_SAVED_TOKENS = 4096
"""Tokens that need not be read in a layer; below that the two extra kernels cost more."""
MIN_SAVED_SHARE = 1 / 3
"""And their share of all tokens that the batch would read."""
SORT_STEP = 64
"""Requests are sorted by the page of every so many tokens."""
SORT_KEYS = 16
"""And by so many pages at most: of long prefixes, fewer are looked at."""

Pages = list[int]


class PrefixOrder:
    """Finds the order for one engine; looks again only when the batch is another one."""

    def __init__(self, group: int, page_size: int) -> None:
        """`group` is the backend's `prefix_group`, 2 or more."""
        self._group, self._page_size = group, page_size
        self._pages: list[Pages] = []
        self._order: list[int] | None = None

    def order(self, requests: Sequence[EngineRequest]) -> list[EngineRequest] | None:
        """Return the requests of a decode step in the order that saves most, or None where it does not pay.

        The answer stays while the requests are the same and keep their pages: those only grow at their end. A request
        that was retracted comes back with another list of pages.
        """
        pages = [request.pages[0] for request in requests]
        if pages != self._pages:  # lists that are the same object are not looked into
            self._pages, self._order = pages, self._find(requests, pages)
        return None if self._order is None else [requests[i] for i in self._order]

    def _find(self, requests: Sequence[EngineRequest], pages: list[Pages]) -> list[int] | None:
        if len({own[0] for own in pages if own}) == len(pages):
            return None
        step = max(1, SORT_STEP // self._page_size, max(map(len, pages), default=0) // SORT_KEYS)
        keys = [own[::step] for own in pages]
        by_pages = sorted(range(len(pages)), key=keys.__getitem__)
        common = [common_pages(pages[a], pages[b]) for a, b in pairwise(by_pages)]
        saved = sum(saved_pages(common[i : i + self._group - 1]) for i in range(0, len(common), self._group))
        saved_tokens, all_tokens = saved * self._page_size, sum(request.computed_len for request in requests)
        return by_pages if saved_tokens >= max(MIN_SAVED_TOKENS, MIN_SAVED_SHARE * all_tokens) else None


def saved_pages(common: Sequence[int]) -> int:
    """Return how many pages need not be read in a group, where one run of rows reads what all of it share once.

    Args:
        common: Pages that each row and the next share.

    Returns:
        The area of the largest rectangle under `common`: all rows of the run but one save as many as its lowest place.
    """
    best = 0
    rising: list[tuple[int, int]] = []  # where a height that still goes on began
    for place, height in enumerate((*common, 0)):
        start = place
        while rising and rising[-1][1] >= height:
            start, above = rising.pop()
            best = max(best, above * (place - start))
        rising.append((start, height))
    return best


def common_pages(one: Pages, other: Pages) -> int:
    """Return how many leading pages two requests share."""
    low, high = 0, min(len(one), len(other))
    if not high or one[0] != other[0]:
        return 0
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
