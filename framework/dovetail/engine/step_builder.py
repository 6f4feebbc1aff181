"""Turns a step's plan into the arrays that an executor takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dovetail.engine.device_rows import DeviceRows
from dovetail.engine.graph_choice import GraphChooser
from dovetail.engine.request import EngineRequest, PromptChunk, StepPlan
from dovetail.messages.step import AT_DEVICE, NONE, POOL, SAMPLE, Admit, Ints, StepInput, Want, no_ints

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
    known = [c.request.model_ids(c.start, c.start + c.num_new) for c in chunks]
    parts = [[np.frombuffer(ids, np.int32), *_drafts(chunk)] for ids, chunk in zip(known, chunks, strict=True)]
    return np.concatenate([array for part in parts for array in part])


def _drafts(chunk: PromptChunk) -> list[Ints]:
    return [np.array(chunk.drafts, dtype=np.int32)] if chunk.drafts else []


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
