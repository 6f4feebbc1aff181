"""What settings ask of devices and their memory, checked before anything is read."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.base.settings import EngineSettings
from dovetail.contracts.errors import ConfigError

EQUAL = 0.9
"""The share of the most that any rank has free, which every rank must have."""


def gib(num: int) -> str:
    """Write bytes for people."""
    return f"{num / 2**30:,.2f} GiB" if abs(num) >= 1 << 28 else f"{num / 2**20:,.1f} MiB"


def check_settings(settings: EngineSettings, device: str | None = None) -> None:
    """Refuse memory settings that cannot be met on any device, or not on one of this kind.

    Raises:
        ConfigError: Naming the flags and what to give instead.
    """
    utilization, size, most = settings.gpu_memory_utilization, settings.page_size, settings.max_total_tokens
    if utilization is not None and settings.mem_fraction_static is not None:
        raise ConfigError(
            "--mem-fraction-static and --gpu-memory-utilization both size the KV cache; give one of them: the first is "
            "the share of free memory for weights and KV cache, the second the share of all memory for everything"
        )
    _check_experts(settings)
    if settings.devices is not None and device == "cpu":
        raise ConfigError(f"--devices {settings.device_list}: they are GPUs, and the device is cpu; leave it out")
    if utilization is not None and device == "cpu":
        raise ConfigError(
            f"--gpu-memory-utilization {utilization:g}: the device is cpu; give --mem-fraction-static or "
            "--max-total-tokens"
        )
    if most is not None and most < size:
        raise ConfigError(
            f"--max-total-tokens {most}: less than one page of {size} tokens; give at least {size}, or a smaller "
            "--page-size"
        )
    if most is not None and settings.context_length is not None and settings.context_length > most // size * size:
        raise ConfigError(
            f"--context-length {settings.context_length}: a KV cache of --max-total-tokens {most} holds requests of "
            f"{most // size * size} tokens at most; raise --max-total-tokens or lower --context-length"
        )


def check_devices(settings: EngineSettings, num: int, visible: str | None) -> tuple[int, ...]:
    """Return the GPU of each rank, of those that this process sees.

    Args:
        settings: `devices`, or the first ones if it has none.
        num: How many there are.
        visible: `CUDA_VISIBLE_DEVICES`, which chooses them.

    Raises:
        ConfigError: Too few are there, or given, or one is given twice.
    """
    ranks, given = settings.tensor_parallel_size, settings.devices
    there = f"{num} GPU{'' if num == 1 else 's'} {'is' if num == 1 else 'are'} here"
    there += "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    if num < 1:
        raise ConfigError(f"--device {settings.device}: no device of it is here; give --device cpu to compute without")
    if given is None:
        if ranks > num:
            raise ConfigError(
                f"--tensor-parallel-size {ranks}: {there}; give at most {num}, or --device cpu to compute without them"
            )
        return tuple(range(ranks))
    said = f"--devices {settings.device_list}"
    if len(given) != ranks:
        raise ConfigError(f"{said}: {len(given)} for {ranks} ranks; give one for each of --tensor-parallel-size")
    if len(set(given)) < len(given):
        raise ConfigError(f"{said}: one is given twice; every rank needs its own")
    if lost := [index for index in given if index >= num]:
        raise ConfigError(f"{said}: there is no device {lost[0]}; {there}, counted from 0")
    return given


def check_equal(free: Sequence[tuple[str, int]]) -> None:
    """Refuse ranks of which one has much less memory than another: pages are the same on all.

    Args:
        free: Device and free bytes of each rank, before its weights.

    Raises:
        ConfigError: Naming the two.
    """
    (least, low), (most, high) = min(free, key=lambda one: one[1]), max(free, key=lambda one: one[1])
    if low < EQUAL * high:
        raise ConfigError(
            f"{least} has {gib(low)} free, and {most} {gib(high)}: ranks need the same; stop what else runs there, or "
            "choose others with --devices"
        )


def _check_experts(settings: EngineSettings) -> None:
    """Refuse experts that are handed out to other ranks than there are.

    Raises:
        ConfigError: Naming the flags and what to give instead.
    """
    ranks, size = settings.tensor_parallel_size, settings.expert_parallel_size
    if size == 1 and settings.expert_parallel:
        raise ConfigError(
            "--expert-parallel-size 1 with --expert-parallel: the one asks for shares of every expert, the other for "
            "whole experts; leave one of them out"
        )
    if size is not None and size > 1 and ranks == 1:
        raise ConfigError(
            f"--expert-parallel-size {size} with one rank: whole experts are handed out to the ranks of "
            f"--tensor-parallel-size; give --tensor-parallel-size {size}, too, or leave --expert-parallel-size out"
        )
    if size not in (None, 1, ranks):
        raise ConfigError(
            f"--expert-parallel-size {size} with --tensor-parallel-size {ranks}: whole experts are handed out to all "
            f"ranks; give {ranks} for that, or 1 for shares of every expert"
        )
    if settings.expert_shard == "expert" and ranks == 1:
        raise ConfigError("--expert-parallel: one rank has all experts; give --tensor-parallel-size, or leave it out")
