"""Finds the device and the attention backend that serve a model, and says why the others do not."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.base.settings import EngineSettings
from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, KVPool
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError, PluginError
from dovetail.contracts.needs import AttentionCaps, unserved
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.loader import describe
from dovetail.plugins.plan import AUTO
from dovetail.runtime.attention.auto import KIND, Auto, Names, Picked, Requirements
from dovetail.runtime.attention.grouped import attended_groups, of_group
from dovetail.runtime.attention.hybrid import Backend, HybridBackend, hybrid
from dovetail.runtime.attention.measure import Measuring

logger = logging.getLogger(__name__)


# What stands for attention where no layer of a model attends: its layers keep states alone.


class AbsentAttention(AttentionBackend):
    """Plans nothing and attends to nothing; tokens have pages all the same, which take no memory."""

    caps = AttentionCaps(
        devices=frozenset({"*"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        graph="mixed",
        batch_invariant=True,
    )

    def __init__(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> None:
        self.kv_pool, self._name = kv_pool, config.architecture

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        raise ModelError(f"{self._name}: layer {layer.index} attends, and the specs declare no layer that does")

    forward_decode = forward_extend


@dataclass(frozen=True, slots=True)
class Chosen:
    """What serves the groups of a model.

    Attributes:
        backends: A class for each group.
        names: Those of each group that compute its prompts and its decode rows.
        label: All of that in short: `a`; `a+b` for prefill by a and decode by b; with the groups where they differ.
        measured: Figures of what `auto` measured, or "".
    """

    backends: list[Backend]
    names: Names
    label: str
    measured: str


def choose_backends(
    plugins: LoadedPlugins,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    settings: EngineSettings,
    measuring: Measuring | None = None,
    decided: Names = (),
) -> Chosen:
    """Return the backend class that serves each cache group of the model here.

    Args:
        plugins: Of this process.
        config: This rank's share of the model's facts.
        device: Where to compute.
        dtype: The model's.
        settings: What was asked for.
        measuring: How to measure candidates of `auto`, of which several may serve; None: the first that does is taken.
        decided: What the first rank has chosen: then nothing is measured.

    Raises:
        ModelError: No backend can: its layers need what nothing provides.
        PluginError: The one asked for cannot, or no candidate of `auto` can; every reason is given.
    """
    if (reason := unserved(config)) is not None:
        raise ModelError(reason)
    groups = attended_groups(config)
    picked = []
    for at, group in enumerate(groups):
        if not group.layers:
            _warn_of_names(config, settings)
            picked.append(Picked(AbsentAttention, ("none", "none")))
            continue
        name = group.name if len(groups) > 1 else ""
        wanted = Requirements(
            of_group(config, group), device, dtype, settings.page_size, name, settings.batch_invariant
        )
        auto = Auto(plugins, wanted, measuring, decided[at] if decided else None)
        picked.append(_choose(plugins, wanted, settings, auto))
    labels = ["+".join(dict.fromkeys(one.names)) for one in picked]
    if len(set(labels)) > 1:
        labels = [f"{label} ({group.name})" for label, group in zip(labels, groups, strict=True)]
    measured = [one.measured for one in picked if one.measured]
    return Chosen(
        [one.backend for one in picked], tuple(one.names for one in picked), ", ".join(dict.fromkeys(labels)),
        "; ".join(dict.fromkeys(measured)),
    )  # fmt: skip


def _warn_of_names(config: ModelConfig, settings: EngineSettings) -> None:
    """Say that backends were named for a model that needs none."""
    given = settings.attention_backend, settings.prefill_attention_backend, settings.decode_attention_backend
    if named := [name for name in given if name not in (AUTO, None)]:
        logger.warning("%s has no layer that attends: %s has no effect.", config.architecture, ", ".join(named))


def _choose(plugins: LoadedPlugins, wanted: Requirements, settings: EngineSettings, auto: Auto) -> Picked:
    """Return what serves one group."""
    given = {"prefill": settings.prefill_attention_backend, "decode": settings.decode_attention_backend}
    asked = {use: None if name == AUTO else name for use, name in given.items()}
    rest = None if all(asked.values()) else _rest(plugins, wanted, settings, auto)
    if rest is not None and not any(asked.values()):
        return rest
    halves = []
    for at, (use, name) in enumerate(asked.items()):
        if name is not None:
            halves.append((_named(plugins, use, name, wanted), name))
        elif rest is not None:
            half = rest.backend
            if issubclass(half, HybridBackend):
                half = (half.prefill_class, half.decode_class)[at]
            halves.append((half, rest.names[at]))
    (prefill, prefill_name), (decode, decode_name) = halves
    measured = "" if rest is None else rest.measured
    names = prefill_name, decode_name
    if prefill is decode:
        return Picked(prefill, names, measured)
    both = hybrid(prefill, decode, names)
    reason = wanted.why_not(both)
    if reason is not None:
        raise PluginError(
            f"--prefill-attention-backend {prefill_name} with --decode-attention-backend {decode_name}: {reason}"
        )
    return Picked(both, names, measured)


def _rest(plugins: LoadedPlugins, wanted: Requirements, settings: EngineSettings, auto: Auto) -> Picked:
    """Return what `--attention-backend` means for a group."""
    planned = [plugin for plugin in plugins.plan.of_kind(KIND) if plugin.use == ""]
    if any(not plugin.requested for plugin in planned):
        return auto.pick()
    name = settings.attention_backend
    return Picked(_named(plugins, "", name, wanted), (planned[0].name if planned else name,) * 2)


def _named(plugins: LoadedPlugins, use: str, name: str, wanted: Requirements) -> Backend:
    """Return the backend that was asked for, if it serves."""
    flag = f"--{use}-attention-backend" if use else "--attention-backend"
    for planned, backend in plugins.candidates(KIND):
        if planned.use != use:
            continue
        reason = wanted.why_not(backend)
        if reason is None:
            served: Backend = backend
            return served
        suggestion = (
            "leave the flag out for a backend that can" if use else "use --attention-backend auto for one that can"
        )
        raise PluginError(f"{flag} {name!r} cannot serve this model: {describe(planned)}: {reason}; {suggestion}")
    raise PluginError(f"{flag} {name!r}: not in the plugin plan of this process; plan it by that name")
