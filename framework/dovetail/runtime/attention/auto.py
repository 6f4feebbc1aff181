"""What `auto` takes for one cache group: the first candidate that serves, or what measures fastest where several do.

The default is the first planned candidate that serves. Others are measured beside it where a device is worth measuring,
if they serve, too, and can be captured into graphs wherever the default can; they may come from any package. A
batch-invariant engine measures nothing: one backend has to compute all of a request's tokens.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from dovetail.cache.pool import PagedKVPool
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import DovetailError, PluginError
from dovetail.contracts.needs import unmet
from dovetail.plugins import LoadedPlugins, PlannedPlugin
from dovetail.runtime.attention.grouped import attended_groups
from dovetail.runtime.attention.hybrid import Backend, hybrid
from dovetail.runtime.attention.measure import (
    STEPS,
    USES,
    AttentionTimes,
    MeasuredLayers,
    Measuring,
    is_measurable,
    measure,
)
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.kernels.figures import digest_of, versions

logger = logging.getLogger(__name__)

KIND = "attention_backend"
GRAPHS = ("none", "decode", "mixed")
"""Values of `AttentionCaps.graph`, each of which covers those before it."""
Names = tuple[tuple[str, str], ...]
"""Of each group: the backend of its prompts, and that of its decode rows."""


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
        reason = reason or backend.why_not(self.config, self.device, self.dtype, self.page_size)
        return reason or self._why_not_made(backend)

    def _why_not_made(self, backend: Backend) -> str | None:
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
            device_of(self.device).trim()
        return None


@dataclass(frozen=True, slots=True)
class Picked:
    """A class for a group; the names of what computes its prompts and its decode rows; figures, or ""."""

    backend: Backend
    names: tuple[str, str]
    measured: str = ""


@dataclass(slots=True)
class Auto:
    """Chooses for one group.

    Attributes:
        plugins: Of this process.
        wanted: What is to be served.
        measuring: How to measure; None: not at all.
        decided: The names that the first rank has chosen.
    """

    plugins: LoadedPlugins
    wanted: Requirements
    measuring: Measuring | None = None
    decided: tuple[str, str] | None = None

    def pick(self) -> Picked:
        """Return what is taken; one log line says so, with figures, and why others are not.

        Raises:
            PluginError: No candidate serves, or not what the first rank has chosen.
        """
        if self.decided is not None:
            return self._decided(self.decided)
        names = [self._name(plugin) for plugin in self._planned()]
        reasons: dict[str, str] = {}
        if self.measuring is None or not self._has_choice():
            picked = self._first(names, reasons)
        else:
            picked = self._measured(self.measuring, dict(self._candidates()), reasons)
        shown = _joined_reasons({name: reasons[name] for name in names if name in reasons}) or "no other candidate"
        of = f" of {self.wanted.group}" if self.wanted.group else ""
        label = "+".join(dict.fromkeys(picked.names))
        measured = f"; measured, {picked.measured}" if picked.measured else ""
        logger.info("Attention backend%s: auto chose %s (%s%s).", of, label, shown, measured)
        return picked

    def _planned(self) -> list[PlannedPlugin]:
        return [plugin for plugin in self.plugins.plan.of_kind(KIND) if plugin.use == ""]

    def _candidates(self) -> Iterator[tuple[str, Backend]]:
        """Yield candidates in order; each is imported when it is reached."""
        return ((self._name(plugin), backend) for plugin, backend in self.plugins.candidates(KIND) if plugin.use == "")

    def _name(self, plugin: PlannedPlugin) -> str:
        """Return the name of a candidate; with its package where another one has the same."""
        is_alone = sum(other.name == plugin.name for other in self._planned()) == 1
        return plugin.name if is_alone else plugin.qualified

    def _has_choice(self) -> bool:
        """Whether there may be something to measure: several candidates, none of which a hook has named."""
        planned = self._planned()
        is_open = len(planned) > 1 and not planned[0].preferred and not self.wanted.batch_invariant
        return is_open and is_measurable(self.wanted.config)

    def _first(self, names: list[str], reasons: dict[str, str]) -> Picked:
        """Return the first that serves; those after it are not even imported. Adds to the reasons."""
        for name, backend in self._candidates():
            reason = self.wanted.why_not(backend)
            if reason is None:
                reasons |= dict.fromkeys(names[names.index(name) + 1 :], "comes after it")
                return Picked(backend, (name, name))
            reasons[name] = reason
        raise self._refusal(reasons)

    def _measured(self, measuring: Measuring, loaded: dict[str, Backend], reasons: dict[str, str]) -> Picked:
        """Return what figures of an earlier start say, or find out who serves, and measure. Adds to the reasons."""
        digest = self._digest(loaded)
        file = f"attention-{digest}.json"
        measured_times = AttentionTimes.remembered(measuring.folder, file, list(loaded), len(STEPS))
        if measured_times is not None:
            taken = {measured_times.fastest(use) for use in USES}  # the others are not even made
            if not any(self.wanted.why_not(loaded[name]) for name in taken):
                return self._by(measured_times, loaded, reasons)
        serving: dict[str, Backend] = {}
        for name, backend in loaded.items():
            default = next(iter(serving.values()), backend)
            if GRAPHS.index(backend.caps.graph) < GRAPHS.index(default.caps.graph):
                reasons[name] = "comes after it, and is not captured into the graphs that it is"
            elif (reason := self.wanted.why_not(backend)) is not None:
                reasons[name] = reason
            else:
                serving[name] = backend
        if not serving:
            raise self._refusal(reasons)
        first = next(iter(serving))
        if len(serving) == 1:
            return Picked(serving[first], (first, first))
        wanted = self.wanted
        world = MeasuredLayers(wanted.config, wanted.device, wanted.dtype, wanted.page_size, measuring.kernels)
        measured_times = measure(serving, world, measuring, digest)
        measured_times.remember(measuring.folder, file)
        return self._by(measured_times, serving, reasons)

    @staticmethod
    def _refusal(reasons: Mapping[str, str]) -> PluginError:
        if not reasons:
            return PluginError("--attention-backend 'auto': no backend of the plugin plan can be loaded here")
        return PluginError(
            f"--attention-backend 'auto' cannot serve this model: {_joined_reasons(reasons)}; "
            "`dovetail plugin list` shows what else is installed; --device, --dtype or --page-size may help"
        )

    def _by(self, measured_times: AttentionTimes, classes: Mapping[str, Backend], reasons: dict[str, str]) -> Picked:
        """Return what figures say is fastest, the default where nothing ran; adds to the reasons."""
        reasons |= measured_times.failed
        if not measured_times.times:
            first = next(iter(classes))
            return Picked(classes[first], (first, first))
        names = measured_times.fastest("prefill"), measured_times.fastest("decode")
        for name in measured_times.times.keys() - set(names):
            taken = zip(USES, names, strict=True)
            ratios = [measured_times.ratio(name, use) / measured_times.ratio(best, use) for use, best in taken]
            reasons[name] = f"takes {ratios[0]:.2f} times as long for prompts, {ratios[1]:.2f} for decode rows"
        if names[0] == names[1]:
            return Picked(classes[names[0]], names, str(measured_times))
        both = hybrid(classes[names[0]], classes[names[1]], names)
        if (reason := self.wanted.why_not(both)) is None:
            return Picked(both, names, str(measured_times))
        default = next(iter(measured_times.times))
        reasons |= {name: f"{'+'.join(names)}: {reason}" for name in names if name != default}
        return Picked(classes[default], (default, default), str(measured_times))

    def _digest(self, loaded: Mapping[str, Backend]) -> str:
        """Return a name for all that figures depend on."""
        wanted, planned = self.wanted, {self._name(plugin): plugin for plugin in self._planned()}
        return digest_of(
            [
                [[planned[name].qualified, planned[name].version, each.library()] for name, each in loaded.items()],
                sorted({repr(dataclasses.replace(spec, index=0)) for spec in wanted.config.layers}),
                [str(wanted.dtype), wanted.page_size, device_of(wanted.device).model],
                versions(),
                STEPS,
            ]
        )

    def _decided(self, names: tuple[str, str]) -> Picked:
        """Return what the first rank has chosen, if it serves here."""
        loaded: dict[str, Backend] = {}
        for name, backend in self._candidates():
            loaded[name] = backend
            if loaded.keys() >= set(names):
                break
        if absent := [name for name in names if name not in loaded]:
            raise PluginError(f"attention backend {absent[0]!r}, which the first rank has chosen, is not loaded here")
        prefill, decode = (loaded[name] for name in names)
        backend = prefill if prefill is decode else hybrid(prefill, decode, names)
        if (reason := self.wanted.why_not(backend)) is not None:
            raise PluginError(f"attention by {'+'.join(names)}, which the first rank has chosen: {reason}")
        return Picked(backend, names)


def _joined_reasons(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
