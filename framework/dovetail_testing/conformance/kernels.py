"""What every kernel set must do: compute what it claims as the meanings in plain torch do, and hold to its claims."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

from dovetail.contracts.device import DeviceView
from dovetail.contracts.errors import PluginError
from dovetail.contracts.kernels import OPS, Ask, Claim, Kernel, make_ask, meaning
from dovetail.contracts.ranks import PeerMemory
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.kernels.binding import KernelBinder, LoadedSet
from dovetail_testing.checks import COMPARED, as_failure, check, fail, no_error, raised
from dovetail_testing.conformance import kernels_mixers as mixers
from dovetail_testing.conformance import kernels_packed as packed
from dovetail_testing.conformance.base import Conformance
from dovetail_testing.conformance.growth import bytes_kept
from dovetail_testing.conformance.host_sync import HostSyncs
from dovetail_testing.conformance.interpreter import rounding_to_nearest
from dovetail_testing.conformance.kernels_samples import DIMS, NUM_RANKS, OPTIONS, Operands, sample
from dovetail_testing.conformance.kernels_steps import read_back

# Operations that a kernel set claims: what they are given and return, and what a test says of those it compared.


class ClaimedOperation(NamedTuple):
    """A claimed operation at a place: the question, what holds, and the kernel."""

    ask: Ask
    claim: Claim
    kernel: Kernel

    @property
    def has_results(self) -> bool:
        """Whether it returns something; others change operands alone."""
        return not OPS[self.ask.op].signature.endswith("None")


def compared(places: Sequence[ClaimedOperation]) -> str:
    """Return operations by the dtypes that they are claimed in: `linear, rms_norm in float32, bfloat16`."""
    dtypes: dict[str, list[str]] = {}
    for place in places:
        of_op = dtypes.setdefault(place.ask.op, [])
        of_op += [place.ask.dtype] if place.ask.dtype not in of_op else []
    by_dtypes: dict[str, list[str]] = {}
    for op, found in dtypes.items():
        by_dtypes.setdefault(", ".join(found), []).append(op)
    return "; ".join(f"{', '.join(ops)} in {found}" for found, ops in by_dtypes.items()) + "; no other is claimed"


def copies(operands: Operands) -> Operands:
    """Return operands whose tensors are copies."""
    return [one.clone() if isinstance(one, Tensor) else one for one in operands]


def row_of(operands: Operands, ask: Ask, row: int) -> Operands:
    """Return the operands of one row: those whose first axis is T."""
    parts = OPS[ask.op].signature.partition(" -> ")[0]
    is_by_row = {name: f"{name} [T" in parts for name in list(OPS[ask.op].operands)}
    return [
        one[row : row + 1] if isinstance(one, Tensor) and is_by_row[name] else one
        for name, one in zip(list(OPS[ask.op].operands), operands, strict=True)
    ]


def results_of(ask: Ask, found: Any, operands: Operands) -> tuple[Tensor, ...]:
    """Return an operation's results, and the operands that it changes behind them.

    What it leaves to its caller is left out: the first R of queries of `latent_rows`, and what `draw_adjusted` does not
    have to say.
    """
    results = () if found is None else found if isinstance(found, tuple) else (found,)
    row = OPS[ask.op]
    if ask.op in ("route", "norm_route"):
        results = packed.dense(ask, results)
    if ask.op == "latent_rows" and len(results) == 2:
        results = results[0][..., ask.dim("R") :], results[1]
    by_name = dict(zip(row.operands, operands, strict=True))
    if ask.op == "draw_adjusted" and len(results) == 2:
        results = results[0], read_back(results[1], by_name["rows"], by_name["numbers"])
    return *results, *(one for name, one in by_name.items() if name in row.changes)


def one_of_each(places: Sequence[ClaimedOperation]) -> Iterator[ClaimedOperation]:
    """Yield the first place of each operation."""
    seen: set[str] = set()
    for place in places:
        if place.ask.op not in seen:
            seen.add(place.ask.op)
            yield place


ROWS = (0, 1, 2, 7, 16, 17, 64, 65)
"""As `KernelSetConformance.rows`."""
FEW_ROWS = (0, 1, 17, 65)
"""As `KernelSetConformance.few_rows`."""
MANY_ROWS = (257, 513, 4097)
"""As `KernelSetConformance.many_rows`: errors of offsets and of grids begin at many rows."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}
"""Largest error of a row, as a part of the row."""
NARROW = 8
"""Numbers of a row, below which its error is held against the rows' usual size: sums may cancel to nearly nothing."""


class KernelSetConformance(Conformance):
    """What every kernel set must do.

    Attributes:
        dtypes: Those that operations are asked for: all that a model may have, of which the set claims what it has.
        ops: Operations to try; all of the table if empty.
        dims: Widths by letter, to try beside those of the kit: those that the set is made for.
        rows: Numbers of rows that the first claimed place of each operation is tried with, beside those its claim
            begins and ends with.
        few_rows: Those of its other places.
        many_rows: Further ones of the first.
        device: Where kernels run; "" for CUDA where there is a device, else the CPU.
        seed: Of the operands.
    """

    kind = "kernels"
    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16", "float16")
    ops: ClassVar[Sequence[str]] = ()
    dims: ClassVar[Mapping[str, Sequence[int]]] = {}
    rows: ClassVar[Sequence[int]] = ROWS
    few_rows: ClassVar[Sequence[int]] = FEW_ROWS
    many_rows: ClassVar[Sequence[int]] = MANY_ROWS
    device: ClassVar[str] = ""
    seed: ClassVar[int] = 7

    @pytest.fixture(autouse=True)
    def _rounding(self) -> Iterator[None]:
        with rounding_to_nearest() if self.view().is_interpreted else nullcontext():
            yield

    @classmethod
    def on(cls) -> torch.device:
        """Return the device."""
        return torch.device(cls.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @classmethod
    def view(cls) -> DeviceView:
        """Return what the set is told of it."""
        return device_of(cls.on()).view

    def asks(self, *, invariant: bool = False) -> Iterator[Ask]:
        """Yield every question of the kit: all operations, dtypes, widths and options."""
        for op, row in ((name, OPS[name]) for name in self.ops or OPS):
            for dtype in self.dtypes:
                for dims_of, options_of in packed.places(op, dtype) or ():
                    yield self._ask(op, dtype, dims_of, options_of, invariant=invariant)
            if packed.places(op, "") is not None:
                continue
            if (shapes := mixers.places(op)) is not None:
                for dtype, shape, named in itertools.product(self.dtypes, shapes, mixers.options(op)):
                    yield self._ask(op, dtype, shape, named, invariant=invariant)
                continue
            widths = [(*self.dims.get(letter, ()), *DIMS[letter]) for letter in row.dims]
            options = [OPTIONS[name] for name in row.options if name != "dtype"]
            for dtype, dims, given in itertools.product(
                self.dtypes, itertools.product(*widths), itertools.product(*options)
            ):
                named = dict(zip([name for name in row.options if name != "dtype"], given, strict=True))
                named |= {"dtype": getattr(torch, dtype)} if "dtype" in row.options else {}
                by_letter = dict(zip(row.dims, dims, strict=True))
                yield self._ask(op, dtype, by_letter, named, invariant=invariant)

    def _ask(self, op: str, dtype: str, dims: Mapping[str, int], options: Mapping[str, Any], *, invariant: bool) -> Ask:
        return make_ask(op, self.view(), dtype, dims, options, invariant=invariant, peers=NUM_RANKS)

    def places(self) -> list[ClaimedOperation]:
        """Return every operation that the set claims, made as an engine makes it; skip the test where there is none."""
        self._skip_elsewhere()
        if not (found := self._claimed()):
            pytest.skip(f"it claims no operation on {self.view().kind}")
        return found

    def _claimed(self) -> list[ClaimedOperation]:
        if "_places" not in vars(type(self)):
            type(self)._places = list(self._made())
        return self._places

    def _skip_elsewhere(self) -> None:
        """Skip a test on a device that the set does not list; Triton's interpreter stands for a GPU."""
        view = self.view()
        if view.kind not in self.plugin().devices and not view.is_interpreted:
            pytest.skip(f"`devices` of the set does not list {view.kind}; nothing was compared")

    _places: ClassVar[list[ClaimedOperation]]

    def _made(self) -> Iterator[ClaimedOperation]:
        with no_error("making the set"):
            made = self.plugin()()
        if num_bytes := made.peer_bytes(NUM_RANKS):
            made.connect(PeerMemory.alone(0, NUM_RANKS, num_bytes, self.on()))
        for ask in self.asks():
            answer = self._answer(made, ask)
            if isinstance(answer, Claim):
                binder = KernelBinder([LoadedSet("set", "the set", made, True)], self.view())
                with as_failure(PluginError):
                    binder.bind(ask)
                    yield ClaimedOperation(ask, answer, packed.called(ask, made.make(ask), list(OPS[ask.op].operands)))

    @staticmethod
    def _answer(made: Any, ask: Ask) -> object:
        with no_error(f"serves({ask.place})"):
            return made.serves(ask)

    def run(self, place: ClaimedOperation, operands: Operands) -> tuple[Tensor, ...]:
        """Call a kernel as a model does."""
        try:
            with torch.inference_mode():
                found = place.kernel(*operands)
        except Exception as error:  # as above
            rows = len(operands[0])
            fail(f"{place.ask.place} of {rows} rows in {place.ask.dtype} raised {raised(error)}")
        return results_of(place.ask, found, operands)

    def operands(self, ask: Ask, rows: int, *, seed: int = 0, is_strided: bool = False) -> Operands:
        """Make operands for an operation."""
        return sample(ask, rows, self.on(), self.seed + seed, is_strided=is_strided)

    # The standard tests.

    def test_answers_are_claims_or_reasons(self) -> None:
        """`serves` answers each question with a claim that can hold, or says in one line why there is no kernel."""
        self._skip_elsewhere()
        made = self.plugin()()
        for ask in itertools.chain(self.asks(), self.asks(invariant=True)):
            answer = self._answer(made, ask)
            if isinstance(answer, str):
                check(len(answer) > 0 and "\n" not in answer, f"{ask.place}: {answer!r} is not one line")
                continue
            with as_failure(PluginError):
                KernelBinder([LoadedSet("set", "the set", made, True)], self.view()).bind(ask)

    def test_asking_imports_no_kernel(self) -> None:
        """Loading the set imports neither torch nor Triton: on other devices nothing of them is used."""
        module = self.planned().target.partition(":")[0]
        if self.plugin_class is not None:
            pytest.skip("not installed: give `name` instead of `plugin_class` to test this")
        code = f"import sys, {module}; print(*({{'torch', 'triton'}} & sys.modules.keys()))"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        check(done.returncode == 0, f"importing {module} alone fails: {done.stderr.strip().rpartition(chr(10))[2]}")
        heavy = ", ".join(sorted(done.stdout.split()))
        check(not heavy, f"loading it imports {heavy}, which takes seconds; import that in make")

    def test_equals_the_meaning(self, record_property: Callable[[str, object], None]) -> None:
        """Each claimed operation equals its meaning row by row, in shape and dtype, up to 4,097 rows and odd widths."""
        seen: set[str] = set()
        self._skip_elsewhere()
        asked = ", ".join(self.ops or OPS)
        check(bool(self._claimed()), f"it claims no operation on {self.view().kind}; asked were {asked}")
        record_property(COMPARED, compared(self.places()))
        for place in self.places():
            rows = self.few_rows if place.ask.op in seen else (*self.rows, *self.many_rows)
            seen.add(place.ask.op)
            for num in self._within(place.claim, rows):
                self._compare(place, self.operands(place.ask, num), f"of {num} rows")

    def test_takes_strided_operands(self) -> None:
        """Operands that are slices of wider tensors give the same."""
        for place in self.places():
            for num in self._within(place.claim, (2, 17)):
                self._compare(place, self.operands(place.ask, num, is_strided=True), f"of {num} sliced rows")

    def test_operands_are_untouched(self) -> None:
        """No operand is written to but those that the claim names."""
        for place in self.places():
            for num in self._within(place.claim, (2, 17)):
                operands = self.operands(place.ask, num)
                before = [one.clone() if isinstance(one, Tensor) else one for one in operands]
                self.run(place, operands)
                for name, was, now in zip(list(OPS[place.ask.op].operands), before, operands, strict=True):
                    if isinstance(now, Tensor) and name not in place.claim.overwrites | OPS[place.ask.op].changes:
                        check(
                            torch.equal(now, was),
                            f"{place.ask.place} of {num} rows writes to {name}; say overwrites in the claim, or do not",
                        )

    def test_rows_are_independent_where_claimed(self) -> None:
        """Where a claim says so, a row has the same bits alone and among others."""
        places = [one for one in self.places() if one.claim.row_independent and one.has_results]
        if not places:
            pytest.skip("nothing claimed: no claim says row_independent")
        for place in places:
            tried = (65,) if place.ask.op in mixers.BY_REQUEST else (7, 17, 65)  # several requests each
            for num in self._within(place.claim, [min(num, max(1, *self.rows)) for num in tried]):
                operands = self.operands(place.ask, num)
                together = self.run(place, copies(operands))
                if place.ask.op in mixers.BY_REQUEST:
                    self._alone(place, operands, together)
                    continue
                for row in {0, num // 2, num - 1}:
                    alone = self.run(place, row_of(operands, place.ask, row))
                    num_own = len(together) - len(OPS[place.ask.op].changes)  # what is changed has other axes
                    same = all(
                        torch.equal(a[0], b[row]) for a, b in zip(alone[:num_own], together[:num_own], strict=True)
                    )
                    check(same, f"{place.ask.place}: row {row} of {num} is not what it is alone")

    def _alone(self, place: ClaimedOperation, operands: Operands, together: tuple[Tensor, ...]) -> None:
        for tokens, row, own in mixers.requests_of(list(OPS[place.ask.op].operands), operands):
            alone = self.run(place, own)
            same = torch.equal(alone[0], together[0][tokens]) and torch.equal(alone[1][row], together[1][row])
            check(
                same,
                f"{place.ask.place}: the request of tokens {tokens.start} to {tokens.stop} is not what it is alone",
            )

    def test_a_request_is_folded_alike_wherever_it_is_cut(self) -> None:
        """Cut at multiples of 64 tokens, its tokens and its state have the bits that they have at once."""
        places = [one for one in self.places() if one.ask.op in mixers.BY_REQUEST and one.claim.row_independent]
        if not places:
            pytest.skip("nothing claimed: no operation that folds tokens into a state says row_independent")
        seen: set[str] = set()
        for place in places:
            names = list(OPS[place.ask.op].operands)
            chosen = mixers.CUTS[:1] if place.ask.op in seen else mixers.CUTS
            seen.add(place.ask.op)
            for cuts in chosen:
                whole = sample(
                    place.ask,
                    cuts[-1],
                    self.on(),
                    self.seed,
                    requests=mixers.MixerRequests([cuts[-1]], [0], self.on(), 3),
                )
                parts = copies(whole)
                at_once = self.run(place, whole)
                folded = [self.run(place, own) for own in mixers.split_at(names, parts, cuts, self.on())]
                same = torch.equal(torch.cat([one[0] for one in folded]), at_once[0])
                same = same and torch.equal(folded[-1][1], at_once[1])
                check(same, f"{place.ask.place}: {cuts[-1]} tokens cut at {cuts[:-1]} are not what they are at once")

    def test_results_are_not_borrowed(self) -> None:
        """A result stays as it is when the kernel is called again with other operands."""
        for place in self.places():
            for num in self._within(place.claim, (2, 17)):
                first = self.run(place, self.operands(place.ask, num))
                kept = [one.clone() for one in first]
                self.run(place, self.operands(place.ask, num, seed=1))
                same = all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
                check(same, f"{place.ask.place}: the next call changes what the last one returned; return a new tensor")

    def test_keeps_nothing(self) -> None:
        """Calls leave nothing behind."""
        for place in one_of_each(self.places()):
            [num, *_] = self._within(place.claim, (2, max(1, place.claim.rows[0])))
            operands = self.operands(place.ask, num)
            kept = bytes_kept(lambda: self.run(place, copies(operands)), 4)  # noqa: B023 - called at once
            check(not kept, f"{place.ask.place}: every call leaves {kept} bytes behind")

    def test_trials_are_operands(self) -> None:
        """What it brings for `auto` to time an operation with is what the kernel takes, with as many rows."""
        made = self.plugin()()
        for place in one_of_each(self.places()):
            num = self._within(place.claim, (17, max(1, place.claim.rows[0])))[-1]
            with no_error(f"trial({place.ask.place}) of {num} rows"):
                given = made.trial(place.ask, num, self.on())
            if given is None:
                continue
            names = list(OPS[place.ask.op].operands)
            check(
                len(given) == len(names) and len(given[0]) == num,
                f"trial({place.ask.place}) of {num} rows returned {len(given)} operands; it has {', '.join(names)}",
            )
            fresh = packed.called(place.ask, made.make(place.ask), names)  # the other one has packed its matrix
            self._compare(place._replace(kernel=fresh), list(given), f"of its trial of {num} rows")

    def test_what_is_capturable_reads_nothing_on_the_host(self) -> None:
        """A kernel that says that a graph can record it is recorded, and replayed with other operands."""
        places = [one for one in self.places() if one.claim.capturable]
        if not places:
            pytest.skip("nothing claimed: no claim says capturable")
        for place in places:
            for num in self._within(place.claim, (2, 17)):
                if device_of(self.on()).captures:
                    self._replayed(place, num)
                elif not self.view().is_interpreted:  # the interpreter itself reads tensors on the host
                    with HostSyncs() as syncs:
                        self.run(place, self.operands(place.ask, num))
                    found = "; ".join(syncs.found[:2])
                    check(not found, f"{place.ask.place}: it claims to be capturable, and reads a tensor: {found}")

    def _replayed(self, place: ClaimedOperation, num: int) -> None:
        operands, others = (self.operands(place.ask, num, seed=seed) for seed in (0, 1))
        want = self.run(place, copies(others))
        device = device_of(self.on())
        try:
            with torch.inference_mode():
                graph, found, _ = device.capture(lambda: place.kernel(*operands), None)
        except RuntimeError as error:
            fail(f"{place.ask.place}: it claims to be capturable, and recording it raised {raised(error)}")
        for mine, other in zip(operands, others, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(other)
        graph.replay()
        device.synchronize()
        for got, wanted in zip(results_of(place.ask, found, operands), want, strict=True):
            check(torch.equal(got, wanted), f"{place.ask.place}: a replay does not give what a call gives")

    def _compare(self, place: ClaimedOperation, operands: Operands, what: str) -> None:
        with torch.inference_mode():
            given = copies(operands)
            plain = packed.called(place.ask, meaning(place.ask), list(OPS[place.ask.op].operands))
            wanted = results_of(place.ask, plain(*given), given)
        found = self.run(place, operands)
        label = f"{place.ask.place} {what} in {place.ask.dtype}"
        check(len(found) == len(wanted), f"{label}: {len(found)} results, not {len(wanted)}")
        for got, one in zip(found, wanted, strict=True):
            check(isinstance(got, Tensor), f"{label}: it returned {type(got).__name__}, not a tensor")
            check(got.shape == one.shape, f"{label}: shape {list(got.shape)}, not {list(one.shape)}")
            check(got.dtype == one.dtype, f"{label}: dtype {got.dtype}, not {one.dtype}")
            if not one.dtype.is_floating_point:
                check(torch.equal(got, one), f"{label}: {int((got != one).sum())} of {one.numel()} numbers are wrong")
            elif len(one):
                off = torch.where(got == one, 0.0, got.double() - one.double())  # infinity is infinity's equal
                size = one.double().nan_to_num(0.0, 0.0, 0.0).flatten(1).norm(dim=1)
                if one[0].numel() < NARROW:
                    size = size.clamp_min(float(size.square().mean().sqrt()))
                error = off.flatten(1).norm(dim=1) / size.clamp_min(1e-6)
                row = int(error.nan_to_num(torch.inf).argmax())
                worst = float(error.nan_to_num(torch.inf)[row])
                most = {**TOLERANCE, **packed.tolerance(place.ask)}[place.ask.dtype]
                check(worst <= most, f"{label}: row {row} is wrong by {worst:.2g} of itself")

    @staticmethod
    def _within(claim: Claim, rows: Sequence[int]) -> list[int]:
        first, last = claim.rows
        edges = [edge for edge in (first, last) if 0 < edge <= max(rows)]
        return sorted({num for num in (*rows, *edges) if first <= num <= last})
