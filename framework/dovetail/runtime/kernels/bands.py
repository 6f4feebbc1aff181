"""Kernels by numbers of rows: who serves which, and what calls the right one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.contracts.kernels import Claim, Kernel


class Bands:
    """A kernel of several, by the number of rows.

    Args:
        bounds: First rows of all but the first kernel, ascending.
        kernels: One more.
    """

    __slots__ = ("bounds", "kernels")

    def __init__(self, bounds: Sequence[int], kernels: Sequence[Kernel]) -> None:
        self.bounds, self.kernels = tuple(bounds), tuple(kernels)

    def __call__(self, x: torch.Tensor, *operands: Any) -> Any:
        """Compute with the kernel for as many rows as `x` has."""
        return self.kernels[bisect_right(self.bounds, len(x))](x, *operands)


class PeerKernel:
    """A kernel over memory that ranks share.

    Args:
        kernel: It.
        otherwise: What computes the same without.
    """

    __slots__ = ("_kernel", "_otherwise")

    def __init__(self, kernel: Kernel, otherwise: Kernel) -> None:
        self._kernel, self._otherwise = kernel, otherwise

    def __call__(self, *operands: Any) -> Any:
        """Compute."""
        return self._kernel(*operands)

    def go_without(self) -> None:
        """Compute without from now on: the ranks have met, and share no memory."""
        self._kernel = self._otherwise


def _common(rows: tuple[int, int], others: tuple[int, int]) -> tuple[int, int] | None:
    first, last = max(rows[0], others[0]), min(rows[1], others[1])
    return (first, last) if first <= last else None


def overlap(bands: Sequence[tuple[int, int]]) -> bool:
    """Whether two of some ranges of rows have one in common."""
    return any(_common(one, other) for at, one in enumerate(bands) for other in bands[:at])


def _without(rows: tuple[int, int], others: tuple[int, int]) -> list[tuple[int, int]]:
    sides = (rows[0], min(rows[1], others[0] - 1)), (max(rows[0], others[1] + 1), rows[1])
    return [(first, last) for first, last in sides if first <= last]


def assigned(
    rows: tuple[int, int], claims: Sequence[tuple[str, Claim]]
) -> tuple[list[tuple[int, int, str]], list[tuple[int, int]]]:
    """Divide rows among claims, in their order; returns who has which, and those that nobody claims."""
    free, served = [rows], []
    for name, claim in claims:
        served += [(*taken, name) for part in free if (taken := _common(part, claim.rows)) is not None]
        free = [rest for part in free for rest in _without(part, claim.rows)]
    return served, free


def joined(served: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Return bands in the order of their rows, neighbours of one set as one."""
    found: list[tuple[int, int, str]] = []
    for first, last, name in sorted(served):
        if found and found[-1][2] == name:
            found[-1] = found[-1][0], last, name
        else:
            found.append((first, last, name))
    return found


def shown(bands: Sequence[tuple[int, int, Sequence[str]]]) -> str:
    """Return which set is taken for which rows, as the log shows it."""
    taken = joined([(first, last, names[0]) for first, last, names in bands])
    return taken[0][2] if len(taken) == 1 else ", ".join(f"{name} from {first} rows on" for first, _, name in taken)
