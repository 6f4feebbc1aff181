"""Kernel sets with one fault each: the kit names every fault."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.contracts.device import DeviceView
from dovetail.contracts.kernels import Ask, Claim, KernelSet
from dovetail.sdk import step
from dovetail.sdk.layers.ops import delta, mixture
from dovetail.sdk.layers.ops.reference import PlainPacked
from dovetail_testing import KernelSetConformance, check_class, conformance_class

ATTRS: dict[str, Any] = {"dtypes": ["float32"], "device": "cpu"}


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm, written otherwise than the meaning."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def added(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return normed(x + residual, weight, eps), x + residual


class Right(KernelSet):
    devices = frozenset({"cpu"})
    claims: Any = {"capturable": False, "row_independent": False}
    rms_norm: Any = staticmethod(normed)
    add_rms_norm: Any = staticmethod(added)
    ops = frozenset({"rms_norm", "add_rms_norm"})

    def serves(self, ask: Ask) -> Claim | str:
        if ask.op not in self.ops:
            return f"no {ask.op}"
        return Claim(ask.rows, **self.claims)

    def make(self, ask: Ask) -> Any:
        return partial(getattr(self, ask.op), **dict(ask.options))


def wrong_from_257_on(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = normed(x, weight, eps)
    y[257:] *= 1.01
    return y


def wider(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normed(x, weight, eps).double()


def by_memory(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Takes rows to be one behind the other."""
    return normed(x.as_strided(x.shape, (x.shape[1], 1)), weight, eps)


def in_place(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual += x
    return normed(residual, weight, eps), residual.clone()


def by_batch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normed(x, weight, eps) * (1 + 1e-6 * len(x))


class Borrows(Right):
    def __init__(self) -> None:
        self.buffer = torch.empty(5000 * 2000)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = self.buffer[: x.numel()].view(x.shape)
        return out.copy_(normed(x, weight, eps))


class Keeps(Right):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.seen.append([[eps]])
        return normed(x, weight, eps)


def on_the_host(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normed(x, weight, eps) if float(x.abs().sum()) >= 0 else x


class Forgets(Right):
    """Does not write how long rows are now."""

    ops = frozenset({"finish_step"})

    def finish_step(
        self, logits: Tensor, rows: Tensor, lens: Tensor, next_ids: Tensor, seq_lens: Tensor, spare: int
    ) -> tuple[Tensor, Tensor]:
        return step.finish_step(logits, rows, lens, next_ids, seq_lens.clone(), spare)


class Greedy(Right):
    """Draws the best token at any temperature."""

    ops = frozenset({"draw"})

    def draw(self, logits: Tensor, greedy: Tensor, *params: Tensor) -> Tensor:
        return greedy.clone()


class Lossy(PlainPacked):
    """Drops a bias from 17 rows on."""

    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        return super().__call__(x, weight, bias if len(x) < 17 else None)


class Packs(Right):
    """Multiplies by packed weights."""

    ops = frozenset({"packed_linear"})
    kernel: Any = PlainPacked

    def make(self, ask: Ask) -> Any:
        return self.kernel(form=ask.option("form"))


class Few(Packs):
    def serves(self, ask: Ask) -> Claim | str:
        return Claim((0, 16)) if ask.op == "packed_linear" else "no"


def unweighed(logits: Tensor, correction: Tensor | None, scale: float, **how: Any) -> tuple[Tensor, Tensor]:
    """Forgets the factor of the shares."""
    return mixture.route(logits, correction, 1.0, **how)


class Routes(Right):
    ops = frozenset({"route"})

    def make(self, ask: Ask) -> Any:
        return partial(unweighed, **dict(ask.options))


def here(x: Tensor, ids: Tensor, *rest: Any, **how: Any) -> Tensor:
    """Takes every expert for one that is here."""
    return mixture.experts(x, ids % len(rest[1]) + how["first"], *rest, **how)


class Strangers(Right):
    ops = frozenset({"experts"})

    def make(self, ask: Ask) -> Any:
        return partial(here, **dict(ask.options))


class Beyond(Right):
    def serves(self, ask: Ask) -> Claim | str:
        return Claim((0, ask.rows[1] + 1)) if ask.op == "rms_norm" else "no"


class Overwrites(Right):
    claims: Any = {"overwrites": frozenset({"weight"})}


class ForgetsAtCuts(Right):
    """Each call begins with a little less of a state."""

    ops = frozenset({"gdn_prefill"})
    claims: Any = {"row_independent": True}

    def gdn_prefill(self, x: Tensor, *operands: Tensor, rate: float) -> Tensor:
        state = operands[-2]
        state *= 1 - 1e-6
        return delta.gdn_prefill(x, *operands, rate=rate)


class Long(Right):
    def serves(self, ask: Ask) -> Claim | str:
        return super().serves(ask) if ask.op == "rms_norm" else "no\nreally not"


class CannotMake(Right):
    def make(self, ask: Ask) -> Any:
        raise ImportError("no module named acme_kernels")


class Nothing(Right):
    def serves(self, ask: Ask) -> Claim | str:
        return "not today"


def faulty(**attrs: Any) -> type[KernelSet]:
    """The right set with other kernels or claims."""
    functions = {name: staticmethod(value) if callable(value) else value for name, value in attrs.items()}
    return type("Faulty", (Right,), functions)


ANSWERS, MEANING = "test_answers_are_claims_or_reasons", "test_equals_the_meaning"
FAULTS: dict[str, tuple[type[KernelSet], str, str]] = {
    "wrong from 257 rows on": (faulty(rms_norm=wrong_from_257_on), MEANING, "rms_norm H=63 of 513 rows"),
    "another dtype": (faulty(rms_norm=wider), MEANING, "dtype torch.float64, not torch.float32"),
    "strides": (faulty(rms_norm=by_memory), "test_takes_strided_operands", "of 2 sliced rows"),
    "writes to its operands": (faulty(add_rms_norm=in_place), "test_operands_are_untouched", "writes to residual"),
    "rows mix": (
        faulty(rms_norm=by_batch, claims={"row_independent": True}),
        "test_rows_are_independent_where_claimed",
        "is not what it is alone",
    ),
    "forgets where a prompt is cut": (
        ForgetsAtCuts,
        "test_a_request_is_folded_alike_wherever_it_is_cut",
        "74 tokens cut at (64,) are not what they are at once",
    ),
    "changes too little": (Forgets, MEANING, "finish_step V=63 of 1 rows in float32: "),
    "another token": (Greedy, MEANING, "draw V=63 of "),
    "a bias is dropped": (
        type("DropsBias", (Packs,), {"kernel": Lossy}),
        MEANING,
        "packed_linear N=74 K=256 form=Scaled(dtype=torch.int8, group=None, activations=None) of 17 rows",
    ),
    "packs for some rows": (Few, ANSWERS, "who packs takes all of them"),
    "shares without their factor": (Routes, MEANING, "is wrong by 1 of itself"),
    "experts of other ranks": (Strangers, MEANING, "first=3 total=9 of 1 rows"),
    "borrows": (Borrows, "test_results_are_not_borrowed", "return a new tensor"),
    "keeps": (Keeps, "test_keeps_nothing", "bytes behind"),
    "reads": (
        faulty(rms_norm=on_the_host, claims={"capturable": True}),
        "test_what_is_capturable_reads_nothing_on_the_host",
        "reads a tensor",
    ),
    "rows that nobody asks for": (Beyond, ANSWERS, "of which (0, 2147483647) are asked"),
    "overwrites what it may not": (Overwrites, ANSWERS, "may overwrite nothing, not weight"),
    "a refusal of two lines": (Long, ANSWERS, "is not one line"),
    "cannot be made": (CannotMake, MEANING, "raised ImportError: no module named acme_kernels"),
    "a trial of fewer operands": (
        faulty(trial=lambda ask, rows, device: [torch.zeros(rows, 63)]),
        "test_trials_are_operands",
        "returned 1 operands; it has x, ",
    ),
    "claims nothing": (Nothing, MEANING, "it claims no operation on cpu"),
}


@pytest.fixture(autouse=True)
def _not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """These sets are plain torch, whose reads on the host are looked for."""
    monkeypatch.setattr(KernelSetConformance, "view", classmethod(lambda cls: DeviceView("cpu")))


def test_a_right_set_passes() -> None:
    """The set that the faults are made from has none."""
    report = check_class(conformance_class("kernels", plugin_class=Right, **ATTRS))
    assert report.passed, report.text()


def test_the_report_says_what_was_compared() -> None:
    """A set that answers to a mistyped name passes, and what was compared has no such operation."""
    mistyped = faulty(ops=frozenset({"add_rms_norm", "rmsnorm"}))
    report = check_class(conformance_class("kernels", plugin_class=mistyped, **ATTRS), MEANING)
    assert [one.message for one in report.outcomes] == ["compared: add_rms_norm in float32; no other is claimed"]


def test_every_dtype_that_is_claimed_is_compared() -> None:
    """A kernel that is wrong in float16 alone fails, without a word about dtypes in its test."""

    def narrow(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return normed(x, weight, eps) * (1.1 if x.dtype == torch.float16 else 1)

    cls = conformance_class("kernels", plugin_class=faulty(rms_norm=narrow), device="cpu", ops=["rms_norm"])
    assert "of 1 rows in float16: row 0 is wrong by" in check_class(cls, MEANING).failures[MEANING]


def test_a_set_for_another_device_is_skipped() -> None:
    """What does not list the device of a run has not passed on it."""
    cls = conformance_class("kernels", plugin_class=faulty(devices=frozenset({"cuda"})), **ATTRS)
    report = check_class(cls, "meaning or claims or strided")
    why = "`devices` of the set does not list cpu; nothing was compared"
    assert {(one.state, one.message) for one in report.outcomes} == {("skipped", why)}


def test_what_nothing_claims_is_skipped() -> None:
    """A test of a claim that a set never makes says so; a set without claims fails once."""
    report = check_class(conformance_class("kernels", plugin_class=Right, **ATTRS), "claimed or cut or capturable")
    assert [one.message.partition(":")[0] for one in report.outcomes] == ["nothing claimed"] * 3
    report = check_class(conformance_class("kernels", plugin_class=Nothing, **ATTRS))
    assert list(report.failures) == [MEANING]
    assert [one.message for one in report.outcomes].count("it claims no operation on cpu") == 8


@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_names_a_sets_fault(fault: str, caught: Callable[..., None]) -> None:
    """A set with one fault fails the test for it, with a message that names it."""
    plugin, test, message = FAULTS[fault]
    caught("kernels", plugin, test, message, select=test, **ATTRS)
