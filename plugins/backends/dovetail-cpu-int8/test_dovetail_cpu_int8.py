"""The conformance kit, and what this set promises beyond it."""

from itertools import product
from typing import Any

import pytest
import torch
from dovetail_cpu_int8 import CpuInt8, CpuInt8Options, kernels
from dovetail_cpu_int8.library import NAMES, paths

from dovetail.contracts.device import DeviceView
from dovetail.contracts.kernels import make_ask, meaning
from dovetail.sdk.quantization.forms import Int4, Scaled
from dovetail_testing import KernelSetConformance

CPU = DeviceView("cpu")
INT8 = Scaled()
PATHS = [NAMES[name] for name in paths().found]


class TestCpuInt8(KernelSetConformance):
    name = "cpu-int8"
    device = "cpu"
    ops = ("packed_linear", "packed_norm_linear", "packed_norm_gate")


def ask(op: str, num_out: int, num_in: int, dtype: str = "bfloat16", form: Any = INT8, **options: Any) -> Any:
    letter = "F" if op == "packed_norm_gate" else "N"
    return make_ask(op, CPU, dtype, {letter: num_out, "K": num_in}, {"form": form, **options})


@pytest.fixture(params=[(9, 5), (40, 200), (97, 1090)], ids=str)
def matrix(request: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return Scaled().quantise(torch.randn(request.param) / 8)


def test_every_path_has_the_same_bits(matrix: dict[str, torch.Tensor]) -> None:
    """Instructions, threads and other rows change no bit of a row."""
    norm = torch.rand(matrix["weight"].shape[1]).bfloat16()
    x, bias = torch.randn(71, len(norm)).bfloat16(), torch.randn(len(matrix["weight"])).bfloat16()
    before = torch.get_num_threads()
    found = []
    try:
        for path, threads in product(range(len(PATHS)), (1, 3)):
            torch.set_num_threads(threads)
            kernel = kernels.NormLinear(path)
            packed = kernel.pack(matrix)
            whole = kernel(x, norm, 1e-6, packed, bias, None)
            parts = [kernel(x[at : at + num], norm, 1e-6, packed, bias, None) for at, num in ((0, 1), (1, 6), (7, 64))]
            assert torch.equal(whole, torch.cat(parts))
            found.append(whole)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


def test_rows_that_are_not_finite_stay_so(matrix: dict[str, torch.Tensor]) -> None:
    """Infinity or NaN in a row makes its results not finite, and leaves other rows alone."""
    x = torch.randn(3, matrix["weight"].shape[1]).bfloat16()
    for path in range(len(PATHS)):
        kernel = kernels.Linear(path)
        packed = kernel.pack(matrix)
        good = kernel(x, packed, None)
        for bad in (float("inf"), float("-inf"), float("nan")):
            given = x.clone()
            given[1, 2] = bad
            found = kernel(given, packed, None)
            assert not found[1].isfinite().any()
            assert torch.equal(found[0::2], good[0::2])


def test_a_gate_far_below_zero_closes() -> None:
    """SiLU of it is 0, whatever it is multiplied by, as in the plain meaning."""
    matrix = {"weight": torch.tensor([[-127], [127]], dtype=torch.int8), "weight_scale": torch.full((2, 1), 1 / 127)}
    x = torch.tensor([[90.0], [1e30], [3e38]]).bfloat16()
    for path in range(len(PATHS)):
        kernel = kernels.NormGate(path)
        assert not kernel(x, None, 1e-6, kernel.pack(matrix), None).any()


def test_zero_rows_and_rows_of_zeros() -> None:
    """Neither is an error."""
    kernel = kernels.Linear(0)
    packed = kernel.pack(Scaled().quantise(torch.randn(7, 9)))
    assert kernel(torch.zeros(0, 9).bfloat16(), packed, None).shape == (0, 7)
    assert not kernel(torch.zeros(2, 9).bfloat16(), packed, None).any()


def test_rows_of_another_width_are_refused() -> None:
    """Nothing is read beyond them."""
    kernel = kernels.Linear(0)
    with pytest.raises(ValueError, match="rows of 8 numbers and a weight of 9 inputs"):
        kernel(torch.zeros(2, 8).bfloat16(), kernel.pack(Scaled().quantise(torch.randn(7, 9))), None)


@pytest.mark.parametrize("at", [0, 1, 4, 5])
def test_operands_of_another_dtype_are_refused(at: int) -> None:
    """A float32 norm, which a model of yours may have, is not read as numbers of 16 bits."""
    kernel = kernels.NormLinear(0)
    packed = kernel.pack(Scaled().quantise(torch.randn(7, 9)))
    given: list[Any] = [torch.zeros(2, 9), torch.zeros(9), 1e-6, packed, torch.zeros(7), torch.zeros(2, 7)]
    given = [each.bfloat16() if isinstance(each, torch.Tensor) and i != at else each for i, each in enumerate(given)]
    with pytest.raises(ValueError, match=r"are bfloat16, and one is torch\.float32"):
        kernel(*given)


def test_it_is_timed_with_what_it_fuses() -> None:
    """A norm and a residual stand beside most products of a model."""
    made = CpuInt8()
    given: Any = made.trial(ask("packed_norm_linear", 8, 64), 3, torch.device("cpu"))
    assert [given[at].shape for at in (0, 1, 5)] == [(3, 64), (64,), (3, 8)]
    given = made.trial(ask("packed_norm_gate", 8, 64, act="silu_and_mul"), 3, torch.device("cpu"))
    assert (given[1].shape, given[3]["weight"].shape) == ((64,), (16, 64))


def test_it_says_why_it_does_not_serve() -> None:
    """In a line, for each thing that it does not have."""
    made = CpuInt8()
    for asked, why in (
        (ask("packed_linear", 8, 64, form=None), "not with plain ones"),
        (ask("packed_linear", 8, 64, form=Int4()), "not with Int4"),
        (ask("packed_linear", 8, 64, form=Scaled(group=32)), "not with Scaled"),
        (ask("packed_linear", 8, 64, "float32"), "not in float32"),
        (ask("packed_linear", 8, 70_000), "65536 at most"),
        (ask("packed_norm_gate", 8, 64, act="gelu_and_mul"), "not gelu_and_mul"),
        (make_ask("rms_norm", CPU, "bfloat16", {"H": 8}, {}), "no kernel for rms_norm"),
    ):
        assert why in str(made.serves(asked))


@pytest.mark.parametrize("path", ["avx512", "avx2", "plain"])
def test_a_path_can_be_named(path: str) -> None:
    """It is used, or the set says which ones this processor has."""
    made = type("Named", (CpuInt8,), {"options": CpuInt8Options(path=path)})()
    asked = ask("packed_linear", 12, 64)
    if path not in PATHS:
        assert "possible: " in str(made.serves(asked))
        return
    kernel: Any = made.make(asked)
    tensors = Scaled().quantise(torch.randn(12, 64))
    x = torch.randn(2, 64).bfloat16()
    want: Any = meaning(asked)
    found = kernel(x, kernel.pack(tensors), None)
    assert torch.allclose(found.float(), want(x, tensors, None).float(), rtol=2e-2, atol=5e-2)
