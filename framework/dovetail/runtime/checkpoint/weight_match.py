"""Finds where each tensor of a checkpoint goes, by names and shapes alone, before any of them is read.

A `Move` is one tensor with the slots of one layer that it fills. Everything that does not fit is told at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch import Tensor

from dovetail.contracts.checkpoint import TensorHeader
from dovetail.contracts.model import WeightRule
from dovetail.runtime.checkpoint.folder import Account
from dovetail.sdk.config import some
from dovetail.sdk.layers.base import Layer, Slot

Shape = tuple[int, ...]
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""Of a layer, in its path."""


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor of the checkpoint and what it fills.

    Attributes:
        header: Its name, file and shape.
        path: The layer.
        slots: By expert, then by part; both have one entry where there is nothing to divide.
        widths: Rows of each part.
        is_stacked: The first axis counts the experts.
        is_transposed: The last two axes are swapped first.
        is_interleaved: The parts take turns row by row.
        is_flattened: Its axes become one first.
    """

    header: TensorHeader
    path: str
    slots: tuple[tuple[Slot, ...], ...]
    widths: tuple[int, ...]
    is_stacked: bool
    is_transposed: bool
    is_interleaved: bool
    is_flattened: bool = False

    def of(self, experts: range | None) -> tuple[tuple[Slot, ...], ...]:
        """Return the slots of some experts; None: all."""
        return self.slots if experts is None else self.slots[experts.start : experts.stop]

    def pieces(self, tensor: Tensor, experts: range | None = None) -> Iterator[tuple[Slot, Tensor]]:
        """Divide the tensor, or what it has of some experts, among their slots; every piece is a view."""
        if self.is_flattened:
            tensor = tensor.flatten()
        if self.is_transposed:
            tensor = tensor.transpose(-1, -2)
        for row, of_expert in zip(self.of(experts), tensor.unbind(0) if self.is_stacked else (tensor,), strict=True):
            num, start = len(row), 0
            for index, (slot, width) in enumerate(zip(row, self.widths, strict=True)):
                if self.is_interleaved:
                    yield slot, of_expert[index::num]
                else:
                    yield slot, of_expert if num == 1 else of_expert.narrow(0, start, width)
                start += width


def match_weights(
    layers: Mapping[str, Layer], rules: Sequence[WeightRule], headers: Sequence[TensorHeader], folder: Path
) -> list[Move]:
    """Say where every tensor goes, in the order of `headers`; those that are not needed are left out.

    Raises:
        ModelError: Tensors are missing, surplus, misshapen or there twice; all are named, with their files.
    """
    account, moves = Account(), []
    filled: dict[tuple[str, Slot], TensorHeader] = {}
    finder = RuleFinder(layers, rules)
    for header in headers:
        found = finder.find(header.name)
        if found is None:
            account.unexpected.append(f"{header.name} ({header.file.name})")
        elif found.target:
            move, problem = _move(layers[found.target], finder.wants[found.target][found.tensor], found, header)
            if move is None:
                account.misshapen.append(f"{header.name} {problem} ({header.file.name})")
                continue
            moves.append(move)
            for slot in (slot for row in move.slots for slot in row):
                if other := filled.get((found.target, slot)):
                    account.twice.append(f"{found.target}.{slot} by {other.name} and {header.name}")
                filled[found.target, slot] = header
    wanted = {(path, slot) for path, by_name in finder.wants.items() for one in by_name.values() for slot in one.shapes}
    if not account.misshapen:
        account.missing = named_missing(wanted - filled.keys(), filled)
    account.check(folder)
    return moves


def named_missing(missing: Iterable[tuple[str, Slot]], filled: Mapping[tuple[str, Slot], TensorHeader]) -> list[str]:
    """Name what is missing as the checkpoint would, by what it has for other layers, and as the model does."""
    known = {(NUMBER.sub("#", path), slot): (path, header.name) for (path, slot), header in filled.items()}
    places: dict[str, list[str]] = {}
    for path, slot in missing:
        other = known.get((NUMBER.sub("#", path), slot))
        name = "" if other is None else renumbered(other[1], other[0], path)
        places.setdefault(name, []).append(f"{path}.{slot}")
    plain = places.pop("", [])
    return sorted([*plain, *(f"{name} ({some(sorted(slots), 2)})" for name, slots in places.items())])


def renumbered(name: str, path: str, wanted: str) -> str:
    """Return the name that a tensor of layer `path` would have in layer `wanted`; empty where that cannot be told."""
    old, new, parts = NUMBER.findall(path), NUMBER.findall(wanted), name.split(".")
    at = [index for index, part in enumerate(parts) if part.isdecimal()][: len(old)]
    if [parts[index] for index in at] != old:
        return ""
    for index, number in zip(at, new, strict=True):
        parts[index] = number
    return ".".join(parts)


@dataclass(frozen=True, slots=True)
class Found:
    """What a rule says of a tensor: the layer's path (empty: not needed), which of its tensors, parts and expert."""

    target: str
    tensor: str = ""
    parts: tuple[str, ...] | None = None
    expert: int | None = None
    rule: WeightRule | None = None


@dataclass(frozen=True, slots=True)
class Wants:
    """What a layer wants of one of its tensors.

    Attributes:
        shapes: Of its slots.
        experts: Whose they are; empty: there are no experts.
        parts: Names of the parts, in order.
    """

    shapes: Mapping[Slot, Shape]
    experts: tuple[int, ...]
    parts: tuple[str, ...]


def wants_of(layer: Layer) -> dict[str, Wants]:
    """Return what a layer wants, by tensor. Once for each: one of hundreds of experts has thousands of slots."""
    by_name: dict[str, dict[Slot, Shape]] = {}
    for slot, shape in layer.slots().items():
        by_name.setdefault(slot.tensor, {})[slot] = shape
    return {
        name: Wants(
            shapes,
            tuple(sorted({slot.expert for slot in shapes if slot.expert is not None})),
            tuple(dict.fromkeys(slot.part for slot in shapes)),
        )
        for name, shapes in by_name.items()
    }


class RuleFinder:
    """Looks names up in a model's rules.

    Attributes:
        wants: What each layer wants, by path and tensor.
    """

    def __init__(self, layers: Mapping[str, Layer], rules: Sequence[WeightRule]) -> None:
        """Compile the patterns."""
        self.wants = {path: wants_of(layer) for path, layer in layers.items()}
        self._rules = [(re.compile(rule.module_pattern), rule) for rule in rules]
        self._tensors: dict[str, dict[str, str]] = {}
        for path, layer in layers.items():
            self._tensors[path] = {spelled: name for name in self.wants[path] for spelled in layer.spellings(name)}
        every = {spelled for of_layer in self._tensors.values() for spelled in of_layer}
        self._suffixes = sorted(every, key=lambda spelled: (-len(spelled), spelled))

    def find(self, name: str) -> Found | None:
        """Return what the first rule that knows a tensor says, or None."""
        suffixes = [suffix for suffix in self._suffixes if name.endswith(suffix)]
        for pattern, rule in self._rules:
            if not rule.target:
                if pattern.fullmatch(name):
                    return Found("", rule=rule)
                continue
            for suffix in suffixes:
                match = pattern.fullmatch(name[: len(name) - len(suffix)])
                found = None if match is None else self._found(match, rule, suffix)
                if found is not None:
                    return found
        return None

    def _found(self, match: re.Match[str], rule: WeightRule, suffix: str) -> Found | None:
        target = match.expand(rule.target)
        tensor = self._tensors.get(target, {}).get(suffix)
        if tensor is None:
            return None
        given = (rule.part,) if isinstance(rule.part, str) else rule.part
        parts = None if given is None else tuple(match.expand(part) for part in given)
        expert = None if rule.expert is None else int(match.expand(rule.expert))
        return Found(target, tensor, parts, expert, rule)


def _move(layer: Layer, wants: Wants, found: Found, header: TensorHeader) -> tuple[Move | None, str]:
    """Divide a tensor among a layer's slots; or say what is wrong with its shape."""
    wanted, experts = wants.shapes, wants.experts
    parts = found.parts if found.parts is not None else wants.parts
    is_stacked = bool(experts) and found.expert is None
    rows = experts if is_stacked else (found.expert,)
    slots = tuple(tuple(Slot(found.tensor, part, expert) for part in parts) for expert in rows)
    unknown = [slot for row in slots for slot in row if slot not in wanted]
    if unknown:
        return None, f"fills {some([str(slot) for slot in unknown])}, which the layer does not have"
    param: Tensor = getattr(layer, found.tensor)
    if param.is_floating_point() != header.is_floating_point:
        return None, f"{header.dtype} instead of {str(param.dtype).removeprefix('torch.')}"
    shapes = [wanted[slot] for slot in slots[0]]
    shape: Shape = (sum(s[0] for s in shapes), *shapes[0][1:])
    steps = found.rule.steps if found.rule is not None else ()
    has_columns = len(shape) > 1
    if is_stacked:
        shape = (len(experts), *shape)
    turned = (*shape[:-2], shape[-1], shape[-2]) if has_columns else shape
    is_transposed = has_columns and ("transpose" in steps or (is_stacked and header.shape == turned != shape))
    expected = turned if is_transposed else shape
    is_flattened = "flatten" in steps and len(shape) == 1
    if ((prod(header.shape),) if is_flattened else header.shape) != expected:
        return None, f"{list(header.shape)} instead of {list(expected)}"
    is_interleaved = "deinterleave" in steps and len(parts) > 1
    widths = tuple(s[0] for s in shapes)
    if is_interleaved and len(set(widths)) > 1:
        return None, f"has parts of {list(widths)} rows, which cannot take turns"
    flags = (is_stacked, is_transposed, is_interleaved, is_flattened)
    return Move(header, found.target, slots, widths, *flags), ""
