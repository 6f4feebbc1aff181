"""Phase `load`: builds the model and fills its weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from dovetail.base.process_limits import num_cores
from dovetail.contracts.errors import PluginError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import CausalLM
from dovetail.contracts.ranks import PeerMemory
from dovetail.plugins.loader import describe
from dovetail.runtime.checkpoint.weights import fill, load_checkpoint
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.start.check import Checked
from dovetail.runtime.step_kernels import StepKernels, bind_step
from dovetail.runtime.stepper import StepThreads

CACHED_PRIMITIVES = "128"
"""Products on CPU whose code oneDNN and torch's binding of it keep, by shape, instead of 1,024 each: every number of
tokens in a step is a shape of its own, and each takes about 150 KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """The model on the device.

    Attributes:
        model: With this rank's share of the weights.
        weight_bytes: What they take.
        step: What steps compute around it.
        threads: How many compute a step on a CPU; None elsewhere.
    """

    model: CausalLM
    weight_bytes: int
    step: StepKernels
    threads: StepThreads | None = None


def load(checked: Checked) -> LoadedModel:
    """Build the model and load this rank's share.

    Raises:
        ConfigError: The checkpoint or the plugin is at fault, or the device has no room.
    """
    parallel, is_host = checked.rank.parallel, device_of(checked.device).is_host
    if is_host:
        bound_primitive_caches()
    ctx = BuildContext(
        device=checked.device, dtype=checked.dtype, factory=checked.factory, parallel=parallel,
        batch_invariant=checked.settings.batch_invariant, kernels=checked.kernels,
    )  # fmt: skip
    with checked.memory.loading(), torch.inference_mode():
        label = describe(checked.plugins.plan.of_kind("model")[0])
        try:
            model = checked.plugin.build(checked.config, ctx)
        except PluginError as error:  # of operations, which know no plugin: whose model asks for them
            error.add_note(f"while {label} is built")
            raise
        if not isinstance(model, nn.Module):
            raise PluginError(f"{label}: build() returned {type(model).__name__}; return a torch.nn.Module")
        dtype = str(checked.dtype).removeprefix("torch.")
        step = bind_step(checked.kernels, checked.config, dtype, invariant=checked.settings.batch_invariant)
        checked.kernels.freeze()
        checked.kernels.connect(partial(PeerMemory.alone, parallel.rank, parallel.size, device=checked.device))
        if checked.rank.meeting is not None:
            checked.rank.meeting.kernels = tuple(use for use in checked.kernels.table if use.measured)
        model.eval()
        checked.memory.built()
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        if checked.filler is not None:
            fill(model, checked.filler)
        elif checked.checkpoint is not None:
            load_checkpoint(model, checked.plugin.weight_map(checked.config), checked.checkpoint)
    threads = step_threads(checked, size) if is_host else None
    return LoadedModel(model=model, weight_bytes=size, step=step, threads=threads)


def bound_primitive_caches() -> None:
    """Bound what oneDNN keeps, before its first use; whoever has set its variables has decided."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, CACHED_PRIMITIVES)


def step_threads(checked: Checked, weight_bytes: int) -> StepThreads:
    """Return the threads of a step: as many as given, or one per 64 MiB of weights and all cores for long prompts.

    A barrier costs more than a smaller share of a decode step saves. Where no bit may change, the number does not. Nor
    where threads spin while they wait, as in a process that is not the engine's own: beside other work, prompts of 150
    to 1,900 tokens then took three times as long by two threads as by one.
    """
    most = max(1, num_cores() // checked.rank.parallel.size)
    few = checked.settings.num_threads or max(1, min(most, weight_bytes >> 26))
    spins = os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive"
    is_fixed = checked.settings.num_threads is not None or checked.settings.batch_invariant or spins
    return StepThreads(few, few if is_fixed else most)
