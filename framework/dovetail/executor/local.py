"""`LocalExecutor`: one device, in the engine's process and thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from dovetail.base.settings import EngineSettings
from dovetail.messages import ProfileSpec
from dovetail.messages.executor import StepError
from dovetail.messages.step import (
    DecodeGraph,
    ExecutorInfo,
    GraphKey,
    PrefillGraph,
    PrepareResult,
    StepInput,
    StepLate,
    StepOutput,
)
from dovetail.plugins import LoadedPlugins
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.memory.estimates import image_token_bytes
from dovetail.runtime.memory.plan import chunk_size
from dovetail.runtime.profiling import TorchProfile
from dovetail.runtime.ranks import ALONE, Rank
from dovetail.runtime.runner import ModelRunner
from dovetail.runtime.step import InFlightStep

logger = logging.getLogger(__name__)


class LocalExecutor:
    """See `Executor`."""

    def __init__(self, settings: EngineSettings, plugins: LoadedPlugins, rank: Rank = ALONE) -> None:
        """Load the model, or this rank's share of it, and allocate the cache.

        Raises:
            ConfigError: The settings, the model or a plugin is at fault.
        """
        self.runner = ModelRunner(settings, plugins, rank)
        self.stepper = self.runner.stepper
        self._chunk_size = chunk_size(settings, device_of(self.runner.device).kind, self.runner.weight_bytes)
        self._in_flight: deque[InFlightStep] = deque()
        self._rank = rank.parallel.rank
        self._profile: TorchProfile | None = None

    @property
    def info(self) -> ExecutorInfo:
        """See `Executor`."""
        runner = self.runner
        return ExecutorInfo(
            architecture=runner.config.architecture,
            dtype=str(runner.dtype).removeprefix("torch."),
            device=str(runner.device),
            vocab_size=runner.config.vocab_size,
            hidden_size=runner.config.hidden_size,
            context_len=runner.memory_plan.context_len,
            page_size=runner.pool.page_size,
            num_pages=tuple(size - 1 for size in runner.pool.sizes),
            reaches=tuple(runner.pool.reaches),
            chunk_size=self._chunk_size,
            attention_backend=runner.chosen.label,
            attention_measured=runner.chosen.measured,
            kernels=runner.kernels.table,
            prefix_group=runner.attention.prefix_group,
            weight_bytes=runner.weight_bytes,
            kv_bytes=runner.pool.num_bytes,
            load_s=runner.load_s,
            graphs=tuple(runner.graph_keys),
            prepared=self._prepared(tuple(runner.captured)),
            generates=runner.config.generates,
            num_labels=runner.config.num_labels,
            pool=runner.config.pool,
            kept_masks=runner.masks.num_kept,
            max_image_patches=runner.memory_plan.image_patches,
            timed_patches=runner.timed_patches,
            image_token_bytes=image_token_bytes(runner.config, runner.dtype.itemsize),
            cuts_images=not any(spec.spans for spec in runner.config.layers),
        )

    @property
    def progress(self) -> int:
        """See `Executor`."""
        return self.stepper.progress.num

    def launch(self, step: StepInput) -> None:
        """See `Executor`."""
        with self._failing():
            self._in_flight.append(self.stepper.launch(step))

    def masks(self, num: int) -> npt.NDArray[np.int32]:
        """See `Executor`."""
        return self.runner.masks.lend(num)

    def choose(self, late: StepLate) -> None:
        """See `Executor`."""
        with self._failing():
            launched = self._in_flight.pop()
            self.stepper.choose(launched, late)
            self._in_flight.append(launched)

    def is_computing(self) -> bool:
        """See `Executor`. The step's logits are the last that was sent to the device."""
        return not device_of(self.runner.device).is_idle()

    def is_readable(self) -> bool:
        """Whether the device has computed the oldest step that has not been read."""
        return not self._in_flight or self._in_flight[0].is_computed

    def read(self) -> StepOutput:
        """See `Executor`."""
        with self._failing():
            return self.stepper.read(self._in_flight.popleft())

    def prepare(self, key: GraphKey | None = None) -> PrepareResult:
        """See `Executor`."""
        runner, before = self.runner, set(self.runner.captured)
        if key is None:
            runner.capture_queue.do_next()
        elif runner.graphs is not None:
            with torch.inference_mode():
                if isinstance(key, DecodeGraph):
                    runner.graphs.decode.capture(key)
                elif isinstance(key, PrefillGraph) and runner.graphs.prefill is not None:
                    runner.graphs.prefill.capture(key)
        return self._prepared(tuple(key for key in runner.captured if key not in before))

    def check(self) -> None:
        """See `Executor`; of one device, whatever it lacks shows in a step."""

    def device_memory(self) -> tuple[int, int]:
        """See `Executor`."""
        free, total = device_of(self.runner.device).memory() or (0, 0)
        return total - free, total

    def start_profile(self, spec: ProfileSpec) -> None:
        """See `Executor`."""
        self._profile = TorchProfile(spec, self._rank, self.runner.device)

    def stop_profile(self) -> list[str]:
        """See `Executor`."""
        profile, self._profile = self._profile, None
        return [] if profile is None else [profile.write()]

    def close(self) -> None:
        """See `Executor`; memory goes with the object."""

    def _prepared(self, captured: tuple[GraphKey, ...]) -> PrepareResult:
        left, most = self.runner.capture_queue.num_left, self.runner.max_prefill_tokens
        return PrepareResult(captured=captured, num_left=left, max_prefill_tokens=most)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn what a model, a backend or a sampler raises, whoever's plugin it is, into a `StepError`.

        Raises:
            Exception: What was raised, where the device is lost with it: nothing can be computed any more.
        """
        try:
            yield
        except Exception as error:
            raise step_error(error, self.runner.device) from error


def step_error(error: Exception, device: torch.device) -> StepError:
    """Say why a step failed.

    Raises:
        Exception: `error`, where the device is lost with it.
    """
    is_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )
    found = device_of(device)
    try:
        found.synchronize()
    except RuntimeError:
        raise error from None
    if is_memory:
        found.trim()
    if not is_memory:
        logger.error("A step failed; its requests are tried again.", exc_info=error)
    return StepError.of(error, is_memory=is_memory)
