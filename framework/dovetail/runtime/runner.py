"""Owns the model on the device, from its start in phases on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from dovetail.base.settings import EngineSettings
from dovetail.messages.step import GraphKey
from dovetail.plugins import LoadedPlugins
from dovetail.runtime.memory.plan import MemoryPlan
from dovetail.runtime.ranks import ALONE, Rank
from dovetail.runtime.start import allocate, capture, check, load, probe

# Names and times the phases of a start: whatever fails says in which of them it did.

logger = logging.getLogger(__name__)

Phase = Literal["check", "load", "plan", "allocate", "compile", "probe", "capture"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class StartPhases:
    """The phases of one start.

    Attributes:
        seconds: What each took that has ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = {}

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Time a phase. What it raises gets a note that says so; see `described` and `said`."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            error.add_note(f"in the start's phase {name!r}")
            raise
        self.seconds[name] = time.perf_counter() - began

    def report(self) -> None:
        """Log what each phase took."""
        took = ", ".join(f"{name} {self.seconds[name]:.1f} s" for name in PHASES if name in self.seconds)
        logger.info("Start: %s.", took)


class ModelRunner:
    """One model, its KV pool and device state, and the attention backend that serves it."""

    def __init__(self, settings: EngineSettings, plugins: LoadedPlugins, rank: Rank = ALONE) -> None:
        """Start: each phase takes what those before have returned.

        Raises:
            ConfigError: The model, the device, the memory or a plugin cannot serve these settings.
        """
        phases = StartPhases()
        with phases.phase("check"):
            checked = check.check(settings, plugins, rank)
        with phases.phase("load"):
            loaded = load.load(checked)
        with phases.phase("plan"):
            planned = allocate.plan(checked, loaded)
        with phases.phase("allocate"):
            made = allocate.allocate(checked, loaded, planned)
        with phases.phase("compile"):
            tried = probe.Probe(checked, loaded, made)
            compiled = capture.compile_kernels(checked, loaded, planned, made, tried)
        with phases.phase("probe"):
            tried.run()
        with phases.phase("capture"):
            self.timed_patches = capture.capture(checked, made, compiled)
        phases.report()
        self.load_s = sum(phases.seconds.values())
        self.device, self.dtype, self.config = checked.device, checked.dtype, checked.config
        self.quantization, self.chosen = checked.quantization, checked.chosen
        self.kernels = checked.kernels
        self.model, self.weight_bytes = loaded.model, loaded.weight_bytes
        self.pool, self.state, self.attention = made.pool, made.state, made.attention
        self.masks, self.graphs, self.stepper = made.masks, made.graphs, made.stepper
        self.capture_queue, self._trials = compiled.queue, compiled.trials
        self._memory = checked.memory

    @property
    def memory_plan(self) -> MemoryPlan:
        """How the device's memory is divided."""
        return self._memory.plan

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
