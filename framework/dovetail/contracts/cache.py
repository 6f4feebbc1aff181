"""What a model keeps of earlier tokens, as data: groups of layers whose cache has one lifetime and one shape.

Nobody writes groups: they follow from the model's `LayerSpec`s (`contracts/config.py`). Everything that is kept per
token under the same page ids (keys and values, a latent row, scales) is a tensor of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Literal, get_args

from dovetail.contracts.errors import ModelError


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

    `interval` is the number of tokens that are folded in at once: copies of a state stand at its multiples only. Layers
    that are a `Mixer` are `in_place`: they read and write states where these stand, and copies cost no time.
    """

    interval: int = 1
    in_place: bool = False

    def grid(self, page_size: int) -> int:
        """Return at multiples of how many tokens a copy may stand: a prefix that is shared ends with a page."""
        return lcm(page_size, self.interval)

    def __str__(self) -> str:
        """Name it."""
        return "recurrent"


FULL = Full()
Reach = Full | Window | Chunk | Recurrent
"""How far back a layer sees, and so how long its cache is needed."""


DTYPE_BYTES = {
    **{"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2},
    **{"float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1},
}
"""What a tensor of a cache may consist of, by name, and its size."""


ScaledDtype = Literal["int8", "float8_e4m3fn"]
SCALED_DTYPES: tuple[ScaledDtype, ...] = get_args(ScaledDtype)
"""In what keys, values and latent rows may be cached instead of the model's dtype, with a scale for each head."""


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of a layer's cache; `shape` is that per token, in a `Recurrent` group that per request.

    `dtype` is the name of one, or None for that in which the model is served. Of a latent row the whole is the key, and
    the first `values` numbers are the value. `shard` is the axis that ranks divide; None: each keeps all.
    `dtypes` are others that a state in float32 may have, if `--state-dtype` names one.

    `parts` are what stands one after the other on that axis, each divided by itself: how many numbers, and how many of
    them a rank keeps at least. Ranks beyond that keep the same ones.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    values: int = 0
    shard: int | None = None
    dtypes: tuple[str, ...] = ()
    parts: tuple[tuple[int, int], ...] = ()

    def of_rank(self, num_ranks: int) -> CacheTensor:
        """Return what one of several ranks keeps.

        Raises:
            ModelError: They cannot divide it evenly.
        """
        if self.shard is None or num_ranks == 1:
            return self
        parts = [
            (max(least, num // num_ranks), num, least) for num, least in self.parts or ((self.shape[self.shard], 1),)
        ]
        for each, num, least in parts:
            if each * num_ranks % num or each % least:
                raise ModelError(f"{num} of {self.name!r} cannot be divided among {num_ranks} ranks")
        at = self.shard % len(self.shape)
        return replace(
            self, shape=(*self.shape[:at], sum(each for each, _, _ in parts), *self.shape[at + 1 :]), parts=()
        )


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose cache lives equally long and has the same shape: they share page ids.

    Attributes:
        name: In messages: its reach, and a number where several groups have the same.
        reach: How far its layers see.
        layers: The tensors of each layer, by the layer's index; none of one that reads another's. Where all layers
            keep states, a group of no layers stands before them: its pages count tokens, and take no memory.
        sources: Whose cache such layers read.
    """

    name: str
    reach: Reach
    layers: Mapping[int, tuple[CacheTensor, ...]]
    sources: Mapping[int, int] = field(default_factory=dict)

    @property
    def writers(self) -> list[int]:
        """Its layers that have a cache of their own."""
        return [index for index in self.layers if index not in self.sources]

    @property
    def tensors(self) -> tuple[CacheTensor, ...]:
        """Of each of its layers that has some; none in a group of no layers."""
        return next((self.layers[index] for index in self.writers), ())
