"""Measures the device's memory while an engine starts, and allocates its KV pool as the plan says."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dovetail.base.settings import EngineSettings
from dovetail.cache.pool import KVCache
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ConfigError
from dovetail.runtime.checkpoint.files import Checkpoint
from dovetail.runtime.checkpoint.weight_size import weight_size
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.memory.checks import gib
from dovetail.runtime.memory.host import host_bytes, print_table, resident_bytes
from dovetail.runtime.memory.plan import NUM_PADDING_ROWS, DeviceBytes, MemoryPlan, plan_memory
from dovetail.runtime.ranks import ALONE, Rank

logger = logging.getLogger(__name__)

IMPORTED_LATER = 56 << 20
"""Bytes that an engine's process takes after it is measured. Grammar backends, the tokenizer and the libraries of both
are imported beside the weights: about 50 MiB with the built-in ones."""


class DeviceMemory:
    """One engine's memory on its device; made before the weights are loaded.

    Attributes:
        plan: How the memory is divided: before `fit` by the checkpoint's headers, then by what is there.
    """

    def __init__(
        self,
        settings: EngineSettings,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        rank: Rank = ALONE,
        checkpoint: Checkpoint | None = None,
        built: int | None = None,
        *,
        head_row_bytes: int = 0,
    ) -> None:
        """Check what can be checked without the weights. Ranks of one host share its memory.

        Raises:
            ConfigError: The model or the KV cache does not fit, or the settings cannot be met.
        """
        self._settings, self._device, self._dtype = settings, device, dtype
        self._num_ranks, self._meeting, self._is_first = rank.parallel.size, rank.meeting, rank.parallel.rank == 0
        self._config = config.of_rank(self._num_ranks)
        self._bytes = self._measure()
        resident = resident_bytes() if device_of(device).is_host else None
        self._process_bytes = None if resident is None else resident + IMPORTED_LATER
        name = str(dtype).removeprefix("torch.")
        self._weights = weight_size(
            None if checkpoint is None else checkpoint.headers,
            config,
            name,
            head_row_bytes=head_row_bytes,
            built=built,
            num_ranks=self._num_ranks,
        )
        self._notes = () if checkpoint is None else checkpoint.notes
        self.plan = self._make_plan(self._weights.num_bytes)

    def built(self) -> None:
        """Tell the other ranks that the weights are about to be read.

        Raises:
            ConfigError: The ranks do not go together.
        """
        if self._meeting is not None:
            self._meeting.built(self._bytes)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Turn a lack of memory while the weights are made into one line.

        Raises:
            ConfigError: The device has no room for the weights.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the model does not fit on {self._bytes.name}: {gib(self._bytes.free)} were free before the weights "
                f"({str(error).splitlines()[0]}); stop what else runs there, or use a smaller model"
            ) from None

    def fit(self, weight_bytes: int) -> MemoryPlan:
        """Plan anew with the weights in place.

        Raises:
            ConfigError: There is no memory for a KV pool.
        """
        device_of(self._device).trim()  # what loading left in torch's hands is free for the pool
        meeting, left = self._meeting, self._measure().free
        own = weight_bytes + self._weights.repacked_bytes
        self.plan = (
            self._plan_for(own, left)
            if meeting is None
            else meeting.loaded(
                left,
                lambda least: self._plan_for(own, min(least, self._measure().free)),  # the others have loaded by now
            )
        )
        return self.plan

    def make_pool(self) -> KVCache:
        """Allocate the KV pool as planned.

        Raises:
            ConfigError: There is no memory for it.
        """
        plan = self.plan
        try:
            sizes = [group.num_pages + 1 for group in plan.groups]
            rows = plan.max_running_requests + NUM_PADDING_ROWS
            return KVCache(self._config.cache_groups, sizes, plan.page_size, self._dtype, self._device, rows)
        except (RuntimeError, OSError) as error:  # of the device, of the host
            raise ConfigError(
                f"the KV cache of {plan.num_tokens} tokens ({gib(plan.kv_bytes)}) cannot be allocated: lower "
                f"--max-total-tokens or --mem-fraction-static ({str(error).splitlines()[0]})"
            ) from None

    def started(self, max_prefill_tokens: int | None = None) -> None:
        """Show how the memory is divided; graphs are captured, and trial steps fit of so many prompt tokens."""
        chunk = self.plan.step_tokens - self.plan.max_running_requests
        if max_prefill_tokens is not None and max_prefill_tokens < chunk:
            note = (
                f"Steps have at most {max_prefill_tokens:,} prompt tokens, not {chunk:,}: memory ran out in a trial of "
                f"more; --chunked-prefill-size {max_prefill_tokens} says the same."
            )
            self.plan = dataclasses.replace(self.plan, notes=(*self.plan.notes, note))
        if not device_of(self._device).is_host:
            device_of(self._device).synchronize()
            left = self._bytes.left or self._bytes.free
            measured = left - self.plan.kv_bytes - device_bytes(self._device).free
            self.plan = dataclasses.replace(self.plan, measured_bytes=max(0, measured))
        self.plan = dataclasses.replace(self.plan, process_bytes=self._process_bytes)
        for note in self.plan.notes if self._is_first else ():
            logger.warning("%s", note)
        if logger.isEnabledFor(logging.INFO) and self._is_first:
            print_table(self.plan, to_stderr=True)

    def _measure(self) -> DeviceBytes:
        return device_bytes(self._device).of_rank(self._num_ranks)

    def _plan_for(self, weight_bytes: int, left: int) -> MemoryPlan:
        """Plan with the weights in place, and so many bytes left."""
        self._bytes = dataclasses.replace(self._bytes, left=left)
        return self._make_plan(weight_bytes)

    def _make_plan(self, weight_bytes: int) -> MemoryPlan:
        has_graphs = device_of(self._device).captures and not self._settings.disable_cuda_graph
        name = str(self._dtype).removeprefix("torch.")
        plan = plan_memory(self._settings, self._config, name, self._bytes, weight_bytes, has_graphs=has_graphs)
        return dataclasses.replace(plan, weight_notes=self._notes)


def device_bytes(device: torch.device) -> DeviceBytes:
    """Measure a device."""
    found = device_of(device)
    if (own := found.memory()) is None:
        return host_bytes()
    free, total = own
    return DeviceBytes(kind=found.kind, name=f"{device} {found.model}", total=total, free=free)
