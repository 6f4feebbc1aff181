"""Which rows and columns of a matrix a rank has, and where they stand in its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import Act, Parallel, Part


@dataclass(frozen=True, slots=True)
class Rows:
    """`num` rows of a part: from `source` on in the checkpoint, from `target` on in this rank's matrix."""

    source: int
    target: int
    num: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a matrix `[out, in]`.

    Attributes:
        rows: By part, in order.
        columns: First input and number of inputs.
    """

    rows: dict[str, Rows]
    columns: tuple[int, int]

    @property
    def num_rows(self) -> int:
        """Rows of this rank's matrix."""
        return sum(rows.num for rows in self.rows.values())


def shard_of(
    name: str, in_features: int, parts: Sequence[Part], shard: Literal["out", "in"] | None, parallel: Parallel
) -> Shard:
    """Divide a matrix among the ranks and return this one's share.

    Raises:
        ModelError: They do not divide a part, or the inputs, evenly.
    """
    rows, target = {}, 0
    for part in parts:
        source, num = 0, part.width
        if shard == "out":
            source, num = _units(name, part, parallel)
        rows[part.name] = Rows(source, target, num)
        target += num
    columns = (0, in_features)
    if shard == "in":
        columns = even_share(name, "inputs", in_features, parallel)
    return Shard(rows, columns)


def gated(name: str, act: Act | None, parts: Sequence[Part]) -> Act | None:
    """Return `act`, which needs a gate and what it multiplies.

    Raises:
        ModelError: The parts are not two of one width, or it is for experts only.
    """
    if act == "relu2":
        raise ModelError(f"{name}: relu2 has no gate and is for experts only; apply it to what the matrix makes")
    if act is not None and (len(parts) != 2 or parts[0].width != parts[1].width):
        raise ModelError(f"{name}: {act} takes two parts of one width, not {[part.width for part in parts]}")
    return act


def even_share(name: str, what: str, num: int, parallel: Parallel) -> tuple[int, int]:
    """First one and number of this rank's share of `num` things.

    Raises:
        ModelError: They cannot be divided evenly.
    """
    each, left = divmod(num, parallel.size)
    if left:
        fix = "give a --tensor-parallel-size that divides them"
        fix += ", or leave out --expert-parallel" if what == "experts" else ""
        raise ModelError(f"{name}: {num} {what} cannot be divided among {parallel.size} ranks; {fix}")
    return parallel.rank * each, each


def _units(name: str, part: Part, parallel: Parallel) -> tuple[int, int]:
    """First row and number of rows of this rank's units of a part."""
    units, left = divmod(part.width, part.unit)
    if left:
        raise ModelError(f"{name}: part {part.name!r} of {part.width} rows is not made of units of {part.unit}")
    what = f"units of {part.unit} rows of part {part.name!r}" if part.unit > 1 else f"rows of part {part.name!r}"
    first, each = even_share(name, what, units * part.repeat, parallel)
    if part.repeat > 1 and each > 1:
        raise ModelError(f"{name}: a rank would have the same {what} {part.repeat} times; divide first, then repeat")
    return first // part.repeat * part.unit, each * part.unit
