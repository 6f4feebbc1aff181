"""`auto` measures the attention backends that serve, and takes the fastest for prompts and for decode rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from dovetail.base.settings import EngineSettings
from dovetail.cache.pool import PagedKVPool
from dovetail.contracts.errors import PluginError
from dovetail.plugins import PlannedPlugin
from dovetail.plugins.plan import PluginPlan
from dovetail.runtime.attention.backends import Chosen, choose_backends
from dovetail.runtime.attention.grouped import attended_groups
from dovetail.runtime.attention.hybrid import HybridBackend
from dovetail.runtime.attention.measure import STEPS, AttentionTimes, MeasuredLayers, Measuring, TrialStep
from dovetail.runtime.start import check
from dovetail_backends.torch_native import TorchNativeBackend
from dovetail_server.start.startup import engine_notes
from dovetail_testing.conformance.attention_world import Case
from dovetail_testing.engine import make_core
from dovetail_testing.models import make_model

CPU = torch.device("cpu")
CASE = Case(lengths=[(1, 1)])
US = 1e-6


class Native(TorchNativeBackend):
    """A backend that can be captured, as its caps say, and notes that it was made."""

    caps = replace(TorchNativeBackend.caps, graph="mixed", needs_cpu_lens=False)
    made: ClassVar[list[str]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made.append(type(self).__name__)


class One(Native):
    """The default."""


class Two(Native):
    """Another."""


class Three(Native):
    """Raises when it is run, though it was made."""

    def plan_in_graph(self, batch: Any) -> None:
        raise RuntimeError("no such\nkernel")


class Eager(Native):
    """Cannot be captured."""

    caps = replace(Native.caps, graph="none")


class Told:
    """A clock that runs nothing but the host's part, and tells what it was told to.

    Attributes:
        seconds: By backend, of a layer of each step of `STEPS`.
        asked: Backends of the steps that were timed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: list[float]) -> None:
        self.seconds, self.asked = seconds, []  # type: ignore[var-annotated]
        self._now: list[tuple[str, int]] = []
        real = MeasuredLayers.seconds

        def noted(world: MeasuredLayers, backend: Any, step: Any, clock: Any) -> float:
            self._now.append((backend.__name__, STEPS.index(step)))
            return real(world, backend, step, clock)

        monkeypatch.setattr(MeasuredLayers, "seconds", noted)
        monkeypatch.setattr(MeasuredLayers, "runner", made)
        monkeypatch.setattr(MeasuredLayers, "distance", lambda *args: 0.0)

    def __call__(self, run: Callable[[], None], is_captured: bool) -> float:
        name, at = self._now[-1]
        self.asked.append(name)
        if name == "Three":
            run()
        return self.seconds[name][at] * STEPS[at].num_repeats * 2


def made(world: MeasuredLayers, backend_class: Any, step: Any, **options: Any) -> Callable[[], None]:
    """In place of `MeasuredLayers.runner`: makes the backend, over a pool of two pages, and has it plan."""
    [group] = attended_groups(world.config)
    backend = backend_class(world.config, PagedKVPool(group, 2, 16, world.dtype, world.device), world.device)
    return lambda: backend.plan_in_graph(SimpleNamespace())


def plan(*classes: type[Native], **changes: Any) -> Any:
    """The plugins of a process whose `auto` has these candidates."""
    planned = [
        PlannedPlugin(
            kind="attention_backend", name=each.__name__.lower(), target="m:a", distribution="acme", version="1",
            api=1, roles=("engine",), requested=False, **changes,
        )
        for each in classes
    ]  # fmt: skip
    return SimpleNamespace(
        plan=PluginPlan(plugins=tuple(planned)), candidates=lambda kind: iter(zip(planned, classes, strict=True))
    )


def choose(plugins: Any, measuring: Measuring | None, decided: Any = (), **settings: Any) -> Chosen:
    """What `auto` chooses for a small model."""
    given = EngineSettings(model_path="x", device="cpu", page_size=16, **settings)
    return choose_backends(plugins, CASE.config(), CPU, torch.float32, given, measuring, decided)


def test_the_fastest_serves_each_use(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Prompts and decode rows are served by what is fastest at each, and the log line and the figures say so."""
    clock = Told(monkeypatch, One=[10 * US] * 3 + [100 * US] * 2, Two=[12 * US] * 3 + [60 * US] * 2)
    with caplog.at_level(logging.INFO, "dovetail"):
        chosen = choose(plan(One, Two), Measuring(clock))
    assert chosen.names == (("two", "one"),)
    assert chosen.label == "two+one"
    [backend] = chosen.backends
    assert issubclass(backend, HybridBackend)
    assert (backend.prefill_class, backend.decode_class) == (Two, One)
    assert "decode of 1 rows one 10, two 12" in chosen.measured
    assert "prefill of 512 tokens one 100, two 60" in chosen.measured
    [line] = [r.getMessage() for r in caplog.records if "Attention backend" in r.getMessage()]
    assert line.startswith("Attention backend: auto chose two+one (no other candidate; measured, us a layer: decode")


def test_one_that_is_fastest_at_both_serves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then its class is taken as it is."""
    clock = Told(monkeypatch, One=[10 * US] * 5, Two=[5 * US] * 5)
    chosen = choose(plan(One, Two), Measuring(clock))
    assert chosen.backends == [Two]
    assert chosen.label == "two"


def test_the_default_stays_within_the_margin(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What is less than 5 % faster, in the mean of a use's steps, changes nothing; what is more does."""
    with caplog.at_level(logging.INFO, "dovetail"):
        chosen = choose(plan(One, Two), Measuring(Told(monkeypatch, One=[10 * US] * 5, Two=[9.6 * US] * 5)))
    assert chosen.backends == [One]
    assert "two: takes 0.96 times as long for prompts, 0.96 for decode rows" in caplog.text
    chosen = choose(plan(One, Two), Measuring(Told(monkeypatch, One=[10 * US] * 5, Two=[9.4 * US] * 5)))
    assert chosen.backends == [Two]


def test_every_step_of_a_use_counts_alike() -> None:
    """A long step does not outweigh a short one: ratios are averaged, not times."""
    times = {"one": [1.0, 1.0, 100.0, 1.0, 1.0], "two": [0.5, 0.5, 130.0, 1.0, 1.0]}
    assert AttentionTimes(times).ratio("two", "decode") == pytest.approx((0.5 + 0.5 + 1.3) / 3)
    assert AttentionTimes(times).fastest("decode") == "two"
    assert AttentionTimes(times).fastest("prefill") == "one"


def test_one_that_raises_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A candidate that fails while it is measured is named with its reason in one line; the others serve."""
    clock = Told(monkeypatch, One=[10 * US] * 5, Two=[5 * US] * 5)
    with caplog.at_level(logging.INFO, "dovetail"):
        chosen = choose(plan(Three, One, Two), Measuring(clock))
    assert chosen.backends == [Two]
    assert "three: it could not be measured: RuntimeError: no such kernel" in caplog.text
    alone = choose(plan(Three, Three), Measuring(clock))
    assert alone.backends == [Three]  # as it would be without measuring: what fails there, fails a start loudly


def test_figures_are_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A later start reads them and makes nothing but what it takes; another library or package measures again."""
    clock = Told(monkeypatch, One=[10 * US] * 5, Two=[5 * US] * 5)
    measuring = Measuring(clock, tmp_path / "dovetail")
    first = choose(plan(One, Two), measuring)
    num = len(clock.asked)
    monkeypatch.setattr(Native, "made", [])
    again = choose(plan(One, Two), measuring)
    assert len(clock.asked) == num
    assert set(Native.made) == {"Two"}
    assert (again.backends, again.measured) == (first.backends, first.measured)
    with monkeypatch.context() as patch:
        patch.setattr(One, "library", classmethod(lambda cls: "lib 2"))
        choose(plan(One, Two), measuring)
    assert len(clock.asked) == 2 * num
    choose(plan(Two, One), measuring)
    assert len(clock.asked) == 3 * num


def test_want_of_memory_is_not_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What failed for want of memory is measured again by the next start; what fails by itself is not."""
    clock = Told(monkeypatch, One=[10 * US] * 5, Two=[5 * US] * 5)
    choose(plan(One, Three), Measuring(clock, tmp_path))
    assert len(list(tmp_path.iterdir())) == 1

    def full(self: Any, batch: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Three, "plan_in_graph", full)
    choose(plan(One, Two, Three), Measuring(clock, tmp_path))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"times": {}, "failed": {}}', '{"times": {"one": [1]}, "failed": {}}']
)
def test_figures_that_cannot_be_read_are_measured_again(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file that is empty, cut off or of another form is no fault."""
    clock = Told(monkeypatch, One=[10 * US] * 5, Two=[5 * US] * 5)
    choose(plan(One, Two), Measuring(clock, tmp_path))
    [file] = tmp_path.iterdir()
    file.write_text(text)
    num = len(clock.asked)
    assert choose(plan(One, Two), Measuring(clock, tmp_path)).backends == [Two]
    assert len(clock.asked) == 2 * num
    assert set(json.loads(file.read_text())["times"]) == {"one", "two"}


def test_a_folder_that_cannot_be_written_is_no_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Then the next start measures again."""
    (tmp_path / "file").write_text("")
    clock = Told(monkeypatch, One=[10 * US] * 5, Two=[5 * US] * 5)
    assert choose(plan(One, Two), Measuring(clock, tmp_path / "file")).backends == [Two]


def test_what_was_chosen_and_serves_no_more_is_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Figures of a backend that refuses now are not followed."""
    clock = Told(monkeypatch, One=[10 * US] * 5, Two=[5 * US] * 5)
    choose(plan(One, Two), Measuring(clock, tmp_path))
    monkeypatch.setattr(Two, "why_not", classmethod(lambda cls, *args: "not today"))
    chosen = choose(plan(One, Two), Measuring(clock, tmp_path))
    assert (chosen.backends, chosen.measured) == ([One], "")


def test_one_candidate_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the others refuse, cannot be captured as the default can, or nothing is to be measured."""
    clock = Told(monkeypatch)
    measuring = Measuring(clock)
    assert choose(plan(One), measuring).backends == [One]
    assert choose(plan(One, Eager), measuring).backends == [One]
    assert choose(plan(One, Two), None).backends == [One]
    assert choose(plan(One, Two, preferred=True), measuring).backends == [One]
    monkeypatch.setattr(Two, "why_not", classmethod(lambda cls, *args: "not here"))
    assert choose(plan(One, Two), measuring).backends == [One]
    assert clock.asked == []


def test_batch_invariance_never_mixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--batch-invariant` nothing is measured: the first that serves computes everything."""
    clock = Told(monkeypatch)
    assert choose(plan(One, Two), Measuring(clock), batch_invariant=True).backends == [One]
    assert clock.asked == []


def test_all_ranks_take_what_the_first_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further rank measures nothing, takes both names, and refuses what it cannot serve rather than another one."""
    clock = Told(monkeypatch, One=[10 * US] * 3 + [100 * US] * 2, Two=[12 * US] * 3 + [60 * US] * 2)
    first = choose(plan(One, Two), Measuring(clock))
    num = len(clock.asked)
    other = choose(plan(One, Two), Measuring(clock), first.names)
    assert len(clock.asked) == num
    assert other.names == first.names
    assert other.backends[0].__name__ == first.backends[0].__name__ == "Hybrid"
    with pytest.raises(PluginError, match="'two', which the first rank has chosen, is not loaded here"):
        choose(plan(One), Measuring(clock), first.names)
    monkeypatch.setattr(Two, "why_not", classmethod(lambda cls, *args: "not here"))
    with pytest.raises(
        PluginError, match=r"attention by two\+one, which the first rank has chosen: prefill by two: not"
    ):
        choose(plan(One, Two), Measuring(clock), first.names)


def test_the_engine_tells_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Label and figures are facts of the engine, which `/server_info` shows, and the table of the start says so."""
    real = check.choose_backends
    chosen = lambda *args: replace(real(*args), measured="one 10, two 5")  # noqa: E731
    monkeypatch.setattr(check, "choose_backends", chosen)
    info = make_core(make_model(tmp_path, "LlamaForCausalLM")).info
    assert (info.attention_backend, info.attention_measured) == ("torch_native", "one 10, two 5")
    assert "attention torch_native (measured)" in engine_notes(info)


def test_packages_with_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two candidates of one bare name are measured by themselves, and named with their packages."""
    clock = Told(monkeypatch, One=[10 * US] * 5, Two=[5 * US] * 5)
    planned = [
        PlannedPlugin(
            kind="attention_backend", name="same", target="m:a", distribution=package, version="1", api=1,
            roles=("engine",), requested=False,
        )
        for package in ("acme", "zeta")
    ]  # fmt: skip
    plugins = SimpleNamespace(
        plan=PluginPlan(plugins=tuple(planned)), candidates=lambda kind: iter(zip(planned, (One, Two), strict=True))
    )
    assert choose(plugins, Measuring(clock)).label == "zeta:same"


def test_a_half_that_was_named_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other half is what `auto` finds for it."""
    clock = Told(monkeypatch, One=[10 * US] * 5, Two=[5 * US] * 3 + [20 * US] * 2)
    plugins = plan(One, Two)
    named = PlannedPlugin(
        kind="attention_backend", name="one", target="m:a", distribution="acme", version="1", api=1,
        roles=("engine",), use="prefill",
    )  # fmt: skip
    both = [*zip(plugins.plan.plugins, (One, Two), strict=True), (named, One)]
    plugins = SimpleNamespace(
        plan=PluginPlan(plugins=tuple(plugin for plugin, _ in both)), candidates=lambda kind: iter(both)
    )
    assert choose(plugins, Measuring(clock), prefill_attention_backend="one").names == (("one", "two"),)


@pytest.mark.parametrize("changes", [{}, {"window": 9}, {"sinks": True, "num_kv_heads": 2}, {"v_dim": 24}], ids=str)
def test_the_steps_are_those_of_real_layers(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step computes numbers: rows and chunks, over keys of their own, of all layouts."""
    world = MeasuredLayers(replace(CASE, **changes).config(), CPU, torch.float32, 16)
    seen: list[torch.Tensor] = []
    for name in ("forward_extend", "forward_decode"):
        real = getattr(TorchNativeBackend, name)

        def noted(self: Any, *args: Any, real: Any = real) -> None:
            real(self, *args)
            seen.append(args[-1])

        monkeypatch.setattr(TorchNativeBackend, name, noted)

    def clock(run: Callable[[], None], is_captured: bool) -> float:
        assert not is_captured
        run()
        return 1.0

    steps = TrialStep(1, 40, 1), TrialStep(5, 33, 1), TrialStep(1, 0, 40)
    monkeypatch.setattr("dovetail.runtime.attention.measure.MAX_REPEATS", 1)
    monkeypatch.setattr("dovetail.runtime.attention.measure.STEPS", steps)
    for step in steps:
        assert world.seconds(TorchNativeBackend, step, clock) == 0.5
    assert len(seen) == 6
    assert all(bool(out.isfinite().all()) and float(out.abs().sum()) > 0 for out in seen)


class Blind(Native):
    """Ignores what stands before a chunk or row."""

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, out: torch.Tensor) -> None:
        out.copy_(v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))


class Silent(Native):
    """Leaves NaN where an output is not written."""

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, out: torch.Tensor) -> None:
        out.fill_(float("nan"))


def test_one_that_computes_something_else_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However fast it is, a candidate whose results are not the default's serves nothing, and the log says so."""
    steps = (TrialStep(1, 40, 1), TrialStep(4, 33, 1), TrialStep(1, 0, 40))
    monkeypatch.setattr("dovetail.runtime.attention.measure.STEPS", steps)
    monkeypatch.setattr("dovetail.runtime.attention.measure.ALIKE_STEPS", steps[1:])
    measuring = Measuring(lambda run, is_captured: 1.0)
    with caplog.at_level(logging.INFO, "dovetail"):
        chosen = choose(plan(One, Blind, Silent, Two), measuring)
    assert chosen.backends == [One]
    assert "blind: its result differs from the default's for 4 rows by" in (caplog.text)
    assert "silent: its result differs from the default's for 40 tokens by nan" in (caplog.text)
    assert "two: takes 1.00 times as long" in caplog.text
