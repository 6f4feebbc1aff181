"""CUDA graphs on CPU: a capture keeps the step that it is given, a replay computes it again over the same buffers.

So all that is special about graphs happens here, too: static inputs that are written before a replay, padding, static
results that the next replay overwrites, and sampling that comes after the graph. The kernels of steps and draws are
Triton's, run by its interpreter; attention is a few lines of torch, as its kernels have tests of their own and take
seconds a step there. What is not here: streams, and what goes wrong only because the host runs ahead of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, KVPool
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.needs import AttentionCaps
from dovetail.engine.core import EngineCore
from dovetail.executor.local import LocalExecutor
from dovetail.messages.step import PrefillGraph
from dovetail.plugins import load
from dovetail.runtime.attention.grouped import make_attention
from dovetail.runtime.device.graph_pool import GraphPool
from dovetail.runtime.device.penalties import TokenCounts
from dovetail.runtime.graphs.capture_queue import CaptureQueue
from dovetail.runtime.graphs.decode import DecodeGraphs
from dovetail.runtime.graphs.prefill import PrefillGraphs
from dovetail.runtime.sampling.draw_graphs import SampleTables
from dovetail.runtime.sampling.masks import MaskBuffer
from dovetail.runtime.step_kernels import StepKernels
from dovetail.runtime.stepper import StepGraphs
from dovetail.text.tokenizer.ends import end_ids
from dovetail_backends.kernels.triton import adjust, draw, mask, row_changes, step
from dovetail_testing.engine import make_plans

KEPT = 2
"""Slots for masks: fewer than there are masks."""
SIZES = [PrefillGraph(8, 1), PrefillGraph(16, 1), PrefillGraph(24, 5), PrefillGraph(40, 5)]


class PlainAttention(AttentionBackend):
    """Attends row by row, and knows nothing but what a captured step may know: tensors on the device."""

    caps = AttentionCaps(devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), graph="mixed", sliding_window=True)

    def __init__(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> None:
        self.kv_pool = kv_pool

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        n = batch.num_decode
        self._attend(q, layer, batch, out, batch.rows[:n], batch.seq_lens[:n], batch.q_starts[: n + 1].tolist())

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        n = batch.num_decode
        out.zero_()  # of padding
        starts = (batch.q_starts[n:] - n).tolist()
        self._attend(q, layer, batch, out, batch.rows[n:], batch.seq_lens[n:], starts)

    def _attend(
        self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor, rows: Tensor, lens: Tensor,
        starts: list[int],
    ) -> None:  # fmt: skip
        kv, size = self.kv_pool.layer(layer.index), self.kv_pool.page_size
        for i, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
            mine = slice(starts[i], starts[i + 1])
            num = starts[i + 1] - starts[i]
            if num == 0:
                continue
            pages = batch.page_table[row, : -(-length // size)].long()
            keys, values = (kv[pages, j].flatten(0, 1)[:length].transpose(0, 1) for j in (0, 1))
            queries = torch.arange(length - num, length)[:, None]
            seen = torch.arange(length) <= queries
            if layer.sliding_window is not None:
                seen &= torch.arange(length) > queries - layer.sliding_window
            heads = q[mine].transpose(0, 1)
            found = torch.nn.functional.scaled_dot_product_attention(
                heads, keys, values, attn_mask=seen, scale=layer.scale, enable_gqa=True
            )
            out[mine] = found.transpose(0, 1)


class FakeGraph:
    """In place of a CUDA graph.

    Attributes:
        num_replays: How often it was replayed.
    """

    def __init__(self, step: Callable[[], Any], pool: FakePool) -> None:
        self.num_replays = 0
        self._step, self._pool = step, pool
        self.results = _tensors(step())
        for result in self.results:
            _spoil(result)  # nothing has been replayed: what the capture leaves there means nothing

    def replay(self) -> None:
        """Compute the step on what its static inputs hold by now, and overwrite its results.

        The outputs of all graphs captured later go: on a device they may lie where this one computes.
        """
        self.num_replays += 1
        for later in self._pool.graphs[self._pool.graphs.index(self) + 1 :]:
            for result in later.results:
                _spoil(result)
        for old, new in zip(self.results, _tensors(self._step()), strict=True):
            if old.data_ptr() != new.data_ptr():  # logits that graphs share stand where they are already
                old.copy_(new)


class FakePool(GraphPool):
    """A pool of graphs that CPU tensors are enough for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.graphs: list[FakeGraph] = []
        self.device = device

    def _record(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        """Run the step and keep it."""
        kept: list[Any] = []
        graph = FakeGraph(lambda: kept.append(step()) or kept[-1], self)  # type: ignore[func-returns-value]
        self.graphs.append(graph)
        return graph, kept[0]


def _tensors(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


def _spoil(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(-77.0)
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else -(1 << 30))


def use_triton(patch: pytest.MonkeyPatch) -> None:
    """Let the kernels of captured steps and draws be fit for the interpreter, with blocks of few tokens."""
    pytest.importorskip("triton.runtime.interpreter")
    patch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    patch.setattr(draw, "SAMPLE_BLOCK", 128)
    patch.setattr(draw, "BLOCK", 256)
    patch.setattr(adjust, "BLOCK", 128)
    patch.setattr(adjust, "RANKED", 64)


def triton_step(*, batch_invariant: bool = False) -> StepKernels:
    """What steps take from the set `triton`."""
    return StepKernels(
        begin_step=step.begin_step,
        finish_step=step.finish_step,
        check_finite=step.check_finite,
        write_changes=row_changes.write_changes,
        mask_logits=mask.mask_logits,
        draw=partial(draw.draw_rows, batch_invariant=batch_invariant),
        draw_plainly=partial(adjust.draw_plainly, batch_invariant=batch_invariant),
        draw_adjusted=partial(adjust.draw_adjusted, batch_invariant=batch_invariant),
    )


def make_captured(
    folder: Path,
    *,
    prefill: bool = True,
    decode: bool = True,
    sizes: Sequence[PrefillGraph] = SIZES,
    **settings: Any,
) -> EngineCore:
    """Make an engine on CPU whose steps are replays; `use_triton` comes first. What is not captured runs eagerly.

    Every graph is captured: decode buckets up to `max_running_requests`, prefills of `sizes`.
    """
    settings, plan = make_plans(folder, **settings)
    plugins = load(plan, "engine")
    executor = LocalExecutor(settings, plugins)
    runner = executor.runner
    backends = [PlainAttention] * len(runner.pool.pools)
    runner.attention = make_attention(backends, runner.config, runner.pool, runner.state.page_tables, runner.device)
    executor.stepper._attention = runner.attention
    places = settings.max_places if settings.speculator else 0
    add_graphs(executor, sizes=sizes, prefill=prefill, decode=decode, places=places)
    return EngineCore(settings, plugins, executor, eos_ids=end_ids(TokenizerFiles.read(folder, folder)))


def add_graphs(
    executor: LocalExecutor,
    *,
    sizes: Sequence[PrefillGraph] = SIZES,
    max_requests: int | None = None,
    prefill: bool = True,
    decode: bool = True,
    places: int = 0,
) -> FakePool:
    """Give an executor on CPU captured graphs of both kinds, or of one, before an engine is made over it.

    With `places`, those of drafts, too, as many in a step.
    """
    runner, pool, stepper = executor.runner, FakePool(torch.device("cpu")), executor.stepper
    words, slots = (runner.config.vocab_size + 31) // 32, len(runner.state.params.rows)
    runner.masks = stepper._masks = masks = MaskBuffer(words, pool.device, runner.state.padding_row, KEPT)
    stepper._counts = counts = TokenCounts(runner.config.vocab_size, pool.device, slots)
    parts: Any = (runner.model, runner.attention, runner.state)
    num = runner.state.padding_row if max_requests is None else max_requests
    with torch.inference_mode():
        kernels = triton_step(batch_invariant=runner.state.params.batch_invariant)
        decodes = DecodeGraphs(*parts, runner.pool.page_size, num, pool, SampleTables(masks, counts), kernels)
        prefills = PrefillGraphs(*parts, sizes, pool, kernels, places)
        runner.attention.init_graph_state(decodes.max_batch, prefills.max_tokens)
        tasks = [task for task, wanted in ((prefills, prefill), (decodes, decode)) if wanted]
        queue = CaptureQueue(tasks)
        while not queue.is_complete:
            queue.do_next()
    if not decode:
        decodes.keys.clear()
    executor.stepper._graphs = runner.graphs = StepGraphs(decode=decodes, prefill=prefills if prefill else None)
    return pool
