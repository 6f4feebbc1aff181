"""What a model keeps of earlier tokens, as data: groups of layers whose cache has one lifetime and one shape.

Nobody writes groups: they follow from the model's `LayerSpec`s (`cache_groups`). Everything that is kept per token
under the same page ids (keys and values, a latent row, scales) is a tensor of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.contracts.model import LayerSpec


@dataclass(frozen=True, slots=True)
class Full:
    """A query sees everything before it."""

    def start(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        return 0

    def __str__(self) -> str:
        """Name it."""
        return "full"


@dataclass(frozen=True, slots=True)
class Window:
    """A query sees the last `size` tokens, itself included."""

    size: int

    def start(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        return max(0, position - self.size + 1)

    def __str__(self) -> str:
        """Name it."""
        return f"window-{self.size}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A query sees what is before it in its own stretch of `size` tokens, counted from the beginning."""

    size: int

    def start(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        return position - position % self.size

    def __str__(self) -> str:
        """Name it."""
        return f"chunk-{self.size}"


@dataclass(frozen=True, slots=True)
class Recurrent:
    """All before a token is folded into tensors of a fixed size, one set for each request.

    `interval` is the number of tokens that are folded in at once: copies of a state stand at its multiples only.
    """

    interval: int = 1

    def grid(self, page_size: int) -> int:
        """Return at multiples of how many tokens a copy may stand: a prefix that is shared ends with a page."""
        return lcm(page_size, self.interval)

    def __str__(self) -> str:
        """Name it."""
        return "recurrent"


FULL = Full()
Reach = Full | Window | Chunk | Recurrent
"""How far back a layer sees, and so how long its cache is needed."""


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of a layer's cache; `shape` is that per token, in a `Recurrent` group that per request.

    `dtype` is the name of one, or None for that in which the model is served.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose cache lives equally long and has the same shape: they share page ids.

    Attributes:
        name: In messages: its reach, and a number where several groups have the same.
        reach: How far its layers see.
        layers: The tensors of each layer, by the layer's index.
    """

    name: str
    reach: Reach
    layers: Mapping[int, tuple[CacheTensor, ...]]

    @property
    def tensors(self) -> tuple[CacheTensor, ...]:
        """Of each of its layers."""
        return next(iter(self.layers.values()))


def cache_groups(specs: Sequence[LayerSpec]) -> tuple[CacheGroup, ...]:
    """Gather layers into groups: `Full` ones first, then in the order of their first layers."""
    found: dict[tuple[Reach, tuple[CacheTensor, ...]], dict[int, tuple[CacheTensor, ...]]] = {}
    for spec in specs:
        found.setdefault((spec.reach, spec.cache_tensors), {})[spec.index] = spec.cache_tensors
    groups: list[CacheGroup] = []
    for (reach, _), layers in sorted(found.items(), key=lambda item: not isinstance(item[0][0], Full)):
        num = sum(group.reach == reach for group in groups)
        groups.append(CacheGroup(f"{reach}-{num + 1}" if num else str(reach), reach, layers))
    return tuple(groups)
