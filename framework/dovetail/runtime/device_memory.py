"""Measures the device's memory while an engine starts, and allocates its KV pool."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dovetail.cache.pool import PagedKVPool, page_bytes
from dovetail.contracts.model import ModelConfig
from dovetail.errors import ConfigError
from dovetail.runtime.memory import context_len
from dovetail.settings import EngineSettings

logger = logging.getLogger(__name__)

MAX_CPU_KV_BYTES = 4 << 30


class DeviceMemory:
    """One engine's memory on its device; made before the weights are loaded.

    Attributes:
        context_len: Longest request in tokens; bounded by the pool once that is made.
    """

    def __init__(self, settings: EngineSettings, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        """Check what can be checked without the weights.

        Raises:
            ConfigError: The settings cannot be met.
        """
        self.context_len = context_len(settings, config)
        self._settings, self._config, self._device, self._dtype = settings, config, device, dtype

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
                f"the weights do not fit on {self._device}: {str(error).splitlines()[0]}; use a smaller model, a "
                "smaller --dtype, or stop what else runs there"
            ) from None

    def make_pool(self, weight_bytes: int) -> PagedKVPool:
        """Allocate the KV pool, weights already loaded: as many tokens as asked for, else as memory and use allow.

        Raises:
            ConfigError: There is no memory for it.
        """
        settings = self._settings
        size = settings.page_size
        per_page = page_bytes(self._config, size, self._dtype)
        useful = settings.max_running_requests * -(-self.context_len // size)
        if settings.max_total_tokens is not None:
            num = -(-settings.max_total_tokens // size)
        else:
            num = min(useful, _kv_budget(settings, self._device) // per_page)
        if num < 2:
            raise ConfigError(
                f"no memory for the KV cache: one page of {size} tokens takes {per_page / 2**20:.1f} MiB; lower "
                "--page-size or raise --mem-fraction-static"
            )
        try:
            pool = PagedKVPool(self._config, num + 1, size, self._dtype, self._device)
        except RuntimeError as error:
            raise ConfigError(
                f"the KV cache of {num * size} tokens ({num * per_page / 2**30:.1f} GiB) cannot be allocated: lower "
                f"--max-total-tokens or --mem-fraction-static ({str(error).splitlines()[0]})"
            ) from None
        # The pool bounds what one request can hold; the last token of a request needs no page.
        self.context_len = min(self.context_len, num * size)
        return pool

    def started(self) -> None:
        """Say how the memory is divided; graphs are captured."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            logger.debug("%.2f of %.2f GiB are free", free / 2**30, total / 2**30)


def _kv_budget(settings: EngineSettings, device: torch.device) -> int:
    """Bytes for the KV cache, weights already loaded."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - total * (1 - settings.mem_fraction_static)))
    return min(_free_host_bytes() // 2, MAX_CPU_KV_BYTES)


def _free_host_bytes() -> int:
    """Memory that the host can give without swapping; Linux's own estimate."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        logger.debug("no /proc/meminfo; assuming 2 GiB of free memory")
    return 2 << 30
