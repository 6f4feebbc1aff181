"""Chooses what computes each operation of a model, once for each place, while the model is built."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dovetail.contracts.device import DeviceView
from dovetail.contracts.errors import DovetailError, PluginError
from dovetail.contracts.kernels import OPS, Ask, Claim, Kernel, KernelSet, composed, make_ask, meaning, parts_of
from dovetail.contracts.ranks import PeerMemory
from dovetail.messages.outputs import KernelUse
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.loader import describe
from dovetail.plugins.plan import AUTO

logger = logging.getLogger(__name__)

KIND = "kernels"
FLAG = "--kernels"
PLAIN = "plain"
"""In `--kernels`, and in the table: an operation's meaning in plain torch."""
COMPOSED = "composed"
"""In the table: put together of operations that sets serve."""


class LoadedSet(NamedTuple):
    """A set of this process.

    Attributes:
        name: As planned.
        label: With its package, as messages about it begin.
        kernels: The object.
        is_named: `--kernels` names it; `auto` found it otherwise.
    """

    name: str
    label: str
    kernels: KernelSet
    is_named: bool


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


class KernelBinder:
    """Binds operations to kernels, in the order of the sets, then put together of others, then to their meanings.

    Args:
        sets: In the order in which they are asked.
        device: Where the model is.
        captured: Whether steps may be recorded in a graph.
        peers: How many ranks may see each other's memory; 0: they share none.
    """

    def __init__(
        self, sets: Sequence[LoadedSet], device: DeviceView, *, captured: bool = False, peers: int = 0
    ) -> None:
        self.device = device
        self._sets = [one for one in sets if one.is_named or device.kind in one.kernels.devices]
        self._captured, self._peers, self._is_frozen = captured, peers, False
        self._bound: dict[Ask, Kernel] = {}
        self._uses: dict[Ask, KernelUse] = {}
        self._uncapturable: list[str] = []
        self._over_ranks: dict[Ask, tuple[PeerKernel, str]] = {}

    def ask(self, op: str, dtype: str, dims: Mapping[str, int], options: Mapping[str, Any], *, invariant: bool) -> Ask:
        """See `dovetail.contracts.kernels.Kernels.ask`."""
        captured, peers = self._captured, self._peers
        return make_ask(op, self.device, dtype, dims, options, invariant=invariant, captured=captured, peers=peers)

    def bind(self, ask: Ask) -> Kernel:
        """See `dovetail.contracts.kernels.Kernels.bind`.

        Raises:
            PluginError: A set claims what it may not, or cannot make what it claims; `auto` finds two that claim it.
            RuntimeError: The model is built: what a step calls has to be bound before.
        """
        found = self._bound.get(ask)
        if found is None:
            if self._is_frozen:
                raise RuntimeError(f"{ask.place} is bound while the model serves: bind it when the layer is built")
            self._bound[ask] = found = self._choose(ask)
        return found

    def freeze(self) -> None:
        """End the choice: the model is built.

        Raises:
            PluginError: A set was named and serves nothing of the model.
        """
        self._is_frozen = True
        used = {name for use in self._uses.values() for _, _, name in use.served}
        for one in self._sets:
            if one.is_named and one.name not in used:
                reasons = sorted({why for use in self._uses.values() for name, why in use.others if name == one.name})
                raise PluginError(
                    f"{FLAG} {one.name!r}: {one.label} serves no operation of this model: "
                    f"{'; '.join(reasons) or 'the model binds none'}; leave it out"
                )
        for place in self._uncapturable:
            logger.warning("No step is recorded in a graph: %s cannot be.", place)

    def connect(self, lend: Callable[[int], PeerMemory | None]) -> None:
        """Give the sets that serve operations over ranks their memory; those that get none serve them no longer.

        Args:
            lend: Returns so many bytes of each rank, which all of them see, or None where they share none.
        """
        for one in self._sets:
            mine = [ask for ask in self._over_ranks if any(name == one.name for *_, name in self._uses[ask].served)]
            if not mine:
                continue
            memory = lend(one.kernels.peer_bytes(self._peers))
            if memory is not None:
                one.kernels.connect(memory)
                continue
            for ask in mine:
                kernel, name = self._over_ranks.pop(ask)
                kernel.go_without()
                others = *self._uses[ask].others, (one.name, "the ranks share no memory")
                self._uses[ask] = KernelUse(
                    operation=ask.place, dtype=ask.dtype, served=((*ask.rows, name),), others=others
                )

    @property
    def is_capturable(self) -> bool:
        """Whether a graph can record everything that was bound."""
        return not self._uncapturable

    @property
    def table(self) -> tuple[KernelUse, ...]:
        """What serves what, in the order in which it was bound."""
        return tuple(self._uses.values())

    def _choose(self, ask: Ask) -> Kernel:
        """Return what computes an operation, and note it."""
        free = [ask.rows]
        served: list[tuple[int, int, str, Kernel]] = []
        others: list[tuple[str, str]] = []
        for one in self._sets:
            claim = self._claim(one, ask)
            if isinstance(claim, str):
                others.append((one.name, claim))
                continue
            taken = [_common(rows, claim.rows) for rows in free]
            if not any(taken):
                self._refuse_conflicts(one, ask, served)
                others.append((one.name, "others before it serve all of its rows"))
                continue
            kernel = self._make(one, ask)
            served += [(*rows, one.name, kernel) for rows in taken if rows is not None]
            free = [rest for rows in free for rest in _without(rows, claim.rows)]
            if self._captured and not claim.capturable:
                self._uncapturable.append(f"{ask.place} by {one.name}")
        is_shared = OPS[ask.op].over_ranks and bool(served)
        rest = self._rest(ask) if free or is_shared else (PLAIN, meaning(ask))
        if free:
            name, kernel = rest
            served += [(*rows, name, kernel) for rows in free]
            if self._captured and name == PLAIN and OPS[ask.op].reads_host and ask.invariant:
                self._uncapturable.append(f"{ask.place} by {PLAIN}")
        served.sort(key=lambda band: band[0])
        uses = tuple((first, last, name) for first, last, name, _ in served)
        self._uses[ask] = KernelUse(operation=ask.place, dtype=ask.dtype, served=uses, others=tuple(others))
        found = served[0][3]
        if len(served) > 1:
            found = Bands([first for first, *_ in served[1:]], [kernel for *_, kernel in served])
        if is_shared:
            self._over_ranks[ask] = found, name = PeerKernel(found, rest[1]), rest[0]
        return found

    def _refuse_conflicts(self, one: LoadedSet, ask: Ask, served: Sequence[tuple[int, int, str, Kernel]]) -> None:
        """Refuse two sets of which only the user can say which goes first."""
        if not one.is_named:
            names = ", ".join(dict.fromkeys(name for _, _, name, _ in served))
            raise PluginError(
                f"{FLAG} {AUTO!r}: {names} and {one.name} both serve {ask.place}: name them in the order in which "
                f"they are to be asked, such as {FLAG} {one.name},{names.replace(', ', ',')}"
            )

    def _claim(self, one: LoadedSet, ask: Ask) -> Claim | str:
        """Ask a set, and refuse an answer that cannot hold."""
        try:
            found: object = one.kernels.serves(ask)
        except DovetailError:
            raise
        except Exception as error:  # a stranger's class: whatever it raises, its name belongs to it
            raise PluginError(f"{one.label}: serves({ask.place}) raised {type(error).__name__}: {error}") from error
        if isinstance(found, str):
            return found.partition("\n")[0]
        if not isinstance(found, Claim):
            raise PluginError(f"{one.label}: serves({ask.place}) returned {found!r}; return a Claim, or why not")
        if _common(ask.rows, found.rows) != tuple(found.rows):
            raise PluginError(f"{one.label}: it claims rows {found.rows} of {ask.place}, of which {ask.rows} are asked")
        if OPS[ask.op].packs and tuple(found.rows) != ask.rows:
            raise PluginError(f"{one.label}: it claims rows {found.rows} of {ask.place}; who packs takes all of them")
        if beyond := found.overwrites - OPS[ask.op].may_overwrite:
            may = ", ".join(sorted(OPS[ask.op].may_overwrite)) or "nothing"
            raise PluginError(f"{one.label}: {ask.op} may overwrite {may}, not {', '.join(sorted(beyond))}")
        if ask.invariant and not found.row_independent:
            return "its rows depend on one another, and --batch-invariant asks that they do not"
        return found

    def _make(self, one: LoadedSet, ask: Ask) -> Kernel:
        try:
            made: object = one.kernels.make(ask)
        except DovetailError:
            raise
        except Exception as error:  # as above
            raise PluginError(
                f"{one.label}: it claims {ask.place} and cannot make it: {type(error).__name__}: {error}; leave it out "
                f"of {FLAG}, or report this to its author"
            ) from error
        if not callable(made):
            raise PluginError(f"{one.label}: make({ask.place}) returned {made!r}, which cannot be called")
        if OPS[ask.op].packs and not all(callable(getattr(made, name, None)) for name in ("keeps", "pack")):
            raise PluginError(f"{one.label}: make({ask.place}) returned {made!r}; give it keeps and pack: PackedKernel")
        return made

    def _rest(self, ask: Ask) -> tuple[str, Kernel]:
        """Return what computes an operation that no set serves."""
        parts = parts_of(ask)
        kernels = [self.bind(part) for part in parts]
        if any(name != PLAIN for part in parts for _, _, name in self._uses[part].served):
            return COMPOSED, composed(ask, kernels)
        return PLAIN, meaning(ask)


def _common(rows: tuple[int, int], others: tuple[int, int]) -> tuple[int, int] | None:
    first, last = max(rows[0], others[0]), min(rows[1], others[1])
    return (first, last) if first <= last else None


def _without(rows: tuple[int, int], others: tuple[int, int]) -> list[tuple[int, int]]:
    sides = (rows[0], min(rows[1], others[0] - 1)), (max(rows[0], others[1] + 1), rows[1])
    return [(first, last) for first, last in sides if first <= last]


def load_sets(plugins: LoadedPlugins) -> list[LoadedSet]:
    """Make the sets of a plan, in its order.

    Raises:
        PluginError: One cannot be imported or made.
    """
    sets = []
    for planned, kind in plugins.candidates(KIND):
        try:
            made = kind()
        except Exception as error:  # a stranger's class
            raise PluginError(f"{describe(planned)}: making it raised {type(error).__name__}: {error}") from error
        sets.append(LoadedSet(planned.name, describe(planned), made, planned.requested))
    return sets
