"""`--kernels auto` measures the sets that serve an operation, keeps the figures, and takes the fastest for its rows."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.contracts.device import Device, DeviceView
from dovetail.contracts.errors import PluginError
from dovetail.contracts.kernels import OPS, Ask, Claim, KernelSet, make_ask, meaning
from dovetail.messages import KernelUse
from dovetail.runtime.kernels.attempts import FREE, MAX_NUMBERS
from dovetail.runtime.kernels.binding import Bands, KernelBinder, LoadedSet
from dovetail.runtime.kernels.contest import TRIAL_ROWS, Trials, trial_rows
from dovetail.runtime.start import check
from dovetail.sdk.quantization.forms import Int4
from dovetail.sdk.trials import MADE, operands
from dovetail_server.cli import model_facts as info
from dovetail_testing.engine import make_core
from dovetail_testing.models import make_model

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
CPU, VIEW, US = torch.device("cpu"), DeviceView("cpu"), 1e-6
NORM = make_ask("rms_norm", VIEW, "float32", {"H": 64}, {})


class Plain(KernelSet):
    """Serves some operations by their meanings, counted and named by where they are called."""

    devices = frozenset({"cpu"})

    def __init__(self, *ops: str, off: float = 0.0, **claims: Any) -> None:
        self.ops, self.off, self.claims, self.num_calls = ops, off, claims, 0

    def serves(self, ask: Ask) -> Claim | str:
        return (
            Claim(self.claims.get("rows", ask.rows), **{k: v for k, v in self.claims.items() if k != "rows"})
            if (ask.op in self.ops)
            else f"no {ask.op}"
        )

    def make(self, ask: Ask) -> Any:
        plain = meaning(ask)

        def kernel(*given: Any) -> Any:
            self.num_calls += 1
            found = plain(*given)
            return found + self.off if self.off else found

        return kernel


class MadeUp:
    """A clock that runs nothing: seconds by how many sets were timed before, at each number of rows in turn."""

    def __init__(self, *seconds: list[float], num_rows: int = len(TRIAL_ROWS)) -> None:
        self._left = [each[at] for at in range(num_rows) for each in seconds]
        self.captured: list[bool] = []

    def __call__(self, run: Callable[[], object], is_captured: bool) -> float:
        self.captured.append(is_captured)
        return self._left.pop(0)


def per_call(seconds: float, rows: int) -> float:
    """Seconds of what is timed, in which a call takes so long."""
    return seconds * max(1, min(32, 4096 // rows))


def clock(*by_set: list[float]) -> MadeUp:
    """Of sets that take so many microseconds at each of `TRIAL_ROWS`."""
    return MadeUp(*([per_call(us * US, rows) for us, rows in zip(each, TRIAL_ROWS, strict=True)] for each in by_set))


def bound(timer: Any, *sets: KernelSet, folder: Path | None = None, **more: Any) -> KernelBinder:
    """A binder whose `auto` has found sets called a, b, …"""
    loaded = [LoadedSet("abc"[at], f"kernels {'abc'[at]!r} of x 1", one, False) for at, one in enumerate(sets)]
    trials = None if timer is None else lambda: Trials(CPU, "a processor", timer, folder)
    return KernelBinder(loaded, VIEW, trials=trials, **more)


def test_each_class_of_rows_goes_to_the_fastest(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """One that is faster by the margin has the rows of its class; the table and the log show the figures."""
    monkeypatch.setattr(logging.getLogger("dovetail"), "propagate", True)
    timer = clock([10, 10, 10, 10, 10], [5, 9.6, 20, 20, 5])
    binder = bound(timer, Plain("rms_norm"), Plain("rms_norm"))
    with caplog.at_level(logging.INFO, "dovetail"):
        kernel = binder.bind(NORM)
    assert isinstance(kernel, Bands)
    [use] = binder.table
    assert use.served == ((0, 1, "b"), (2, 512, "a"), (513, (1 << 31) - 1, "b"))
    assert use.measured.startswith("us: 1 rows a 10.0, b 5.0; 16 rows a 10.0, b 9.6; ")
    assert "auto chose b from 0 rows on, a from 2 rows on, b from 513 rows on" in caplog.text
    assert not any(timer.captured)


def test_the_first_stays_where_no_other_is_clearly_faster() -> None:
    """What loses is listed with its ratio."""
    binder = bound(clock([10] * 5, [9.8] * 5), Plain("rms_norm"), Plain("rms_norm"))
    binder.bind(NORM)
    [use] = binder.table
    assert (use.served, use.others) == (((0, (1 << 31) - 1, "a"),), (("b", "takes 0.98 times as long as a"),))


def test_figures_are_kept(tmp_path: Path) -> None:
    """A later start reads them and times nothing; of another library, model or set they do not hold."""
    sets = Plain("rms_norm"), Plain("rms_norm")
    first = bound(clock([10] * 5, [5] * 5), *sets, folder=tmp_path)
    first.bind(NORM)
    [file] = tmp_path.glob("kernels-*.json")
    kept = json.loads(file.read_text())
    assert (kept["operation"], kept["device"], kept["sets"]) == ("rms_norm H=64", "a processor", ["a", "b"])
    again = bound(MadeUp(num_rows=0), *sets, folder=tmp_path)
    again.bind(NORM)
    assert again.table == first.table

    class Newer(Plain):
        @classmethod
        def library(cls) -> str:
            return "2"

    bound(clock([10] * 5, [5] * 5), sets[0], Newer("rms_norm"), folder=tmp_path).bind(NORM)
    assert len(list(tmp_path.glob("*.json"))) == 2
    file.write_text('{"times": {"a": [1]}, "failed": {}}')
    third = bound(clock([10] * 5, [20] * 5), *sets, folder=tmp_path)
    third.bind(NORM)
    assert third.table[0].served[0][2] == "a"


def test_what_computes_something_else_or_fails_is_left_out() -> None:
    """However fast; of a failure for want of memory nothing is kept."""
    binder = bound(clock([10] * 5), Plain("rms_norm"), Plain("rms_norm", off=1.0))
    binder.bind(NORM)
    [use] = binder.table
    assert use.served[0][2] == "a"
    assert use.others[0][1].startswith("its result of 1 rows differs from the default's by ")
    binder = bound(clock([10] * 5), Plain("rms_norm"), Plain("rms_norm", off=float("nan")))
    binder.bind(NORM)
    assert binder.table[0].others == (("b", "its result of 1 rows differs from the default's by inf"),)


def test_out_of_memory_is_forgotten(tmp_path: Path) -> None:
    """It may be there the next time."""

    class Large(Plain):
        def make(self, ask: Ask) -> Any:
            def kernel(x: torch.Tensor, *rest: Any) -> Any:
                raise torch.OutOfMemoryError("no room\nat all")

            return kernel

    binder = bound(clock([10] * 5), Large("rms_norm"), Plain("rms_norm"), folder=tmp_path)
    binder.bind(NORM)
    assert binder.table[0].served[0][2] == "b"
    assert binder.table[0].others == (("a", "it could not be measured: OutOfMemoryError: no room at all"),)
    assert not list(tmp_path.iterdir())


def test_one_set_is_not_measured() -> None:
    """Nor are sets that share no rows; each kernel is tried by two calls, whose results must not share memory."""
    for sets in ([Plain("rms_norm")], [Plain("rms_norm", rows=(0, 8)), Plain("rms_norm", rows=(9, 100))]):
        binder = bound(MadeUp(num_rows=0), *sets)
        binder.bind(NORM)
        assert not binder.table[0].measured
        assert [one.num_calls for one in sets] == [2] * len(sets)


def test_named_sets_come_before_those_that_auto_finds() -> None:
    """Nothing is measured of rows that they take; for the rest the fastest follows them."""
    everything = 0, (1 << 31) - 1

    def served(named: Plain, timer: MadeUp) -> tuple[Any, str]:
        sets = named, Plain("rms_norm"), Plain("rms_norm")
        loaded = [LoadedSet("abc"[at], f"set {at}", one, at == 0, at > 0) for at, one in enumerate(sets)]
        binder = KernelBinder(loaded, VIEW, trials=lambda: Trials(CPU, "a processor", timer))
        binder.bind(NORM)
        [use] = binder.table
        return use.served, use.measured

    assert served(Plain("rms_norm"), MadeUp(num_rows=0)) == (((*everything, "a"),), "")
    bands, measured = served(Plain("rms_norm", rows=(2, 8)), clock([10] * 5, [20, 5, 20, 20, 20]))
    assert bands == ((0, 1, "b"), (2, 8, "a"), (9, 16, "c"), (17, everything[1], "b"))
    assert measured.startswith("us: 1 rows b 10.0, c 20.0; ")


class Does(Plain):
    """Claims a norm, and does something else."""

    def __init__(self, kernel: Callable[..., Any], brings: Any = (), **claims: Any) -> None:
        super().__init__("rms_norm", **claims)
        self.kernel, self.brings = kernel, brings

    def make(self, ask: Ask) -> Any:
        return self.kernel

    def trial(self, ask: Ask, rows: int, device: torch.device) -> Any:
        return super().trial(ask, rows, device) if self.brings == () else self.brings


def in_place(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm, written over its operand."""
    return x.copy_(meaning(NORM)(x, weight, eps))


BUFFER = torch.empty(3, 64)


def one_buffer(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm, in memory that each call returns."""
    return BUFFER.copy_(meaning(NORM)(x, weight, eps))


def no_library(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    raise OSError("no\nlibrary")


LIES = {
    "raises": (Does(no_library), "a call of 3 rows raises OSError: no library; "),
    "takes too few": (Does(lambda x, weight: x), "a call of 3 rows raises TypeError: "),
    "shape": (Does(lambda x, weight, eps: x[:, 1:]), "returns float32 [3, 63]; it is float32 [3, 64]"),
    "dtype": (Does(lambda x, weight, eps: x.double()), "returns float64 [3, 64]; it is float32 [3, 64]"),
    "nothing": (Does(lambda x, weight, eps: None), "returns no tensor; it is float32 [3, 64]"),
    "numbers": (Does(lambda x, weight, eps: x * 2), "a call of 3 rows differs from what it means by "),
    "NaN": (Does(lambda x, weight, eps: x * float("nan")), "a call of 3 rows differs from what it means by inf"),
    "its operand": (Does(in_place), "a call of 3 rows writes to x, which the claim's overwrites does not name; "),
    "one buffer": (Does(one_buffer), "a call of 3 rows returns memory that the next call returns again; "),
    "many rows": (Does(no_library, rows=(9, 90)), "a call of 9 rows raises OSError: no library"),
    "its operands": (Does(no_library, [1, 2]), "its trial of rms_norm H=64 with 3 rows cannot be computed: ValueError"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_set_that_cannot_do_what_it_claims_is_refused(case: str) -> None:
    """One line names it, the operation and what it does, before there are weights; whether `auto` found it or not."""
    lies, message = LIES[case]
    for is_named in (False, True):
        loaded = [LoadedSet("a", "kernels 'a' of x 1", lies, is_named)]
        with pytest.raises(PluginError) as caught:
            KernelBinder(loaded, VIEW, trials=lambda: Trials(CPU, "a processor", MadeUp(num_rows=0))).bind(NORM)
        said = str(caught.value)
        assert said.startswith("kernels 'a' of x 1: ")
        assert message in said
        assert "\n" not in said


class Wide(Plain):
    """Returns nothing."""

    def make(self, ask: Ask) -> Any:
        return lambda *given: None

    def trial(self, ask: Ask, rows: int, device: torch.device) -> Any:
        return [torch.zeros(rows, 4), None, 1.0]


def test_what_a_caller_writes_is_not_compared() -> None:
    """The first R of queries of `latent_rows` may hold anything; the others may not."""
    ask = make_ask("latent_rows", VIEW, "float32", {"R": 8, "D": 4}, {})

    class Rows(Plain):
        def __init__(self, at: int) -> None:
            super().__init__("latent_rows")
            self.at = at

        def make(self, ask: Ask) -> Any:
            def kernel(*given: Any) -> Any:
                queries, rows = meaning(ask)(*given)
                queries[..., self.at] = float("nan")
                return queries, rows

            return kernel

    bound(MadeUp(num_rows=0), Rows(7)).bind(ask)
    with pytest.raises(PluginError, match="latent_rows R=8 D=4 in float32, and a call of 3 rows differs"):
        bound(MadeUp(num_rows=0), Rows(8)).bind(ask)


def test_what_cannot_be_tried_is_bound() -> None:
    """A set without operands, widths that are too large, no rows at all, too little memory; and what is built in.

    Nor is an operation held against its meaning that leaves something of its result to the kernel.
    """

    def full(*given: Any) -> Any:
        raise torch.OutOfMemoryError

    wide = NORM._replace(dims=(("H", MAX_NUMBERS + 1),))
    untried = (Does(no_library, None), NORM), (Does(no_library), wide), (Does(no_library, rows=(0, 0)), NORM)
    for one, ask in (*untried, (Does(full), NORM)):
        bound(MadeUp(num_rows=0), one).bind(ask)
    route = make_ask("route", VIEW, "float32", {}, {"routing": None, "dtype": torch.float32})
    assert route.op in FREE
    bound(MadeUp(num_rows=0), Wide("route")).bind(route)
    loaded = [LoadedSet("a", "a", Does(no_library), False, is_builtin=True)]
    KernelBinder(loaded, VIEW, trials=lambda: Trials(CPU, "", MadeUp(num_rows=0))).bind(NORM)


def test_rows_that_must_not_differ_have_one_set() -> None:
    """With `--batch-invariant` the mean of all rows decides."""
    sets = [Plain("rms_norm", row_independent=True) for _ in range(2)]
    binder = bound(clock([10] * 5, [1, 1, 1, 11, 11]), *sets)
    binder.bind(NORM._replace(invariant=True))
    assert [name for *_, name in binder.table[0].served] == ["b"]


def test_one_that_no_graph_can_record_does_not_replace_one_that_can() -> None:
    """Steps would leave their graphs."""
    sets = Plain("rms_norm", capturable=True), Plain("rms_norm")
    binder = bound(MadeUp(num_rows=0), *sets, captured=True)
    binder.bind(NORM._replace(captured=True))
    assert binder.is_capturable
    assert binder.table[0].others == (("b", "comes after one that a graph can record, which it cannot"),)


def test_an_operation_without_a_trial_is_for_the_user() -> None:
    """The error names both sets, and what to write."""
    ask = make_ask("begin_step", VIEW, "float32", {}, {})
    with pytest.raises(PluginError, match=r"a and b both serve begin_step, and it cannot be measured .* --kernels b,a"):
        bound(MadeUp(num_rows=0), Plain("begin_step"), Plain("begin_step")).bind(ask)


def test_further_ranks_take_what_the_first_has_measured() -> None:
    """They time nothing; what the first has not chosen is refused."""
    sets = Plain("rms_norm"), Plain("rms_norm")
    first = bound(clock([10] * 5, [5, 5, 20, 20, 20]), *sets)
    first.bind(NORM)
    other = bound(MadeUp(num_rows=0), *sets, decided=first.table)
    other.bind(NORM)
    assert other.table == first.table
    for decided in ((), (KernelUse(operation="rms_norm H=64", dtype="float32", served=((0, 9, "z"),)),)):
        with pytest.raises(PluginError, match="both serve rms_norm H=64 on this rank, and the first rank has chosen"):
            bound(MadeUp(num_rows=0), *sets, decided=decided).bind(NORM)


@pytest.mark.parametrize("us", [5.0, 20.0])
def test_a_fused_kernel_is_measured_against_its_parts(us: float) -> None:
    """Of a package, where another set serves a part: it is taken where it is faster, and further ranks do likewise."""
    ask = make_ask("add_rms_norm", VIEW, "float32", {"H": 64}, {})
    sets = Plain("rms_norm"), Plain("add_rms_norm")
    first = bound(clock([10.0] * 5, [us] * 5), *sets)
    first.bind(ask)
    other = bound(MadeUp(num_rows=0), *sets, decided=first.table)
    other.bind(ask)
    assert [(use.operation, use.served) for use in other.table] == [(use.operation, use.served) for use in first.table]
    fused = next(use for use in first.table if use.operation == ask.place)
    name = "b" if us < 10 else "composed"
    assert fused.served == ((0, (1 << 31) - 1, name),)
    assert fused.measured.startswith("us: 1 rows composed 10.0, b ")
    loser = ("composed", "takes 2.00 times as long as b") if us < 10 else ("b", "takes 2.00 times as long as composed")
    assert loser in fused.others
    assert [use.operation for use in first.table if use is not fused] == ([] if us < 10 else ["rms_norm H=64"])


def test_a_fused_kernel_alone_is_not_measured() -> None:
    """Where no other set serves a part of it, what it would be put together of is plain torch."""
    binder = bound(MadeUp(num_rows=0), Plain("add_rms_norm", "rms_norm"))
    binder.bind(make_ask("add_rms_norm", VIEW, "float32", {"H": 64}, {}))
    assert (binder.table[0].served[0][2], binder.table[0].measured) == ("a", "")


def test_much_work_is_not_timed_on_the_host() -> None:
    """A head of many tokens is timed at few rows; one number of rows is left however large it is."""
    contenders: Any = [SimpleNamespace(claim=Claim((0, 10_000)))]
    sizes = ({"N": 64, "K": 64}, {"N": 151_936, "K": 896}, {"N": 1 << 20, "K": 1 << 16})
    asks = [make_ask("linear", VIEW, "bfloat16", each, {}) for each in sizes]
    assert [trial_rows(ask, contenders, True) for ask in asks] == [TRIAL_ROWS, (1, 16), (1,)]
    assert trial_rows(asks[1], contenders, False) == TRIAL_ROWS
    calls: list[int] = []

    def seconds(run: Callable[[], object], is_captured: bool) -> float:
        before = sum(one.num_calls for one in sets)
        run()
        calls.append(sum(one.num_calls for one in sets) - before)
        return 1.0

    sets = Plain("linear"), Plain("linear")
    bound(seconds, *sets).bind(make_ask("linear", VIEW, "float32", {"N": 2048, "K": 2048}, {})._replace(rows=(1, 64)))
    assert calls == [32, 32, 16, 16, 4, 4]


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example packages' modules, importable."""
    for name in ("dovetail-vector-norm", "dovetail-sorted-draw"):
        monkeypatch.syspath_prepend(str(EXAMPLES / name))


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize(
    ("module", "cls", "op", "dims"),
    [
        ("dovetail_vector_norm", "VectorNorm", "rms_norm", {"H": 64}),
        ("dovetail_vector_norm", "VectorNorm", "linear", {"N": 12, "K": 64}),
        ("dovetail_sorted_draw", "SortedDraw", "draw", {"V": 100}),
    ],
)
@pytest.mark.parametrize("is_faster", [True, False])
def test_example_sets_are_chosen_by_their_figures(
    module: str, cls: str, op: str, dims: dict[str, int], is_faster: bool
) -> None:
    """Beside another set that computes the meaning, by a made-up clock: results are compared for real."""
    example = getattr(__import__(module), cls)()
    us = [5.0] * 5 if is_faster else [20.0] * 5
    binder = bound(clock([10.0] * 5, us), Plain(op), example)
    binder.bind(make_ask(op, VIEW, "float32", dims, {}))
    [use] = [use for use in binder.table if use.operation.startswith(op)]
    assert use.served == ((0, (1 << 31) - 1, "b" if is_faster else "a"),)
    assert use.measured
    sys.modules.pop(module)


def test_the_host_has_a_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU figures are kept with users' caches; a call's seconds are positive."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trials = Trials.on(Device(CPU))
    assert trials.folder == tmp_path / "dovetail"
    assert trials.model != "cpu"
    calls: list[int] = []
    assert trials.clock(lambda: calls.append(1), False) >= 0
    assert len(calls) == 8


@pytest.mark.parametrize("op", sorted(MADE))
def test_made_up_operands_are_those_of_the_signature(op: str) -> None:
    """The meaning takes them, and gives as many rows."""
    widths = {"H": 64, "F": 1 if op == "rotations" else 32, "D": 16, "R": 20, "N": 6, "K": 64, "W": 16}
    values = {"act": "silu_and_mul", "dtype": torch.float32, "form": Int4(32)}
    row = OPS[op]
    ask = make_ask(op, VIEW, "float32", {k: widths[k] for k in row.dims}, {k: values[k] for k in row.options})
    kernel: Any = meaning(ask)
    given = operands(ask, 3, CPU)
    assert given is not None
    found = kernel(*(kernel.pack(one) if isinstance(one, dict) else one for one in given))
    assert len(found[0] if isinstance(found, tuple) else found) == 3


def test_an_engine_measures_while_it_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where `auto` finds two sets for one operation of the model; a later start takes their figures."""
    sets = [LoadedSet(name, f"kernels {name!r} of x 1", Plain("rms_norm"), False) for name in ("slow", "fast")]
    timed: list[bool] = []

    def seconds(run: Callable[[], object], is_captured: bool) -> float:
        timed.append(is_captured)
        return 1.0 + len(timed) % 2

    folder = make_model(tmp_path / "model", "LlamaForCausalLM")
    monkeypatch.setattr(check, "load_sets", lambda plugins: sets)
    monkeypatch.setattr(Trials, "on", lambda device: Trials(CPU, "a processor", seconds, tmp_path / "kept"))
    uses = [use for use in make_core(folder).info.kernels if use.operation.startswith("rms_norm")]
    assert {name for use in uses for *_, name in use.served} == {"fast"}
    assert all(use.measured.startswith("us: 1 rows slow ") for use in uses)
    assert len(timed) == 2 * len(TRIAL_ROWS) * len(uses)
    again = [use for use in make_core(folder).info.kernels if use.operation.startswith("rms_norm")]
    assert (again, len(timed)) == (uses, 2 * len(TRIAL_ROWS) * len(uses))


def test_info_shows_who_may_serve_and_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without torch or a device: both sets of an operation, with the figures of an earlier start of these sets."""
    sets = {"one": Plain("rms_norm"), "two": Plain("rms_norm", "linear"), "three": Plain("linear")}

    def planned(*names: str, requested: bool = False) -> Any:
        found = [SimpleNamespace(name=name, requested=requested) for name in names]
        return SimpleNamespace(of_kind=lambda kind: found if kind == "kernels" else [])

    monkeypatch.setattr("dovetail_server.cli.model_facts.import_planned", lambda one: lambda: sets[one.name])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts: Any = SimpleNamespace(hidden_size=64, layers=(), vocab_size=100, dtype="float32")
    served = info.kernels_of(planned("one", "two"), facts)
    assert (served["rms_norm"], served["linear"], served["act_and_mul"]) == ("one or two", "two", "plain")
    assert info.kernels_of(planned("one", "two", requested=True), facts)["rms_norm"] == "one"
    assert info.figures_of(planned("one", "two"), "float32", served) == {}
    loaded = [LoadedSet(name, name, sets[name], False) for name in ("one", "two")]
    timer = clock([10] * 5, [5] * 5)
    KernelBinder(loaded, VIEW, trials=lambda: Trials(CPU, "a processor", timer, tmp_path / "dovetail")).bind(NORM)
    (tmp_path / "dovetail/kernels-broken.json").write_text("{")
    [(place, figures)] = info.figures_of(planned("one", "two"), "float32", served).items()
    assert place == "rms_norm H=64 on a processor"
    assert figures.startswith("us: 1 rows one 10.0, two 5.0; ")
    assert info.figures_of(planned("one", "two"), "bfloat16", served) == {}
    assert info.figures_of(planned("one", "three"), "float32", served) == {}
    assert info.figures_of(planned("one", "two"), "float32", {"rms_norm": "one"}) == {}
