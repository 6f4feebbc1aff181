"""Which of several kernel sets `auto` takes for an operation: each is timed at a few numbers of rows, results compared.

The first set is the default. Another one is taken where it beats that by a margin that noise does not reach: for each
class of rows by itself, or for all of them where one kernel has to take all. Figures are kept, see `figures.py`.
"""

from __future__ import annotations

import logging
import math
import platform
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dovetail.contracts.device import Device, is_on_host
from dovetail.contracts.kernels import OPS, Ask, Claim, Kernel, KernelSet
from dovetail.runtime.kernels.figures import ALIKE, Clock, Figures, digest_of, versions
from dovetail.runtime.kernels.records import PREFIX, records, shown

logger = logging.getLogger(__name__)

TRIAL_ROWS = (1, 16, 64, 512, 8192)
"""Numbers of rows that are timed; each stands for those between the one before it and itself, the last for all more."""
MAX_REPEATS, FEW_ROWS = 32, 4096
"""Calls within what is timed, so that a clock sees more than a launch: fewer for more rows."""
MAX_WORK, REPEATED_WORK = 1 << 32, 1 << 30
"""Rows times widths of a call that is timed on the host, some 50 ms of products, and of calls that are timed together:
more would delay starts."""
SEED = 1
HALVES = ("gate_up", "down")
"""Matrices of experts, of which an operation has both."""


class Contender(NamedTuple):
    """A set that claims an operation.

    Attributes:
        name: As planned.
        label: With its package and version.
        kernels: The set.
        claim: What it says.
        kernel: What it made.
    """

    name: str
    label: str
    kernels: KernelSet
    claim: Claim
    kernel: Kernel


@dataclass(frozen=True, slots=True)
class Trials:
    """How kernels are timed here.

    Attributes:
        place: Where.
        model: Whose product that device is; figures hold for it.
        clock: Times a call.
        folder: Where figures are kept; None: nowhere.
    """

    place: torch.device
    model: str
    clock: Clock
    folder: Path | None = None

    @classmethod
    def on(cls, device: Device) -> Trials:
        """Return how kernels are timed on a device."""

        def seconds(run: Callable[[], object], is_captured: bool) -> float:
            return device.seconds(run, is_captured=is_captured)

        model = host_model() if device.is_host else device.model
        return cls(device.place, model, seconds, records(device.compiler()))


def host_model() -> str:
    """Return the processor's name and the threads that compute on it, as far as the system says."""
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return f"{found[1] if found else platform.machine()}, {torch.get_num_threads()} threads"


@dataclass(frozen=True, slots=True)
class Contest:
    """What was measured of an operation's sets.

    Attributes:
        figures: By set.
        rows: Numbers of rows that were timed.
        is_whole: One set takes all rows.
    """

    figures: Figures
    rows: tuple[int, ...]
    is_whole: bool

    def bands(self, rows: tuple[int, int]) -> Iterator[tuple[int, int, str]]:
        """Yield first and last number of rows, of all of `rows`, and the set that is taken for them."""
        first, most = rows
        for at, num in enumerate(self.rows):
            is_last = at == len(self.rows) - 1
            yield first, most if is_last else num, self.best(None if self.is_whole else at)
            first = num + 1

    def best(self, at: int | None) -> str:
        """Return the set for one of `rows`, or for all of them."""
        return self.figures.best({name: self.ratio(name, at) for name in self.figures.times})

    def ratio(self, name: str, at: int | None = None) -> float:
        """Return a set's time as a part of the default's: at one of `rows`, or the mean of all."""
        default = next(iter(self.figures.times.values()))
        parts = [own / usual for own, usual in zip(self.figures.times[name], default, strict=True)]
        return statistics.mean(parts) if at is None else parts[at]

    def __str__(self) -> str:
        """Return the figures."""
        return shown(self.rows, self.figures.times)


def contest(ask: Ask, contenders: Sequence[Contender], trials: Trials) -> Contest | None:
    """Return what was measured of sets, the default first, now or in an earlier start.

    None: there is nothing to time, as no set brings operands, the device has no clock, or nothing ran.
    """
    rows = trial_rows(ask, contenders, is_on_host(trials.place))
    is_whole = OPS[ask.op].packs or ask.invariant
    sets = [[each.label, each.kernels.library()] for each in contenders]
    facts = [ask.place, ask.dtype, ask.invariant, ask.captured, sets, trials.model, versions(), rows]
    file, names = f"{PREFIX}{digest_of(facts)}.json", [each.name for each in contenders]
    figures = Figures.remembered(trials.folder, file, names, len(rows))
    if figures is None:
        devices = [] if trials.place.index is None else [trials.place]
        with torch.random.fork_rng(devices), torch.inference_mode():
            figures = _measure(ask, contenders, trials, rows)
        if figures is None or not figures.times:
            return None
        figures.remember(
            trials.folder, file, operation=ask.place, dtype=ask.dtype, device=trials.model, sets=names, rows=rows
        )
    return Contest(figures, rows, is_whole)


def trial_rows(ask: Ask, contenders: Sequence[Contender], on_host: bool) -> tuple[int, ...]:
    """Return the numbers of rows that all contenders take, on the host without those of much work; at least one."""
    first = max(ask.rows[0], *(each.claim.rows[0] for each in contenders), 1)
    last = min(ask.rows[1], *(each.claim.rows[1] for each in contenders))
    if on_host:
        last = min(last, MAX_WORK // _work(ask))
    return tuple(num for num in TRIAL_ROWS if first <= num <= last) or (first,)


def _work(ask: Ask) -> int:
    """Return the product of an operation's widths."""
    return math.prod(number for _, number in ask.dims)


def _measure(ask: Ask, contenders: Sequence[Contender], trials: Trials, rows: Sequence[int]) -> Figures | None:
    figures, left = Figures({}), list(contenders)
    times: dict[str, list[float]] = {each.name: [] for each in contenders}
    for num in rows:
        operands = operands_of(ask, contenders, num, trials.place)
        if operands is None:
            return None
        usual: list[Tensor] | None = None
        for each in tuple(left):
            try:
                found = results_of(ask, each, operands)
                usual = found if usual is None else usual
                if not (distance := distance_of(found, usual)) <= ALIKE:
                    figures.failed[each.name] = f"its result of {num} rows differs from the default's by {distance:.2g}"
                    left.remove(each)
                    continue
                times[each.name].append(_seconds(ask, each, operands, num, trials, contenders))
            except Exception as error:  # a stranger's kernel may raise anything; the others serve all the same
                logger.debug("measuring %s failed", each.name, exc_info=True)
                figures.failed_by(each.name, error)
                left.remove(each)
    figures.times |= {each.name: times[each.name] for each in left}
    return figures


def operands_of(ask: Ask, contenders: Sequence[Contender], rows: int, place: torch.device) -> list[Any] | None:
    """Return what the first set brings that has any."""
    for each in contenders:
        torch.manual_seed(SEED)
        if (found := each.kernels.trial(ask, rows, place)) is not None:
            return list(found)
    return None


def copies_of(ask: Ask, contender: Contender, operands: Sequence[Any]) -> list[Any]:
    """Return copies of operands, packed matrices as a kernel packs them."""
    made: list[Any] = []
    kernel: Any = contender.kernel
    for name, one in zip(OPS[ask.op].operands, operands, strict=True):
        if isinstance(one, Mapping):
            tensors = {key: tensor.clone() for key, tensor in one.items()}
            made.append(kernel.pack(tensors, name if name in HALVES else ""))
        else:
            made.append(one.clone() if isinstance(one, Tensor) else one)
    return made


def results_of(ask: Ask, contender: Contender, operands: Sequence[Any]) -> list[Tensor]:
    """Return what a call gives, and the operands that it changes; what it is given are copies."""
    return results_with(ask, contender, copies_of(ask, contender, operands))


def results_with(ask: Ask, contender: Contender, given: Sequence[Any]) -> list[Tensor]:
    """Return what a call gives, and the operands that it changes."""
    found = contender.kernel(*given)
    changed = [one for name, one in zip(OPS[ask.op].operands, given, strict=True) if name in OPS[ask.op].changes]
    results = found if isinstance(found, tuple) else (found,)
    if ask.op == "latent_rows" and len(results) == 2:  # the first R of queries are its caller's to write
        results = results[0][..., ask.dim("R") :], results[1]
    return [one for one in (*results, *changed) if isinstance(one, Tensor)]


def distance_of(found: Sequence[Tensor], usual: Sequence[Tensor]) -> float:
    """Return how far results are apart, as a part of the default's; infinity for NaN and other integers or shapes."""
    most = 0.0
    for mine, wanted in zip(found, usual, strict=True):
        if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
            return float("inf")
        if not wanted.dtype.is_floating_point:
            most = max(most, 0.0 if torch.equal(mine, wanted) else float("inf"))
            continue
        size = wanted.double().norm().clamp_min(1e-30)
        own = float((mine.double() - wanted.double()).norm() / size)
        most = float("inf") if math.isnan(own) else max(most, own)  # `max` passes NaN over
    return most


def _seconds(
    ask: Ask, contender: Contender, operands: Sequence[Any], rows: int, trials: Trials, contenders: Sequence[Contender]
) -> float:
    given, repeats = copies_of(ask, contender, operands), min(MAX_REPEATS, FEW_ROWS // rows)
    if is_on_host(trials.place):
        repeats = min(repeats, REPEATED_WORK // (rows * _work(ask)))
    repeats = max(1, repeats)

    def run() -> None:
        for _ in range(repeats):
            contender.kernel(*given)

    is_captured = ask.captured and all(each.claim.capturable for each in contenders)
    return trials.clock(run, is_captured) / repeats
