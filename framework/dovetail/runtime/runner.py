"""Owns the model on the device: builds it, sizes the cache, captures graphs."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dovetail.cache.pool import StateCache
from dovetail.contracts.cache import Recurrent
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import CausalLM, ModelPlugin
from dovetail.contracts.quantization import Quantization, Target
from dovetail.errors import ConfigError, ModelError, PluginError
from dovetail.messages.step import GraphKey
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.loader import describe
from dovetail.runtime.attention.backends import Chosen, choose_backends, find_device
from dovetail.runtime.attention.grouped import make_attention
from dovetail.runtime.attention.measure import cuda_measuring
from dovetail.runtime.batch_invariance import check_model
from dovetail.runtime.cache_dtype import with_cache_dtype
from dovetail.runtime.checkpoint.files import Checkpoint
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.quantization import (
    Place,
    built_bytes,
    choose_quantization,
    converted,
    factory_of,
)
from dovetail.runtime.checkpoint.weights import fill_dummy, load_checkpoint
from dovetail.runtime.device.device_state import DeviceState
from dovetail.runtime.device.graph_pool import GraphPool
from dovetail.runtime.device.penalties import TokenCounts
from dovetail.runtime.device_memory import DeviceMemory
from dovetail.runtime.graphs.capture_queue import CaptureQueue
from dovetail.runtime.graphs.decode import BUCKETS, DecodeGraphs
from dovetail.runtime.graphs.prefill import PrefillGraphs
from dovetail.runtime.hf_config import CONFIG_KEYS, quant_method
from dovetail.runtime.kernels.repeats import Repeats
from dovetail.runtime.memory import prefill_sizes
from dovetail.runtime.memory.plan import MemoryPlan, context_len
from dovetail.runtime.ranks import ALONE, Rank
from dovetail.runtime.sampling.draw_graphs import SampleTables
from dovetail.runtime.sampling.masks import MaskBuffer, num_kept
from dovetail.runtime.sampling.processors import Processors
from dovetail.runtime.stepper import StepGraphs, Stepper
from dovetail.runtime.warm_up import EagerWarmUp, StepLimits
from dovetail.settings import EngineSettings

if TYPE_CHECKING:
    from dovetail.runtime.kernels.ahead import CompiledAhead

logger = logging.getLogger(__name__)

CACHED_PRIMITIVES = "128"
"""Products on CPU whose code oneDNN and torch's binding of it keep, by shape, instead of 1,024 each: every number of
tokens in a step is a shape of its own, and each takes about 150 KB."""
START_S = 3.0
"""Seconds for what is not needed at once, before the engine is ready; what is left is done while it is idle."""


class ModelRunner:
    """One model, its KV pool and device state, and the attention backend that serves it."""

    def __init__(self, settings: EngineSettings, plugins: LoadedPlugins, rank: Rank = ALONE) -> None:
        """Build and load this rank's share.

        Raises:
            ConfigError: The model, the device, the memory or a plugin cannot serve these settings.
        """
        started = time.perf_counter()
        self.device = find_device(settings, rank.parallel.rank)
        folder = ModelFolder.read(settings.folder, weights=settings.load_format != "dummy")
        hf = folder.config
        kernels = self._kernels(settings, plugins, hf)
        plugin = _model_plugin(plugins)
        chosen = choose_quantization(plugins, hf)
        config = folder.model_config(plugin.config_from_hf, served=() if chosen is None else CONFIG_KEYS)
        logger.info("%s is served by %s.", config.architecture, describe(plugins.plan.of_kind("model")[0]))
        self.quantization, quantization = chosen or ("", None)
        self.config = with_cache_dtype(replace(config, context_len=context_len(settings, config)), settings)
        self.dtype: torch.dtype = getattr(torch, self.config.dtype if settings.dtype == "auto" else settings.dtype)
        local = self.config.of_rank(rank.parallel.size)  # what is cached and attended here
        check_model(plugin, self.config, self.device, settings, self.quantization)
        self.chosen = self._choose_attention(plugins, local, settings, rank)
        _check_speculator(plugins, self.config)
        checkpoint = self._checkpoint(plugin, settings, hf, quantization)
        headers = None if checkpoint is None else checkpoint.headers
        factory = factory_of(quantization, hf, plugin.weight_map(self.config), headers)
        is_built = rank.parallel.size > 1 or (checkpoint is None and quantization is not None)
        built = built_bytes(plugin, self.config, self.dtype, factory, rank.parallel) if is_built else None
        memory = DeviceMemory(settings, self.config, self.device, self.dtype, rank, checkpoint, built)
        if self.device.type == "cpu":
            bound_primitive_caches()
        with memory.loading():
            ctx = BuildContext(
                device=self.device, dtype=self.dtype, factory=factory, parallel=rank.parallel,
                batch_invariant=settings.batch_invariant,
            )  # fmt: skip
            self.model, self.weight_bytes = self._load(plugin, checkpoint, ctx, memory)
        if self.device.type == "cpu":
            torch.set_num_threads(settings.num_threads or _useful_threads(self.weight_bytes, rank.parallel.size))
        self.pool = memory.make_pool(self.weight_bytes)
        self.memory_plan, self.context_len = memory.plan, memory.context_len
        max_pages = -(-self.context_len // settings.page_size)
        states = StateCache(self.pool) if self.pool.states else None
        self.state = DeviceState(
            settings.max_running_requests, max_pages, self.device, max(1, len(self.pool.pools)), states
        )
        self.state.params.apart = settings.batch_invariant
        self.attention = make_attention(
            self.chosen.backends, local, self.pool, self.state.page_tables, self.device,
            batch_invariant=settings.batch_invariant,
        )  # fmt: skip
        self.masks, counts = self._tables(settings)
        masks = self.masks
        self.graphs = graphs = self._graphs(settings, memory.plan, SampleTables(masks, counts))
        processors = Processors.make(plugins, self.config.vocab_size, settings.max_running_requests, self.device)
        self.stepper = Stepper(self.model, self.attention, self.state, self.pool, masks, counts, graphs, processors)
        prefill, decode = (None, None) if graphs is None else (graphs.prefill, graphs.decode)
        repeats = Repeats(self.model if self.device.type == "cuda" else None)
        # Ranks add up what their layers make: all have to go through the same ones, whatever each finds alike.
        self._trials = self._warm_up(memory.plan, decode, repeats if rank.parallel.size == 1 else None)
        tasks = [task for task in (prefill, decode, self._trials) if task is not None]
        self.capture_queue = CaptureQueue(tasks)
        if kernels is not None:
            rehearsals = [task.rehearse for task in tasks]
            with repeats.left_out():
                kernels.compile([*rehearsals, lambda: masks.warm_up(self.config.vocab_size)])
        if rank.meeting is not None:
            rank.meeting.connect()
        if self.device.type == "cuda":
            self._capture_first(graphs)
            masks.warm_up(self.config.vocab_size)
            if rank.meeting is None:  # else the first rank says what comes next
                self.capture_queue.do_some(start_seconds(settings))
        elif settings.wait_for_kernels:
            logger.info("--wait-for-kernels: on a CPU nothing is compiled or captured; there is nothing to wait for.")
        if kernels is not None:
            kernels.report_late()
        memory.started(self.max_prefill_tokens)
        self.load_s = time.perf_counter() - started

    @property
    def graph_keys(self) -> list[GraphKey]:
        """Graphs that may be captured."""
        graphs = self.graphs
        return [] if graphs is None else [*graphs.decode.keys, *(graphs.prefill.keys if graphs.prefill else ())]

    @property
    def captured(self) -> list[GraphKey]:
        """Those of them that are there."""
        graphs = self.graphs
        return [] if graphs is None else [*graphs.decode.captured, *(graphs.prefill.captured if graphs.prefill else ())]

    @property
    def max_prefill_tokens(self) -> int | None:
        """Most prompt tokens of a step that were found to fit, None where nothing was tried."""
        return None if self._trials is None else self._trials.max_prefill_tokens

    def _choose_attention(
        self, plugins: LoadedPlugins, config: ModelConfig, settings: EngineSettings, rank: Rank
    ) -> Chosen:
        """Choose what attends: the first rank for all."""
        measuring = None
        if self.device.type == "cuda":
            measuring = cuda_measuring(compiles_ahead=not settings.disable_compile_ahead)
        decided = () if rank.meeting is None else rank.meeting.attention
        chosen = choose_backends(plugins, config, self.device, self.dtype, settings, measuring, decided)
        if rank.meeting is not None:
            rank.meeting.attention = chosen.names
        return chosen

    def _kernels(self, settings: EngineSettings, plugins: LoadedPlugins, hf: Mapping[str, Any]) -> CompiledAhead | None:
        """Begin to prepare the kernels that this engine will launch, where it has any."""
        if self.device.type != "cuda" or settings.disable_compile_ahead:
            return None
        from dovetail.runtime.kernels.ahead import CompiledAhead  # imports Triton

        told = {"model_path", "random_seed", "report_cache", "wait_for_kernels"}
        if not quant_method(hf) and settings.quantization in (None, "auto"):
            told.add("load_format")  # plain weights and dummies launch the same
        return CompiledAhead([settings.model_dump(mode="json", exclude=told), hf, plugins.states()])

    def _tables(self, settings: EngineSettings) -> tuple[MaskBuffer, TokenCounts]:
        """Make what holds masks and counts; where graphs may read them, each row has its place from the start."""
        vocab, may_capture = self.config.vocab_size, self.device.type == "cuda" and not settings.disable_cuda_graph
        num_rows = settings.max_running_requests if may_capture else 0
        num_slots, words = len(self.state.params.rows) if may_capture else 0, (vocab + 31) // 32
        masks = MaskBuffer(words, self.device, min(num_rows, BUCKETS[-1]), num_kept(words) if may_capture else 0)
        return masks, TokenCounts(vocab, self.device, num_slots)

    def _graphs(self, settings: EngineSettings, plan: MemoryPlan, tables: SampleTables) -> StepGraphs | None:
        """Make what captures graphs, where device, backend and settings allow them."""
        if self.device.type != "cuda" or settings.disable_cuda_graph or self.attention.caps.graph == "none":
            return None
        if not self.config.generates:
            return None  # what is captured ends in logits, and pooled rows run eagerly
        parts = (self.model, self.attention, self.state)
        pool = GraphPool(self.device)
        sizes = prefill_sizes.sizes(
            self.weight_bytes, plan.step_tokens - plan.max_running_requests, plan.max_running_requests
        )
        decode = DecodeGraphs(*parts, self.pool.page_size, settings.max_running_requests, pool, tables)
        # A chunk's states are copied at places that the host names: that cannot be recorded.
        is_mixed = self.attention.caps.graph == "mixed" and self.state.states is None
        prefill = PrefillGraphs(*parts, sizes, pool) if is_mixed else None
        with torch.inference_mode():
            max_tokens = max(decode.max_batch, 0 if prefill is None else prefill.max_tokens)
            self.attention.init_graph_state(decode.max_batch, max_tokens)
        return StepGraphs(decode=decode, prefill=prefill)

    @staticmethod
    def _capture_first(graphs: StepGraphs | None) -> None:
        """Capture what the engine is not ready without."""
        if graphs is not None:
            with torch.inference_mode():
                if graphs.prefill is not None:
                    graphs.prefill.capture_first()
                graphs.decode.capture_first()

    def _warm_up(
        self, plan: MemoryPlan, decode: DecodeGraphs | None, repeats: Repeats | None = None
    ) -> EagerWarmUp | None:
        """Make the list of steps that are run so that their kernels are compiled; nothing is compiled on CPU."""
        if self.device.type != "cuda" or not self.config.generates:
            return None
        limits = StepLimits(
            max_requests=plan.max_running_requests,
            max_prefill_tokens=plan.step_tokens - plan.max_running_requests,
            context_len=plan.context_len,
            graph_rows=0 if decode is None else decode.max_batch,
            tiles_by_tokens=self.config.experts is not None or bool(self.quantization),
        )
        return EagerWarmUp(self.stepper, self.state, self.pool, self.config.vocab_size, limits, repeats)

    def _checkpoint(
        self,
        plugin: type[ModelPlugin],
        settings: EngineSettings,
        hf: Mapping[str, Any],
        quantization: type[Quantization] | None,
    ) -> Checkpoint | None:
        """What is loaded; None: nothing, weights are dummies."""
        if settings.load_format == "dummy":
            return None
        target = Target(str(self.dtype).removeprefix("torch."), self.device.type)
        return converted(quantization, hf, plugin, self.config, Place(settings.folder, target))

    def _load(
        self,
        plugin: type[ModelPlugin],
        checkpoint: Checkpoint | None,
        ctx: BuildContext,
        memory: DeviceMemory,
    ) -> tuple[CausalLM, int]:
        with torch.inference_mode():
            model = plugin.build(self.config, ctx)
            if not isinstance(model, nn.Module):
                raise PluginError(f"model {self.config.architecture}: build() must return a torch.nn.Module")
            model.eval()
            memory.built()
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            if checkpoint is None:
                fill_dummy(model)
            else:
                load_checkpoint(model, plugin.weight_map(self.config), checkpoint)
        return model, size


def bound_primitive_caches() -> None:
    """Bound what oneDNN keeps, before its first use; whoever has set its variables has decided."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, CACHED_PRIMITIVES)


def start_seconds(settings: EngineSettings) -> float:
    """Most seconds for what is not needed at once, before the engine is ready: no bound with `wait_for_kernels`."""
    return math.inf if settings.wait_for_kernels else START_S


def _useful_threads(weight_bytes: int, num_ranks: int) -> int:
    """One thread per 64 MiB of weights: a barrier costs more than a smaller share of a step saves."""
    return max(1, min(len(os.sched_getaffinity(0)) // num_ranks, weight_bytes >> 26))


def _check_speculator(plugins: LoadedPlugins, config: ModelConfig) -> None:
    """Refuse drafts for a model that cannot take them back.

    Raises:
        ConfigError: It has recurrent layers.
    """
    for planned in plugins.plan.of_kind("speculator"):
        if any(isinstance(group.reach, Recurrent) for group in config.cache_groups):
            raise ConfigError(
                f"--speculator {planned.name!r}: {config.architecture} has recurrent layers, whose states take in "
                "drafts that do not hold and cannot give them back; leave out --speculator"
            )


def _model_plugin(plugins: LoadedPlugins) -> type[ModelPlugin]:
    planned = plugins.plan.of_kind("model")
    if len(planned) != 1:
        raise ModelError(f"the plugin plan must hold one model, it holds {len(planned)}")
    found: type[ModelPlugin] = plugins.get("model", planned[0].qualified)
    return found
