"""What computes an operation: in the order of sets, by rows, put together of others, or plain; and what is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dovetail.contracts.device import Device, DeviceView
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.kernels import PLAIN_KERNELS, Ask, Claim, KernelSet, make_ask
from dovetail.contracts.layers import BuildContext
from dovetail.plugins import Registry, make_plan
from dovetail.runtime.kernels.binding import Bands, KernelBinder, LoadedSet
from dovetail.runtime.step_kernels import StepKernels
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.ops import reference
from dovetail.sdk.layers.plain import PLAIN
from dovetail.sdk.quantization.forms import Scaled
from dovetail_testing.engine import make_core
from dovetail_testing.models import make_model

CPU = DeviceView("cpu")
PRODUCTS = ("linear", "linear_add", "norm_linear", "norm_gate")
"""Of a dense model."""
NORM = make_ask("rms_norm", CPU, "float32", {"H": 8}, {})


class Some(KernelSet):
    """Serves one operation for some rows; each call adds to what it computes, so that it shows."""

    devices = frozenset({"cpu"})

    def __init__(self, op: str, by: float, rows: tuple[int, int] | None = None, **claims: Any) -> None:
        self.op, self.by, self.rows, self.claims, self.made = op, by, rows, claims, 0

    def serves(self, ask: Ask) -> Claim | str:
        return Claim(self.rows or ask.rows, **self.claims) if ask.op == self.op else f"no {ask.op}"

    def make(self, ask: Ask) -> Any:
        self.made += 1
        return lambda x, *rest: x + self.by


def binder(*sets: KernelSet, is_named: bool = True, **options: Any) -> KernelBinder:
    """Of sets called a, b, …"""
    named = [LoadedSet("abc"[at], f"kernels {'abc'[at]!r} of x 1", one, is_named) for at, one in enumerate(sets)]
    return KernelBinder(named, CPU, **options)


def test_without_a_set_everything_is_plain() -> None:
    """The meaning itself is bound, and the table says so."""
    bound = binder()
    assert bound.bind(NORM) is reference.rms_norm
    assert [(use.operation, use.served[0][2]) for use in bound.table] == [("rms_norm H=8", "plain")]


def test_equal_places_share_a_kernel() -> None:
    """A set is asked and makes once for equal places; binding 80 layers takes no 20 ms."""
    some = Some("rms_norm", 1.0)
    bound = binder(some)
    context = BuildContext(device=torch.device("cpu"), dtype=torch.float32, factory=PLAIN, kernels=bound)
    began = time.thread_time()
    layers = [RMSNorm(8, 1e-6, context) for _ in range(80)]
    assert time.thread_time() - began < 0.2
    assert some.made == 1
    assert len({id(layer._normed.norm) for layer in layers}) == 1


def test_sets_divide_the_rows_in_their_order() -> None:
    """The first has the rows that it claims, the next what is left, plain torch the rest: by one comparison."""
    bound = binder(Some("rms_norm", 1.0, (1, 4)), Some("rms_norm", 2.0, (0, 16)))
    kernel = bound.bind(NORM)
    assert isinstance(kernel, Bands)
    weight = torch.ones(8)
    found = [float((kernel(x, weight, 0.0) - x)[0, 0]) for x in (torch.ones(rows, 8) for rows in (1, 4, 5, 16))]
    assert found == [1.0, 1.0, 2.0, 2.0]
    torch.testing.assert_close(kernel(torch.full((17, 8), 3.0), weight, 0.0), torch.ones(17, 8))
    [use] = bound.table
    assert [band[2] for band in use.served] == ["b", "a", "b", "plain"]


def test_an_operation_is_put_together_of_others() -> None:
    """A set with a norm alone serves the norm behind an addition, too; with none of them the meaning does."""
    bound = binder(Some("rms_norm", 1.0))
    kernel = bound.bind(make_ask("add_rms_norm", CPU, "float32", {"H": 8}, {}))
    normed, total = kernel(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), 1e-6)
    assert (float(normed[0, 0]), float(total[0, 0])) == (3.0, 2.0)
    assert {use.operation: use.served[0][2] for use in bound.table}["add_rms_norm H=8"] == "composed"


def test_a_norm_comes_before_a_product_that_no_set_has() -> None:
    """A set with a norm alone serves the norm of a product, and of one with a gate: parts have widths of their own."""
    bound = binder(Some("rms_norm", 1.0))
    x, norm = torch.ones(2, 8), torch.ones(8)
    product = bound.bind(make_ask("norm_linear", CPU, "float32", {"N": 3, "K": 8}, {}))
    assert product(x, norm, 1e-6, torch.ones(3, 8), torch.ones(3)).tolist() == [[17.0] * 3] * 2
    gate = bound.bind(make_ask("norm_gate", CPU, "float32", {"F": 2, "K": 8}, {}))
    torch.testing.assert_close(gate(x, norm, 1e-6, torch.ones(4, 8), None), torch.full((2, 2), 256.0))
    assert [use.operation for use in bound.table if use.served[0][2] == "composed"] == [
        "norm_linear N=3 K=8",
        "norm_gate F=2 K=8",
    ]


def test_packed_products_are_put_together_too() -> None:
    """A norm of a set stands before a packed product that none has; its matrix is packed as the product wants it."""
    form = Scaled()
    bound = binder(Some("rms_norm", 1.0))
    kernel = bound.bind(make_ask("packed_norm_linear", CPU, "float32", {"N": 3, "K": 8}, {"form": form}))
    tensors = form.quantise(torch.ones(3, 8))
    assert kernel.keeps()
    packed = kernel.pack(tensors)
    found = kernel(torch.ones(2, 8), torch.ones(8), 1e-6, packed, torch.ones(3), torch.full((2, 3), 4.0))
    torch.testing.assert_close(found, torch.full((2, 3), 21.0))
    assert [use.served[0][2] for use in bound.table] == ["a", "plain", "composed"]


def test_who_packs_takes_all_rows_and_can_pack() -> None:
    """Two layouts of one matrix would take its memory twice; a kernel without `pack` is refused by name."""
    ask = make_ask("packed_linear", CPU, "float32", {"N": 3, "K": 8}, {"form": Scaled()})
    with pytest.raises(
        PluginError, match=r"kernels 'a' of x 1: it claims rows \(1, 4\) of packed_linear .* all of them"
    ):
        binder(Some("packed_linear", 1.0, (1, 4))).bind(ask)
    with pytest.raises(PluginError, match=rf"kernels 'a' of x 1: make.*needs keeps and pack; {REMEDY}$"):
        binder(Some("packed_linear", 1.0)).bind(ask)


def test_rows_of_experts_are_alike_in_any_company() -> None:
    """Where they must be, experts are put together of products and activations whose rows are."""
    dims = {"E": 4, "H": 24, "I": 20, "C": 2}
    options = {"act": "silu_and_mul", "weigh": "output", "first": 0, "total": 4}
    kernel = PLAIN_KERNELS.bind(make_ask("experts", CPU, "float32", dims, options, invariant=True))
    x, ids, shares = torch.randn(37, 24), torch.rand(37, 4).argsort(1)[:, :2], torch.rand(37, 2)
    matrices = torch.randn(4, 40, 24), None, torch.randn(4, 24, 20), None, None
    whole = kernel(x, ids, shares, *matrices)
    for rows in (slice(0, 1), slice(5, 22)):
        assert torch.equal(kernel(x[rows], ids[rows], shares[rows], *matrices), whole[rows])


def test_rows_of_a_product_are_alike_in_any_company() -> None:
    """Where they must be, the meaning in plain torch multiplies blocks of one size."""
    x, weight = torch.randn(37, 300), torch.randn(50, 300)
    for op, operands in (("linear", ()), ("wide_linear", ()), ("linear_add", (torch.randn(37, 50),))):
        kernel = PLAIN_KERNELS.bind(make_ask(op, CPU, "float32", {"N": 50, "K": 300}, {}, invariant=True))
        whole = kernel(x, weight, None, *operands)
        for rows in (slice(0, 1), slice(5, 22)):
            assert torch.equal(kernel(x[rows], weight, None, *(one[rows] for one in operands)), whole[rows]), op


def test_invariant_rows_need_a_claim() -> None:
    """With `--batch-invariant` a set serves only what it says is row-independent."""
    ask = make_ask("rms_norm", CPU, "float32", {"H": 8}, {}, invariant=True)
    bound = binder(Some("rms_norm", 1.0), Some("rms_norm", 2.0, row_independent=True))
    assert float(bound.bind(ask)(torch.zeros(1, 8))[0, 0]) == 2.0
    assert "--batch-invariant" in bound.table[0].others[0][1]


def test_what_no_graph_can_record_keeps_steps_out_of_graphs(caplog: pytest.LogCaptureFixture) -> None:
    """A kernel that is not capturable is used, and a line says what it costs."""
    bound = binder(Some("rms_norm", 1.0), captured=True)
    bound.bind(PLAIN_KERNELS.ask("rms_norm", "float32", {"H": 8}, {}, invariant=False)._replace(captured=True))
    bound.freeze()
    assert not bound.is_capturable
    assert "No step is recorded in a graph: rms_norm H=8 by a cannot be." in caplog.text


@pytest.mark.parametrize("invariant", [False, True])
def test_plain_torch_that_reads_tensors_on_the_host_is_not_recorded(invariant: bool) -> None:
    """Prompts come through it; with `--batch-invariant` what decodes does, too, so that a graph would replay it."""
    dims = {"G": 1, "J": 1, "D": 16, "W": 16}
    bound = binder(captured=True)
    bound.bind(make_ask("gdn_prefill", CPU, "float32", dims, {"rate": 1.0}, invariant=invariant, captured=True))
    assert bound.is_capturable is not invariant


class Raises(Some):
    def serves(self, ask: Ask) -> Claim | str:
        raise KeyError("x")


class Fails(Some):
    def make(self, ask: Ask) -> Any:
        raise OSError("no library")


class Mute(Some):
    def make(self, ask: Ask) -> Any:
        return None


class Odd(Some):
    def serves(self, ask: Ask) -> Any:
        return True


REMEDY = "leave it out of --kernels, or report this to its author"
REFUSED = {
    "claims rows in words": (
        Some("rms_norm", 1.0, cast(Any, "all")),
        "serves(rms_norm H=8) claims rows 'all'; give the fewest and",
    ),
    "claims one number": (
        Some("rms_norm", 1.0, cast(Any, 16)),
        "serves(rms_norm H=8) claims rows 16; give the fewest and the most",
    ),
    "claims rows that nobody asks for": (Some("rms_norm", 1.0, (-1, 3)), "of x 1: it claims rows (-1, 3) of rms_norm"),
    "answers nothing": (Odd("rms_norm", 1.0), "serves(rms_norm H=8) returned True; return a Claim, or why not"),
    "raises": (Raises("rms_norm", 1.0), f"serves(rms_norm H=8) raised KeyError: 'x'; {REMEDY}"),
    "cannot make it": (Fails("rms_norm", 1.0), f"make(rms_norm H=8) raised OSError: no library; {REMEDY}"),
    "makes nothing": (Mute("rms_norm", 1.0), f"make(rms_norm H=8) returned None, which cannot be called; {REMEDY}"),
    "overwrites": (Some("rms_norm", 1.0, overwrites=frozenset({"x"})), "rms_norm may overwrite nothing, not x"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_hold_is_refused_in_one_line(case: str) -> None:
    """A set that claims what it cannot do ends the start, and is named."""
    some, message = REFUSED[case]
    with pytest.raises(PluginError) as caught:
        binder(some).bind(NORM)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_was_not_named_cannot_be_left_out() -> None:
    """The line about a set that `auto` found says how to go without it."""
    with pytest.raises(PluginError, match=r"no library; name the sets to use in --kernels, or report .*$"):
        binder(Fails("rms_norm", 1.0), is_named=False).bind(NORM)


def test_auto_does_not_choose_between_two() -> None:
    """Two sets that `auto` finds for one operation: the user says in which order they are asked."""
    bound = binder(Some("rms_norm", 1.0), Some("rms_norm", 2.0), is_named=False)
    with pytest.raises(PluginError, match=r"a and b both serve rms_norm H=8, and .* such as --kernels b,a$"):
        bound.bind(NORM)


def test_a_set_that_serves_nothing_is_refused() -> None:
    """It was named, so it is missed; the line says why it serves nothing."""
    bound = binder(Some("layer_norm", 1.0))
    bound.bind(NORM)
    with pytest.raises(
        PluginError, match=r"--kernels 'a': .* serves no operation of this model: no rms_norm; leave it"
    ):
        bound.freeze()


def test_a_set_for_another_device_is_refused() -> None:
    """It was named, so it is not left out in silence; Triton's interpreter stands for a device."""
    some = Some("rms_norm", 1.0)
    some.devices = frozenset({"cuda"})  # type: ignore[misc]
    with pytest.raises(PluginError, match=r"^--kernels 'a': kernels 'a' of x 1: it runs on cuda, not on cpu; leave"):
        binder(some)
    loaded = [LoadedSet("a", "kernels 'a' of x 1", some, True)]
    assert callable(KernelBinder(loaded, DeviceView("cpu", is_interpreted=True)).bind(NORM))


def test_the_log_says_what_of_a_set_is_used(caplog: pytest.LogCaptureFixture) -> None:
    """Of one that is not built in: what it serves, and what it claims that the model does not ask for."""

    class Two(Some):
        def serves(self, ask: Ask) -> Claim | str:
            return Claim(ask.rows) if ask.op in ("rms_norm", "layer_norm") else "no"

    caplog.set_level("INFO")
    bound = binder(Two("rms_norm", 1.0))
    bound.bind(NORM)
    bound.freeze()
    said = "kernels 'a' of x 1 serves rms_norm; it claims layer_norm, which this model does not ask for."
    assert caplog.messages == [said]
    assert bound.outside == ["kernels 'a' of x 1"]


def test_the_log_says_nothing_of_builtin_sets(caplog: pytest.LogCaptureFixture) -> None:
    """They serve what they serve; a set that raises for what no model asks ends nothing."""

    class Raises(Some):
        def serves(self, ask: Ask) -> Claim | str:
            return super().serves(ask) if ask.op == self.op else str(1 // 0)

    caplog.set_level("INFO")
    sets = LoadedSet("b", "b", Some("rms_norm", 1.0), True, True), LoadedSet("a", "set a", Raises("rms_norm", 1), False)
    bound = KernelBinder([sets[0]], CPU)
    bound.bind(NORM)
    bound.freeze()
    assert (caplog.messages, bound.outside) == ([], [])
    bound = KernelBinder([sets[1]._replace(is_named=True)], CPU)
    bound.bind(NORM)
    bound.freeze()
    assert caplog.messages == ["set a serves rms_norm."]


def test_nothing_is_bound_while_serving() -> None:
    """What was bound before is there, anything else is a layer's mistake."""
    bound = binder()
    bound.bind(NORM)
    bound.freeze()
    bound.bind(NORM)
    with pytest.raises(RuntimeError, match="bind it when the layer is built"):
        bound.bind(NORM._replace(dims=(("H", 9),)))


@pytest.mark.parametrize(
    ("op", "given", "message"),
    [
        ("norm", {}, "operation 'norm': unknown; possible: rms_norm, add_rms_norm"),
        ("rms_norm", {"F": 8}, r"operation 'rms_norm': widths \['F'\] were given, it has \['H'\]"),
        ("rms_norm", {"H": 8, "act": "x"}, r"operation 'rms_norm': options \['act'\] were given, it has \[\]"),
    ],
)
def test_an_operation_that_is_not_there(op: str, given: dict[str, Any], message: str) -> None:
    """A layer that asks for what is not in the table is told what is."""
    context = BuildContext(device=torch.device("cpu"), dtype=torch.float32, factory=PLAIN)
    with pytest.raises(PluginError, match=message):
        context.operation(op, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["plain", "triton"], "--kernels 'plain,triton': 'plain' stands alone; give it, or names"),
        (["auto", "triton"], "--kernels 'auto,triton': 'auto' goes last, behind the names; give triton,auto"),
        (["swift"], "--kernels 'swift': not installed; installed: cpu, humming, triton"),
    ],
)
def test_names_that_cannot_be(given: list[str], message: str) -> None:
    """They are refused when plugins are planned."""
    with pytest.raises(PluginError) as caught:
        make_plan(Registry.scan(), kernels=given)
    assert message in str(caught.value)


def test_the_triton_set_is_no_set_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named on a CPU it ends the start before weights are read; `auto` does not take it there."""
    monkeypatch.setattr(Device, "view", CPU)  # where nothing is interpreted
    folder = make_model(tmp_path, "Qwen3ForCausalLM")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"--kernels 'triton': .*it runs on cuda, not on cpu; leave it out"):
        make_core(folder, kernels=["triton"], load_format="dummy")
    table = make_core(folder, load_format="dummy").info.kernels
    served = {use.operation.split()[0]: use.served[0][2] for use in table}
    assert served.pop("mask_logits") == "cpu"
    assert set(served.values()) == {"plain"}


def test_a_model_computes_the_same_by_kernels(tmp_path: Path) -> None:
    """In Triton's interpreter, what the set claims of a model is computed by it, and the table shows it."""
    pytest.importorskip("triton")
    folder = make_model(tmp_path, "Qwen3ForCausalLM")
    table = make_core(folder, kernels=["triton"]).info.kernels
    assert {use.operation.split()[0]: use.served[0][2] for use in table} == dict.fromkeys(
        ("rms_norm", "rotations", "norm_rotate", "act_and_mul", *PRODUCTS, *StepKernels._fields),
        "triton",
    )
