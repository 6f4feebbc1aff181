"""What matrices share, however they are stored: parts side by side, experts, and this rank's share of them.

E experts. A stored tensor has the axes `[out]`, `[out, in / granule]`, or these behind `[E]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext, Part, Stream
from dovetail.sdk.layers.base import Layer, Slot
from dovetail.sdk.layers.shards import even_share, shard_of
from dovetail.sdk.quantization.scratch import SCRATCH


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """One stored tensor: columns in the checkpoint, and first and number of this rank's; None: it has rows only."""

    columns: int | None
    start: int = 0
    num: int = 0


class Matrix(Layer):
    """A matrix `[out, in]`, or one for each of E experts, in whatever form: a subclass `store`s its tensors.

    Args:
        ctx: Device, dtype and rank.
        path: Where it stands in the model.
        in_features: Of the whole model, as all widths here.
        parts: One after the other by rows.
        shard: How ranks divide it.
        num_experts: E, or None for one matrix.
    """

    def __init__(
        self,
        ctx: BuildContext,
        path: str,
        in_features: int,
        parts: Sequence[Part],
        shard: Literal["out", "in", "expert"] | None,
        num_experts: int | None = None,
    ) -> None:
        super().__init__()
        self.path, self.in_features, self.parts = path, in_features, tuple(parts)
        self.parallel, self.num_experts = ctx.parallel, num_experts
        self.is_share = shard in ("in", "expert") and ctx.parallel.size > 1
        self.first_expert, self.local_experts = 0, num_experts or 0
        if shard == "expert":
            self.first_expert, self.local_experts = even_share(path, "experts", num_experts or 0, ctx.parallel)
        self.shard = shard_of(path, in_features, parts, None if shard == "expert" else shard, ctx.parallel)
        adds_up = self.is_share and num_experts is None
        self._sums = ctx.rank_sums(self.shard.num_rows) if adds_up else None
        self.zeros = (0, 0)
        """How many rows at the end of each part, and of all columns, are zeros that no checkpoint has."""
        self._device = ctx.device
        self._orders = {part.name: _checked_order(path, part) for part in parts}
        self._stored: dict[str, StoredSlice] = {}
        self._pieces: dict[str, dict[str, Tensor]] = {}

    @property
    def local_in(self) -> int:
        """Inputs that this rank has."""
        return self.shard.columns[1]

    @property
    def local_out(self) -> int:
        """Outputs that this rank has."""
        return self.shard.num_rows

    def store(self, name: str, dtype: torch.dtype, *, granule: int | None = 1) -> None:
        """Make the parameter `name`.

        Args:
            name: As in slots.
            dtype: Of the parameter.
            granule: Inputs for which one column stands: 1 for a plain weight, `in_features` for one number a row; None:
                the tensor has rows only (a bias).

        Raises:
            ModelError: The ranks' cut goes through a granule.
        """
        experts = [self.local_experts] if self.num_experts is not None else []
        if granule is None:
            self._stored[name] = StoredSlice(None)
            shape = [*experts, self.local_out]
        else:
            self._stored[name] = self._columns(name, granule)
            shape = [*experts, self.local_out, self._stored[name].num]
        setattr(self, name, self.empty(*shape, device=self._device, dtype=dtype))

    def gather(self, *names: str) -> None:
        """Have parameters of one matrix only gathered, not copied into place: `finalize` makes something else of them.

        Their memory is never touched. `gathered` returns them.
        """
        self._pieces |= {name: {} for name in names}

    @property
    def holds(self) -> bool | None:
        return any(self._pieces.values())

    def gathered(self, name: str) -> Tensor:
        """Return a whole parameter, of the pieces that were placed where it is gathered; valid for this `finalize`."""
        pieces = self._pieces.pop(name, None)
        if not pieces:
            return self.get_parameter(name)
        in_order = [pieces[part.name] for part in self.parts]
        return in_order[0].contiguous() if len(in_order) == 1 else SCRATCH.joined(in_order)

    def _columns(self, name: str, granule: int) -> StoredSlice:
        first, num = self.shard.columns
        all_columns = -(-self.in_features // granule)
        if granule >= self.in_features:
            return StoredSlice(all_columns, 0, all_columns)
        if first % granule or (num % granule and first + num != self.in_features):
            fix = "give a --tensor-parallel-size that leaves them whole"
            fix += "" if self.num_experts is None else ", or --expert-parallel, which leaves experts whole"
            raise ModelError(
                f"{self.path}: {name} has one number for {granule} inputs, and {self.parallel.size} ranks have "
                f"{num} inputs each: the cut goes through it; {fix}"
            )
        return StoredSlice(all_columns, first // granule, -(-num // granule))

    def slots(self) -> dict[Slot, tuple[int, ...]]:
        experts = [None] if self.num_experts is None else range(self.num_experts)
        rows, columns = self.zeros
        return {
            Slot(name, part.name, expert): (part.width - rows,)
            if stored.columns is None
            else (part.width - rows, stored.columns - columns)
            for name, stored in self._stored.items()
            for part in self.parts
            for expert in experts
        }

    def is_here(self, slot: Slot) -> bool:
        return slot.expert is None or 0 <= slot.expert - self.first_expert < self.local_experts

    def place(self, slot: Slot, tensor: Tensor) -> Tensor | None:
        if any(self.zeros):
            of_columns = () if tensor.dim() == 1 else (0, self.zeros[1])
            tensor = F.pad(tensor, (*of_columns, 0, self.zeros[0]))
        rows, stored = self.shard.rows[slot.part], self._stored[slot.tensor]
        target: Tensor = getattr(self, slot.tensor)
        if slot.expert is not None:
            if not self.is_here(slot):
                return None
            target = target[slot.expert - self.first_expert]
        mine = tensor.narrow(0, rows.source, rows.num)
        if stored.columns is not None:
            mine = mine.narrow(1, stored.start, stored.num)
        if (order := self._orders[slot.part]) is not None:
            mine = mine.view(-1, len(order), *mine.shape[1:])[:, order].reshape(mine.shape)
        if slot.tensor in self._pieces:
            self._pieces[slot.tensor][slot.part] = made = mine.to(target.dtype)
            return made
        return target.narrow(0, rows.target, rows.num).copy_(mine)

    def finish(self, y: Tensor, add: Stream | None, scale: float) -> Tensor | Stream:
        """Return `y * scale` as a call of a matrix does: added to the stream, or added up over the ranks if need be."""
        y = y if scale == 1.0 else y * scale
        if add is not None:
            return add.plus(y) if self._sums is None else add.plus_share(y, self._sums)
        return y if self._sums is None else self._sums(y)


def _checked_order(path: str, part: Part) -> list[int] | None:
    """Return a part's order as an index.

    Raises:
        ModelError: It does not hold every row of a unit once.
    """
    if part.order is not None and sorted(part.order) != list(range(part.unit)):
        raise ModelError(f"{path}: the order of part {part.name!r} must hold each of a unit's {part.unit} rows once")
    return None if part.order is None else list(part.order)
