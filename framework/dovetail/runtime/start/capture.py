"""Phases `compile` and `capture`: make the kernels that steps launch, and record the graphs that run them."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch

from dovetail.base.settings import EngineSettings
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.graphs.capture_queue import CaptureQueue
from dovetail.runtime.image_processor import processor_of
from dovetail.runtime.kernels.repeats import Repeats
from dovetail.runtime.memory.plan import MemoryPlan
from dovetail.runtime.start.allocate import Allocated
from dovetail.runtime.start.check import Checked
from dovetail.runtime.start.load import LoadedModel
from dovetail.runtime.start.probe import Probe
from dovetail.runtime.start.tower import TowerTrials, blank_images, timed_patches
from dovetail.runtime.stepper import StepGraphs
from dovetail.runtime.warm_up import EagerWarmUp, WarmUpLimits

logger = logging.getLogger(__name__)

START_S = 3.0
"""Seconds for what is not needed at once, before the engine is ready; what is left is done while it is idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What is captured and tried next.

    Attributes:
        trials: Steps that are run so that nothing is compiled while serving; None: nothing would be.
        queue: Graphs and trials that are left.
    """

    trials: EagerWarmUp | None
    queue: CaptureQueue


def compile_kernels(
    checked: Checked, loaded: LoadedModel, planned: MemoryPlan, made: Allocated, probe: Probe
) -> Compiled:
    """Compile what the probe and steps will launch, and meet the other ranks."""
    compiles, graphs = device_of(checked.device).compiles, made.graphs
    prefill, decode = (None, None) if graphs is None else (graphs.prefill, graphs.decode)
    repeats = Repeats(loaded.model if compiles else None)
    trials = None
    if compiles and checked.config.generates:  # nothing is compiled on CPU
        # Ranks add up what their layers make: all have to go through the same ones, whatever each finds alike.
        alike = repeats if checked.rank.parallel.size == 1 else None
        limits = limits_of(checked, planned, 0 if decode is None else decode.max_batch)
        trials = EagerWarmUp(made.stepper, made.state, made.pool, checked.config.vocab_size, limits, alike)
    tasks = [task for task in (prefill, decode, trials, _tower(checked, planned, made)) if task is not None]
    if checked.compiled is not None:
        with repeats.left_out():
            rehearsals = [task.rehearse for task in (probe, *tasks)]
            checked.compiled.compile([*rehearsals, lambda: made.masks.warm_up(checked.config.vocab_size)])
    if checked.rank.meeting is not None:
        checked.rank.meeting.connect()
    if checked.rank.links is not None:
        checked.kernels.connect(checked.rank.links.share)
    return Compiled(trials=trials, queue=CaptureQueue(tasks))


def capture(checked: Checked, made: Allocated, compiled: Compiled) -> int:
    """Capture what the engine is not ready without, and some more; return `ServedModel.timed_patches`."""
    settings = checked.settings
    if device_of(checked.device).compiles:
        _capture_first(made.graphs)
        made.masks.warm_up(checked.config.vocab_size)
        if checked.rank.meeting is None:  # else the first rank says what comes next
            compiled.queue.do_some(start_seconds(settings))
    elif settings.wait_for_kernels:
        logger.info("--wait-for-kernels: on a CPU nothing is compiled or captured; there is nothing to wait for.")
    if checked.compiled is not None:
        checked.compiled.report_late()
    checked.memory.started(None if compiled.trials is None else compiled.trials.max_prefill_tokens)
    images, vision = made.state.images, checked.config.vision
    if images is None or vision is None or not (settings.times_images and device_of(checked.device).is_host):
        return 0
    processor = processor_of(checked.plugins.plan, ModelFolder(settings.folder))
    if processor is None:
        return 0
    most, layers = checked.memory.plan.image_patches, made.stepper.progress
    return timed_patches(images, processor, vision.width, most, lambda: layers.num)


def _tower(checked: Checked, planned: MemoryPlan, made: Allocated) -> TowerTrials | None:
    """Return what runs the vision tower first; None where there is none, or nothing is compiled."""
    images, settings = made.state.images, checked.settings
    if images is None or not device_of(checked.device).compiles:
        return None
    processor = processor_of(checked.plugins.plan, ModelFolder(settings.folder))
    return None if processor is None else TowerTrials(images, blank_images(processor, planned.image_patches))


def limits_of(checked: Checked, planned: MemoryPlan, graph_rows: int) -> WarmUpLimits:
    """Return the bounds of real steps; `graph_rows` are run by graphs."""
    return WarmUpLimits(
        max_requests=planned.max_running_requests,
        max_prefill_tokens=planned.step_tokens - planned.max_running_requests,
        context_len=planned.context_len,
        graph_rows=graph_rows,
        tiles_by_tokens=checked.config.experts is not None or bool(checked.quantization),
    )


def start_seconds(settings: EngineSettings) -> float:
    """Most seconds for what is not needed at once, before the engine is ready: no bound with `wait_for_kernels`."""
    return math.inf if settings.wait_for_kernels else START_S


def _capture_first(graphs: StepGraphs | None) -> None:
    if graphs is not None:
        with torch.inference_mode():
            if graphs.prefill is not None:
                graphs.prefill.capture_first()
            graphs.decode.capture_first()
