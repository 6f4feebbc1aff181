"""Chooses what computes each operation of a model, once for each place, while the model is built."""

from __future__ import annotations

import logging
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from dovetail.base.distribution import DISTRIBUTION
from dovetail.contracts.device import DeviceView
from dovetail.contracts.errors import ConfigError, DovetailError, PluginError
from dovetail.contracts.kernels import OPS, Ask, Claim, Kernel, KernelSet, composed, make_ask, meaning, parts_of
from dovetail.contracts.ranks import PeerMemory
from dovetail.messages import KernelUse
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.loader import describe
from dovetail.plugins.plan import AUTO
from dovetail.runtime.kernels.contest import Contender, Trials, contest

logger = logging.getLogger(__name__)


# Kernels by numbers of rows: who serves which, and what calls the right one.


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


def shown(bands: Sequence[tuple[int, int, str]]) -> str:
    """Return which set is taken for which rows, as the log shows it."""
    taken = joined(bands)
    return taken[0][2] if len(taken) == 1 else ", ".join(f"{name} from {first} rows on" for first, _, name in taken)


KIND = "kernels"
FLAG = "--kernels"
PLAIN = "plain"
"""In `--kernels`, and in the table: an operation's meaning in plain torch."""
COMPOSED = "composed"
"""In the table: put together of operations that sets serve."""


class LoadedSet(NamedTuple):
    """A set of this process.

    Attributes:
        name: As planned; with its package where another set has the same.
        label: With its package, as messages about it begin.
        kernels: The object.
        is_named: `--kernels` names it; `auto` found it otherwise.
        is_builtin: It comes with Dovetail.
    """

    name: str
    label: str
    kernels: KernelSet
    is_named: bool
    is_builtin: bool = False

    @property
    def remedy(self) -> str:
        """What a user does about one that is wrong: only what was named can be left out."""
        advice = f"leave it out of {FLAG}" if self.is_named else f"name the sets to use in {FLAG}"
        return f"{advice}, or report this to its author"


class KernelBinder:
    """Binds operations to kernels, in the order of the sets, then put together of others, then to their meanings.

    Args:
        sets: In the order in which they are asked.
        device: Where the model is.
        captured: Whether steps may be recorded in a graph.
        peers: How many ranks may see each other's memory; 0: they share none.
        trials: Says how sets are timed of which several serve an operation, and where a package's are tried; None: not
            at all.
        decided: What the first rank has bound; None: this is it, or the only one.

    Raises:
        PluginError: A set was named that has no kernels for the device.
    """

    def __init__(
        self,
        sets: Sequence[LoadedSet],
        device: DeviceView,
        *,
        captured: bool = False,
        peers: int = 0,
        trials: Callable[[], Trials] | None = None,
        decided: Sequence[KernelUse] | None = None,
    ) -> None:
        self.device = device
        self._sets = [one for one in sets if one.is_named or device.kind in one.kernels.devices]
        for one in self._sets:
            if device.kind not in one.kernels.devices and not device.is_interpreted:
                kinds = ", ".join(sorted(one.kernels.devices)) or "no device"
                text = f"{one.label}: it runs on {kinds}, not on {device.kind}; leave it out"
                raise PluginError(f"{FLAG} {one.name!r}: {text}")
        self._is_plain = not sets
        self._captured, self._peers, self._is_frozen = captured, peers, False
        self._trials, self._decided = trials, decided
        self._bound: dict[Ask, Kernel] = {}
        self._kept: dict[Ask, bool] = {}
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
            ConfigError: Rows must not depend on one another, and those of a packed product do in plain torch.
            PluginError: A set claims what it may not, or cannot make what it claims; `auto` finds two that claim it and
                cannot measure them.
            RuntimeError: The model is built: what a step calls has to be bound before.
        """
        found = self._bound.get(ask)
        if found is None:
            if self._is_frozen:
                raise RuntimeError(f"{ask.place} is bound while the model serves: bind it when the layer is built")
            self._bound[ask] = found = self._choose(ask)
        return found

    def serves(self, ask: Ask) -> bool:
        """See `dovetail.contracts.kernels.Kernels.serves`."""
        return any(isinstance(self._claim(one, ask), Claim) for one in self._sets)

    def freeze(self) -> None:
        """End the choice: the model is built.

        Raises:
            PluginError: A set was named and serves nothing of the model.
        """
        self._is_frozen = True
        used = {name for use in self._uses.values() for name in _names(use)}
        for one in self._sets:
            if one.is_named and one.name not in used:
                reasons = sorted({why for use in self._uses.values() for name, why in use.others if name == one.name})
                raise PluginError(
                    f"{FLAG} {one.name!r}: {one.label} serves no operation of this model: "
                    f"{'; '.join(reasons) or 'the model binds none'}; leave it out"
                )
        for one in self._sets:
            if not one.is_builtin:
                served = dict.fromkeys(ask.op for ask, use in self._uses.items() if one.name in _names(use))
                unasked = ", ".join(self._unasked(one))
                logger.info(
                    "%s serves %s%s.", one.label, ", ".join(served) or "nothing",
                    f"; it claims {unasked}, which this model does not ask for" if unasked else "",
                )  # fmt: skip
        for place in self._uncapturable:
            logger.warning("No step is recorded in a graph: %s cannot be.", place)

    def _unasked(self, one: LoadedSet) -> Iterator[str]:
        """Yield operations that a set claims at widths of the model, and that the model has not bound."""
        asked, like = {ask.op for ask in self._uses}, next(iter(self._uses), None)
        widths = {letter: number for ask in self._uses for letter, number in ask.dims}
        for op, row in OPS.items():
            if like is None or op in asked or row.options or row.over_ranks or not widths.keys() >= {*row.dims}:
                continue
            dims = {letter: widths[letter] for letter in row.dims}
            with suppress(PluginError):  # nothing of the model depends on the answer
                if isinstance(self._claim(one, self.ask(op, like.dtype, dims, {}, invariant=like.invariant)), Claim):
                    yield op

    @property
    def outside(self) -> list[str]:
        """Labels of the sets that do not come with Dovetail and serve something of the model."""
        used = {name for use in self._uses.values() for name in _names(use)}
        return [one.label for one in self._sets if not one.is_builtin and one.name in used]

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

    def keeps(self, dtype: str, form: Any, shape: Sequence[int]) -> bool:
        """Whether a set keeps a matrix packed; without any set, all are computed with as they are.

        Args:
            dtype: The model's, as torch names it.
            form: The matrix's.
            shape: Its shape, `[…, N, K]`.

        Raises:
            PluginError: A set fails.
        """
        ask = self.ask("packed_linear", dtype, {"N": shape[-2], "K": shape[-1]}, {"form": form}, invariant=False)
        if ask not in self._kept:
            self._kept[ask] = self._is_plain or any(
                bool(self._answer(one, "keeps_packed", one.kernels.keeps_packed, ask)) for one in self._sets
            )
        return self._kept[ask]

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
        answers = [(one, self._claim(one, ask)) for one in self._sets]
        claims = {one.name: (one, claim) for one, claim in answers if isinstance(claim, Claim)}
        others = [(one.name, why) for one, why in answers if isinstance(why, str)]
        kernels: dict[str, Kernel] = {}
        bands, measured = self._order(ask, claims, kernels, others)
        served: list[tuple[int, int, str]] = []
        free: list[tuple[int, int]] = []
        for first, last, names in bands:
            taken, left = assigned((first, last), [(name, claims[name][1]) for name in names])
            served, free = [*served, *taken], [*free, *left]
        used = [name for name in claims if any(name == taker for *_, taker in served)]
        idle = [name for name in claims if name not in used and name not in dict(others)]
        others += [(name, "others before it serve all of its rows") for name in idle]
        for name in used:
            if name not in kernels:
                kernels[name] = self._make(claims[name][0], ask)
            if not claims[name][0].is_builtin:
                self._attempt(ask, *claims[name], kernels[name])
            if self._captured and not claims[name][1].capturable:
                self._uncapturable.append(f"{ask.place} by {name}")
        if free and ask.invariant and OPS[ask.op].packs and not any(OPS[part.op].packs for part in parts_of(ask)):
            said = "; ".join(f"{name}: {why}" for name, why in others) or "there is no set"
            text = f"no kernel set computes each row by itself ({said}); use a plain checkpoint"
            raise ConfigError(f"--batch-invariant: {ask.place}: {text}")
        is_shared = OPS[ask.op].over_ranks and bool(served)
        rest = self._rest(ask) if free or is_shared else (PLAIN, meaning(ask))
        if free:
            kernels[rest[0]] = rest[1]
            served += [(*rows, rest[0]) for rows in free]
            if self._captured and rest[0] == PLAIN and OPS[ask.op].reads_host and ask.invariant:
                self._uncapturable.append(f"{ask.place} by {PLAIN}")
        served = joined(served)
        self._uses[ask] = KernelUse(
            operation=ask.place, dtype=ask.dtype, served=tuple(served), others=tuple(others), measured=measured
        )
        found = kernels[served[0][2]]
        if len(served) > 1:
            found = Bands([first for first, *_ in served[1:]], [kernels[name] for *_, name in served])
        if is_shared:
            self._over_ranks[ask] = found, name = PeerKernel(found, rest[1]), rest[0]
        return found

    def _order(
        self,
        ask: Ask,
        claims: Mapping[str, tuple[LoadedSet, Claim]],
        kernels: dict[str, Kernel],
        others: list[tuple[str, str]],
    ) -> tuple[list[tuple[int, int, list[str]]], str]:
        """Return for numbers of rows in which order sets are taken, and the figures behind it, or "".

        Sets that `--kernels` names come first. Those that `auto` found behind them are measured where their rows
        overlap, if the named ones leave any; what they made is added to `kernels`, and why one is not taken to
        `others`. Packages' sets are also measured against what the operation is put together of without them, where
        other sets serve parts of it.
        """
        in_order = list(claims)
        named = [name for name in in_order if claims[name][0].is_named]
        conflicts = [name for name in in_order if name not in named]
        left_over = assigned(ask.rows, [(name, claims[name][1]) for name in named])[1]
        is_fused = self._trials is not None and self._others_have_parts(ask, [claims[name][0] for name in conflicts])
        if not left_over or not (is_fused or overlap([claims[name][1].rows for name in conflicts])):
            return [(*ask.rows, in_order)], ""
        if self._decided is not None:
            return self._as_decided(ask, in_order)
        least = claims[conflicts[0]][1].capturable
        if ask.captured and least:
            late = [name for name in conflicts if not claims[name][1].capturable]
            others += [(name, "comes after one that a graph can record, which it cannot") for name in late]
            conflicts = [name for name in conflicts if name not in late]
        kernels |= {name: self._make(claims[name][0], ask) for name in conflicts}
        contenders = [Contender(*claims[name][0][:3], claims[name][1], kernels[name]) for name in conflicts]
        bound, uses, uncapturable = dict(self._bound), dict(self._uses), [*self._uncapturable]
        if is_fused:
            contenders.insert(0, self._composed(ask, contenders[0].kernels))
        found = contest(ask, contenders, self._trials()) if self._trials is not None and len(contenders) > 1 else None
        taken = [] if found is None else list(found.bands(ask.rows))
        if is_fused and all(best != COMPOSED for *_, best in taken):  # then the model has no such parts
            self._bound, self._uses, self._uncapturable = bound, uses, uncapturable
        if found is None:
            self._refuse_conflicts(ask, conflicts, {name: claims[name][1] for name in conflicts})
            return [(*ask.rows, [name for name in in_order if name not in dict(others)])], ""
        others += found.figures.failed.items()
        left = [name for name in conflicts if name not in dict(others)]
        bands = [
            (first, last, [] if best == COMPOSED else [best, *(name for name in left if name != best)])
            for first, last, best in taken
        ]
        losers = [name for name in found.figures.times if all(name != best for *_, best in taken)]
        best = taken[0][2]
        ratios = {name: found.ratio(name) / found.ratio(best) for name in losers}
        others += [(name, f"takes {ratio:.2f} times as long as {best}") for name, ratio in ratios.items()]
        logger.info("Kernels of %s: auto chose %s; measured, %s.", ask.place, shown(taken), found)
        return [(first, last, [*named, *names]) for first, last, names in bands], str(found)

    def _others_have_parts(self, ask: Ask, claimants: Sequence[LoadedSet]) -> bool:
        """Whether only packages' sets claim an operation, which other sets serve parts of."""
        if not claimants or any(one.is_builtin for one in claimants) or OPS[ask.op].over_ranks:
            return False
        others = [one for one in self._sets if one not in claimants]
        return any(isinstance(self._claim(one, part), Claim) for part in parts_of(ask) for one in others)

    def _composed(self, ask: Ask, kernels: KernelSet) -> Contender:
        """Return an operation put together of its parts, as one to be timed; `kernels` brings operands."""
        name, kernel = self._rest(ask)
        used = sorted({each for part in parts_of(ask) for each in _names(self._uses[part])})
        return Contender(name, f"{name} of {', '.join(used)}", kernels, Claim(ask.rows, capturable=True), kernel)

    def _as_decided(self, ask: Ask, in_order: Sequence[str]) -> tuple[list[tuple[int, int, list[str]]], str]:
        """Return the order that the first rank has measured.

        Raises:
            PluginError: It has measured no such operation, or a set of it serves it not here.
        """
        use = next((use for use in self._decided or () if (use.operation, use.dtype) == (ask.place, ask.dtype)), None)
        names = () if use is None else tuple(name for *_, name in use.served)
        if use is None or not {*names} - {PLAIN, COMPOSED} <= {*in_order}:
            raise PluginError(
                f"{FLAG} {AUTO!r}: {' and '.join(in_order)} both serve {ask.place} on this rank, and the first rank "
                f"has chosen {', '.join(names) or 'nothing'}; name the sets in the order in which they are to be asked"
            )
        bands = [
            (first, last, [name, *(each for each in in_order if each != name)] if name in in_order else [])
            for first, last, name in use.served
        ]
        return bands, use.measured

    def _refuse_conflicts(self, ask: Ask, conflicts: Sequence[str], claims: Mapping[str, Claim]) -> None:
        """Refuse sets of which only the user can say which goes first."""
        for at, name in enumerate(conflicts[1:], 1):
            before = [(each, claims[each]) for each in conflicts[:at]]
            if not assigned(claims[name].rows, before)[1]:
                names = ", ".join(each for each, _ in before)
                raise PluginError(
                    f"{FLAG} {AUTO!r}: {names} and {name} both serve {ask.place}, and it cannot be measured which is "
                    f"faster: name them in the order in which they are to be asked, such as {FLAG} "
                    f"{name},{names.replace(', ', ',')}"
                )

    def _claim(self, one: LoadedSet, ask: Ask) -> Claim | str:
        """Ask a set, and refuse an answer that cannot hold."""
        found = self._answer(one, "serves", one.kernels.serves, ask)
        if isinstance(found, str):
            return found.partition("\n")[0]
        if not isinstance(found, Claim):
            raise PluginError(f"{one.label}: serves({ask.place}) returned {found!r}; return a Claim, or why not")
        try:
            least, most = map(operator.index, found.rows)
        except (TypeError, ValueError):
            text = f"serves({ask.place}) claims rows {found.rows!r}; give the fewest and the most, such as ask.rows"
            raise PluginError(f"{one.label}: {text}") from None
        if not ask.rows[0] <= least <= most <= ask.rows[1]:
            raise PluginError(f"{one.label}: it claims rows {found.rows} of {ask.place}, of which {ask.rows} are asked")
        if OPS[ask.op].packs and tuple(found.rows) != ask.rows:
            raise PluginError(f"{one.label}: it claims rows {found.rows} of {ask.place}; who packs takes all of them")
        if beyond := found.overwrites - OPS[ask.op].may_overwrite:
            may = ", ".join(sorted(OPS[ask.op].may_overwrite)) or "nothing"
            raise PluginError(f"{one.label}: {ask.op} may overwrite {may}, not {', '.join(sorted(beyond))}")
        if ask.invariant and not found.row_independent:
            return "its rows depend on one another, and --batch-invariant asks that they do not"
        return found

    @staticmethod
    def _answer(one: LoadedSet, name: str, answer: Callable[[Ask], object], ask: Ask) -> object:
        """Ask a set by one of its methods."""
        try:
            return answer(ask)
        except DovetailError:
            raise
        except Exception as error:  # a stranger's class: whatever it raises, its name belongs to it
            what = f"{one.label}: {name}({ask.place}) raised {type(error).__name__}: {error}"
            raise PluginError(f"{what}; {one.remedy}") from error

    def _make(self, one: LoadedSet, ask: Ask) -> Kernel:
        made = self._answer(one, "make", one.kernels.make, ask)
        what = f"{one.label}: make({ask.place}) returned {made!r}"
        if not callable(made):
            raise PluginError(f"{what}, which cannot be called; {one.remedy}")
        if OPS[ask.op].packs and not all(callable(getattr(made, name, None)) for name in ("keeps", "pack")):
            raise PluginError(f"{what}, which is no PackedKernel: it needs keeps and pack; {one.remedy}")
        return made

    def _attempt(self, ask: Ask, one: LoadedSet, claim: Claim, kernel: Kernel) -> None:
        """Refuse a kernel that does not do what its set claims."""
        from dovetail.runtime.kernels.attempts import fault  # here: a start without a package's set needs none of it

        if self._trials is not None and (found := fault(ask, Contender(*one[:3], claim, kernel), self._trials().place)):
            raise PluginError(f"{one.label}: {found}; {one.remedy}")

    def _rest(self, ask: Ask) -> tuple[str, Kernel]:
        """Return what computes an operation that no set serves."""
        parts = parts_of(ask)
        kernels = [self.bind(part) for part in parts]
        if any(name != PLAIN for part in parts for _, _, name in self._uses[part].served):
            return COMPOSED, composed(ask, kernels)
        return PLAIN, meaning(ask)


def _names(use: KernelUse) -> set[str]:
    """Return what serves some rows of an operation."""
    return {name for _, _, name in use.served}


def load_sets(plugins: LoadedPlugins) -> list[LoadedSet]:
    """Make the sets of a plan, in its order.

    Raises:
        PluginError: One cannot be imported or made.
    """
    sets, names = [], [planned.name for planned in plugins.plan.of_kind(KIND)]
    for planned, kind in plugins.candidates(KIND):
        try:
            made = kind()
        except Exception as error:  # a stranger's class
            raise PluginError(f"{describe(planned)}: making it raised {type(error).__name__}: {error}") from error
        name = planned.name if names.count(planned.name) == 1 else planned.qualified
        is_builtin = planned.distribution == DISTRIBUTION
        sets.append(LoadedSet(name, describe(planned), made, planned.requested, is_builtin))
    return sets
