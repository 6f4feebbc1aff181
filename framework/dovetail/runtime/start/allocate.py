"""Phases `plan` and `allocate`: divide what the weights have left, and make what steps work on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.cache.pool import KVCache, StateCache
from dovetail.contracts.attention import AttentionBackend
from dovetail.contracts.cache import Recurrent
from dovetail.contracts.model import VisionTower
from dovetail.runtime.attention.grouped import make_attention
from dovetail.runtime.device.device_state import DeviceState
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.device.graph_pool import GraphPool
from dovetail.runtime.device.penalties import TokenCounts
from dovetail.runtime.device.row_images import RowImages
from dovetail.runtime.graphs.decode import BUCKETS, DecodeGraphs
from dovetail.runtime.graphs.prefill import PrefillGraphs
from dovetail.runtime.memory import prefill_sizes
from dovetail.runtime.memory.plan import MemoryPlan
from dovetail.runtime.sampling.draw_graphs import SampleTables
from dovetail.runtime.sampling.masks import MaskBuffer, num_kept
from dovetail.runtime.sampling.sampler import Processors
from dovetail.runtime.start.check import Checked
from dovetail.runtime.start.load import LoadedModel
from dovetail.runtime.step import LayerProgress
from dovetail.runtime.stepper import StepGraphs, Stepper


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """What steps work on.

    Attributes:
        pool: The KV pool.
        state: Rows of requests, on the device.
        attention: The backend of the model's groups.
        masks: Grammars' masks.
        graphs: What captures graphs; None where there are none.
        stepper: Computes steps.
    """

    pool: KVCache
    state: DeviceState
    attention: AttentionBackend
    masks: MaskBuffer
    graphs: StepGraphs | None
    stepper: Stepper


def plan(checked: Checked, loaded: LoadedModel) -> MemoryPlan:
    """Divide the device's memory, with the weights in place; ranks agree on the least.

    Raises:
        ConfigError: There is no memory for a cache.
    """
    return checked.memory.fit(loaded.weight_bytes)


def allocate(checked: Checked, loaded: LoadedModel, planned: MemoryPlan) -> Allocated:
    """Make the pool, the rows and what attends, samples and captures.

    Raises:
        ConfigError: The device does not give the memory.
    """
    settings, device = checked.settings, checked.device
    pool = checked.memory.make_pool()
    max_pages = -(-planned.context_len // settings.page_size)
    states = StateCache(pool) if pool.states else None
    state = DeviceState(
        settings.max_running_requests, max_pages, device, max(1, len(pool.pools)), states, loaded.step.write_changes
    )
    state.params.batch_invariant = settings.batch_invariant
    if isinstance(loaded.model, VisionTower) and checked.config.vision is not None:
        config, num_rows = checked.config, len(state.lens)
        has_sections, has_spans = bool(config.rope.sections), any(spec.spans for spec in config.layers)
        state.images = RowImages(loaded.model.encode, num_rows, device, has_sections=has_sections, has_spans=has_spans)
    attention = make_attention(
        checked.chosen.backends, checked.local, pool, state.page_tables, device,
        batch_invariant=settings.batch_invariant,
    )  # fmt: skip
    masks, counts = _tables(checked, loaded, state)
    parts = (loaded.model, attention, state)
    graphs = _graphs(checked, loaded, planned, pool, (attention, state), SampleTables(masks, counts))
    processors = Processors.make(checked.plugins, checked.config.vocab_size, settings.max_running_requests, device)
    progress = LayerProgress(loaded.model, device)
    stepper = Stepper(*parts, pool, masks, counts, graphs, processors, progress, loaded.step, loaded.threads)
    return Allocated(pool=pool, state=state, attention=attention, masks=masks, graphs=graphs, stepper=stepper)


def _tables(checked: Checked, loaded: LoadedModel, state: DeviceState) -> tuple[MaskBuffer, TokenCounts]:
    """Make what holds masks and counts; where graphs may read them, each row has its place from the start."""
    vocab, device, settings = checked.config.vocab_size, checked.device, checked.settings
    may_capture = device_of(device).captures and not settings.disable_cuda_graph
    num_rows = settings.max_running_requests if may_capture else 0
    num_slots, words = len(state.params.rows) if may_capture else 0, (vocab + 31) // 32
    masks = MaskBuffer(
        words, device, min(num_rows, BUCKETS[-1]), num_kept(words) if may_capture else 0, loaded.step.mask_logits
    )
    return masks, TokenCounts(vocab, device, num_slots)


def _graphs(
    checked: Checked,
    loaded: LoadedModel,
    planned: MemoryPlan,
    pool: KVCache,
    parts: tuple[AttentionBackend, DeviceState],
    tables: SampleTables,
) -> StepGraphs | None:
    """Make what captures graphs, where device, backend and settings allow them."""
    attention, _ = parts
    settings, device = checked.settings, checked.device
    if not device_of(device).captures or settings.disable_cuda_graph or attention.caps.graph == "none":
        return None
    if not checked.config.generates or not checked.kernels.is_capturable:
        return None  # what is captured ends in logits, and pooled rows run eagerly
    memory = GraphPool(device)
    rows = planned.max_running_requests
    sizes = prefill_sizes.sizes(loaded.weight_bytes, planned.step_tokens - rows, rows)
    decode = DecodeGraphs(
        loaded.model, *parts, pool.page_size, settings.max_running_requests, memory, tables, loaded.step
    )
    # `recur` copies a chunk's states at places that the host names: that cannot be recorded.
    recurrent = (spec.reach for spec in checked.config.layers if isinstance(spec.reach, Recurrent))
    is_mixed = attention.caps.graph == "mixed" and all(reach.in_place for reach in recurrent)
    places = settings.max_places if settings.speculator else 0
    prefill = PrefillGraphs(loaded.model, *parts, sizes, memory, loaded.step, places) if is_mixed else None
    with torch.inference_mode():
        max_tokens = max(decode.max_batch, 0 if prefill is None else prefill.max_tokens)
        attention.init_graph_state(decode.max_batch, max_tokens)
    return StepGraphs(decode=decode, prefill=prefill)
