"""Which plugin makes a model's matrices: the plain ones, or those of the quantisation that its checkpoint names."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.layers import LayerFactory
from dovetail.contracts.model import WeightRule
from dovetail.contracts.quantization import Quantization, Stored, StoredTensor
from dovetail.errors import PluginError
from dovetail.layers.plain import PLAIN
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.loader import describe
from dovetail.runtime.hf_config import quantization_config
from dovetail.runtime.weight_size import TensorHeader

logger = logging.getLogger(__name__)
KIND = "quantization"


def choose_quantization(plugins: LoadedPlugins, hf: Mapping[str, Any]) -> tuple[str, type[Quantization]] | None:
    """Return name and class of the plan's quantisation that reads this checkpoint; None where the plan has none.

    Raises:
        PluginError: The one asked for cannot, or no candidate of `auto` can; every reason is given.
    """
    config, reasons = quantization_config(hf), []
    for planned, cls in plugins.candidates(KIND):
        reason = cls.why_not(config)
        if reason is None:
            logger.info("Quantization: %s reads the checkpoint.", planned.name)
            return planned.name, cls
        reasons.append(f"{describe(planned)}: {reason}")
        if planned.requested:
            break
    if reasons:
        raise PluginError(f"--quantization: this checkpoint cannot be read: {'; '.join(reasons)}")
    return None


def factory_of(
    chosen: type[Quantization] | None,
    hf: Mapping[str, Any],
    rules: Sequence[WeightRule],
    headers: Sequence[TensorHeader] | None,
) -> LayerFactory:
    """Return what makes the model's matrices.

    Args:
        chosen: The quantisation, or None.
        hf: The parsed `config.json`.
        rules: The model's.
        headers: Of the checkpoint's tensors; None: there is none.
    """
    if chosen is None:
        return PLAIN
    tensors = {} if headers is None else stored_tensors(rules, headers)
    return chosen(quantization_config(hf), Stored(tensors, is_known=headers is not None)).factory(PLAIN)


def stored_tensors(rules: Sequence[WeightRule], headers: Sequence[TensorHeader]) -> dict[str, tuple[StoredTensor, ...]]:
    """Return the tensors of each layer by its path, as the rules map modules; those that no rule knows are left out."""
    patterns = [(re.compile(rule.module_pattern), rule) for rule in rules]
    found: dict[str, list[StoredTensor]] = {}
    for header in headers:
        for path, tensor in _places(header, patterns):
            found.setdefault(path, []).append(tensor)
    return {path: tuple(tensors) for path, tensors in found.items()}


def _places(
    header: TensorHeader, patterns: Sequence[tuple[re.Pattern[str], WeightRule]]
) -> list[tuple[str, StoredTensor]]:
    """Where a tensor belongs: the longest name of a module before it that a rule knows."""
    name = header.name
    dots = [index for index, char in enumerate(name) if char == "."]
    for cut in (len(name), *reversed(dots)):
        for pattern, rule in patterns:
            match = pattern.fullmatch(name[:cut])
            if match is None:
                continue
            if not rule.target:
                return []
            parts = (rule.part,) if isinstance(rule.part, str) else rule.part or ()
            part = "+".join(match.expand(each) for each in parts)
            return [(match.expand(rule.target), StoredTensor(name[cut:], part, header.dtype, header.shape))]
    return []
