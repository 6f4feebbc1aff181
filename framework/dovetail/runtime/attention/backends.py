"""Finds the device and the attention backend that serve a model, and says why the others do not."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dovetail.cache.pool import PagedKVPool
from dovetail.contracts.attention import AttentionBackend
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.needs import unmet, unserved
from dovetail.errors import ConfigError, DovetailError, ModelError, PluginError
from dovetail.plugins import LoadedPlugins, PlannedPlugin
from dovetail.plugins.loader import describe
from dovetail.plugins.plan import AUTO
from dovetail.runtime.attention.grouped import attended_groups, of_group
from dovetail.runtime.attention.hybrid import hybrid
from dovetail.runtime.memory.plan import check_devices
from dovetail.settings import EngineSettings

logger = logging.getLogger(__name__)

KIND = "attention_backend"
Backend = type[AttentionBackend]


def find_device(settings: EngineSettings, rank: int = 0) -> torch.device:
    """Return the device of a rank, as `--device` and `--devices` say, and make it the one that this thread uses.

    Raises:
        ConfigError: It is not there, or not enough of them are.
    """
    kind = kind_of(settings.device)
    if kind == "cpu":
        return torch.device("cpu")
    given = check_devices(settings, torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if settings.devices is not None or settings.tensor_parallel_size > 1:
        torch.cuda.set_device(given[rank])
    return torch.device(kind, torch.cuda.current_device())


def kind_of(name: str) -> str:
    """Return the kind of device of `--device`.

    Raises:
        ConfigError: There is none.
    """
    found = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if found else "cpu"
    if name == "cuda" and not found:
        built = torch.version.cuda
        cause = (
            f"torch {torch.__version__} is built without CUDA; install a build with it"
            if built is None
            else f"torch finds no CUDA device here (its CUDA is {built}); `nvidia-smi` shows driver and devices"
        )
        raise ConfigError(f"--device cuda: {cause}, or use --device cpu")
    return name


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a backend has to serve: the layers of one cache group. `group` names it where there are several."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    page_size: int
    group: str = ""
    batch_invariant: bool = False

    def why_not(self, backend: Backend) -> str | None:
        """Say why a backend cannot serve it, or None; what its caps lack holds, whatever its own `why_not` says."""
        reason = unmet(self.config, backend.caps)
        if reason is None and self.batch_invariant and not backend.caps.batch_invariant:
            reason = "it is not batch-invariant, and --batch-invariant is given"
        return reason or backend.why_not(self.config, self.device, self.dtype, self.page_size)

    def why_not_made(self, backend: Backend) -> str | None:
        """Make it once over a pool of two pages, before any weights are loaded; say what it raised, or None."""
        try:
            [group] = attended_groups(self.config)
            backend(self.config, PagedKVPool(group, 2, self.page_size, self.dtype, self.device), self.device)
        except DovetailError as error:
            return f"it cannot be made: {error}"
        except Exception as error:  # a stranger's constructor may raise anything; what it raised is told
            logger.debug("making %s failed", backend.__name__, exc_info=True)
            return f"it cannot be made: {type(error).__name__}: {' '.join(str(error).split())}"
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return None


def choose_backends(
    plugins: LoadedPlugins, config: ModelConfig, device: torch.device, dtype: torch.dtype, settings: EngineSettings
) -> tuple[list[Backend], str]:
    """Return the backend class that serves each cache group of the model here, and a name of them.

    The name is `a+b` for prefill by a and decode by b, and says for which groups where they differ.

    Raises:
        ModelError: No backend can: its layers need what nothing provides.
        PluginError: The one asked for cannot, or no candidate of `auto` can; every reason is given.
    """
    if (reason := unserved(config)) is not None:
        raise ModelError(reason)
    groups = attended_groups(config)
    picked = []
    for group in groups:
        name = group.name if len(groups) > 1 else ""
        wanted = Requirements(
            of_group(config, group), device, dtype, settings.page_size, name, settings.batch_invariant
        )
        picked.append(_choose(plugins, wanted, settings))
    names = [name for _, name in picked]
    if len(set(names)) > 1:
        names = [f"{name} ({group.name})" for name, group in zip(names, groups, strict=True)]
    return [backend for backend, _ in picked], ", ".join(dict.fromkeys(names))


def _choose(plugins: LoadedPlugins, wanted: Requirements, settings: EngineSettings) -> tuple[Backend, str]:
    """Return the class for one group, and its name."""
    given = {"prefill": settings.prefill_attention_backend, "decode": settings.decode_attention_backend}
    asked = {use: None if name == AUTO else name for use, name in given.items()}
    if asked["prefill"] is None and asked["decode"] is None:
        return _pick(plugins, "", settings.attention_backend, wanted)
    picked = [
        _pick(plugins, "" if name is None else use, name or settings.attention_backend, wanted)
        for use, name in asked.items()
    ]
    (prefill, prefill_name), (decode, decode_name) = picked
    if prefill is decode:
        return prefill, prefill_name
    both = hybrid(prefill, decode, (prefill_name, decode_name))
    reason = wanted.why_not(both) or wanted.why_not_made(both)
    if reason is not None:
        raise PluginError(
            f"--prefill-attention-backend {prefill_name} with --decode-attention-backend {decode_name}: {reason}"
        )
    return both, f"{prefill_name}+{decode_name}"


def _pick(plugins: LoadedPlugins, use: str, name: str, wanted: Requirements) -> tuple[Backend, str]:
    """Return the first backend planned for `use` that serves; what `auto` chose is logged with the reasons."""
    flag = f"--{use}-attention-backend" if use else "--attention-backend"
    reasons: list[str] = []
    names = [planned.name for planned in plugins.plan.of_kind(KIND) if planned.use == use]
    for planned, backend in _planned(plugins, use):
        reason = wanted.why_not(backend) or wanted.why_not_made(backend)
        if reason is None:
            if not planned.requested:
                later = [f"{n}: comes after it" for n in names[names.index(planned.name) + 1 :]]
                others = "; ".join([*reasons, *later]) or "no other candidate"
                of = f" of {wanted.group}" if wanted.group else ""
                logger.info("Attention backend%s: auto chose %s (%s).", of, planned.name, others)
            return backend, planned.name
        reasons.append(f"{planned.name}: {reason}" if not planned.requested else f"{describe(planned)}: {reason}")
    if not reasons:
        raise PluginError(f"{flag} {name!r}: not in the plugin plan of this process; plan it by that name")
    raise PluginError(
        f"{flag} {name!r} cannot serve this model: {'; '.join(reasons)}; {_suggestion(plugins, use, name)}"
    )


def _planned(plugins: LoadedPlugins, use: str) -> Iterator[tuple[PlannedPlugin, Backend]]:
    for planned, backend in plugins.candidates(KIND):
        if planned.use == use:
            yield planned, backend


def _suggestion(plugins: LoadedPlugins, use: str, name: str) -> str:
    if name == "auto":
        return "`dovetail plugin list` shows what else is installed; --device, --dtype or --page-size may help"
    return "leave the flag out for a backend that can" if use else "use --attention-backend auto for one that can"
