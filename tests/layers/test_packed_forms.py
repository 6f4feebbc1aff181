"""The forms of packed matrices: words, chunks of rows, and torch's own layout, against their plain definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.contracts.device import DeviceView
from dovetail.contracts.errors import ConfigError
from dovetail.runtime.kernels.binding import KernelBinder, LoadedSet
from dovetail.sdk.checkpoint import is_finite
from dovetail.sdk.quantization.forms import Form, Int4, Mxfp4, Scaled, wide
from dovetail.sdk.quantization.words import ORDER, nibbles_of, reordered, words_of
from dovetail_backends.kernels import cpu_products
from dovetail_backends.kernels.cpu import CpuKernels
from dovetail_backends.quantization.awq import turned

SIZES = ((1, 8), (5, 32), (16, 64), (130, 896), (70, 4864), (65, 32))
FORMS = (Scaled(), Scaled(group=32), Scaled(torch.float8_e4m3fn), Int4(32), Int4(64, has_zero=True), Mxfp4())


def some(num_out: int, num_in: int) -> Tensor:
    """Return random nibbles."""
    generator = torch.Generator().manual_seed(num_out)
    return torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8, generator=generator)


def joined(nibbles: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return words whose place i has number `order[i]` of eight, one place after the other."""
    eight = nibbles.view(len(nibbles), -1, 8).long()
    return sum((eight[..., index] << (4 * place) for place, index in enumerate(order)), torch.tensor(0)).to(torch.int32)


@pytest.mark.parametrize("size", SIZES)
def test_words_hold_eight_nibbles_in_their_order(size: tuple[int, int]) -> None:
    """Packing, unpacking and changing the order agree with a loop over the places; also of a part of other memory."""
    nibbles = some(*size)
    words = joined(nibbles, ORDER)
    assert torch.equal(words_of(nibbles), words)
    assert torch.equal(words_of(F.pad(nibbles.flatten(), (3, 0))[3:].view(size)), words)
    assert torch.equal(nibbles_of(words), nibbles)
    plain = joined(nibbles, tuple(range(8)))
    for given in (plain, plain.T.contiguous().T):
        made = reordered(given)
        assert torch.equal(made, words)
        assert made.is_contiguous()


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("size", [*SIZES, (400, 4864)])
def test_blocks_of_rows_are_laid_out_as_the_whole_matrix_is(
    size: tuple[int, int], is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's int4 layout, made of some rows at a time, is the one that it makes of all, whoever lays it out."""
    if not is_ours:
        monkeypatch.setattr(cpu_products, "pairs_of_rows", lambda: False)
    nibbles = some(*size)
    padded = F.pad(nibbles.int(), (0, 0, 0, -len(nibbles) % cpu_products.ROWS))
    whole = torch._convert_weight_to_int4pack_for_cpu(padded, 1)
    assert torch.equal(cpu_products.int4_blocks(joined(nibbles, ORDER)), whole)


def test_every_byte_of_e4m3_is_what_torch_makes_of_it() -> None:
    """Subnormals, both zeros and the largest number, and NaN wherever it stands."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = every[every.float().isfinite()]
    for numbers in (finite, every, every[:0], finite.view(2, -1)):
        want = numbers.float()
        got = wide(numbers)
        assert got.dtype == torch.float32
        assert torch.equal(got.isnan(), want.isnan())
        kept = ~want.isnan()
        assert torch.equal(got[kept].view(torch.int32), want[kept].view(torch.int32))


@pytest.mark.parametrize("size", [(8, 8), (8, 24), (640, 4864), (4864, 96), (72, 40)])
def test_words_along_outputs_are_turned(size: tuple[int, int]) -> None:
    """As AutoAWQ holds eight outputs, their inputs become words of the shared order, however many at a time."""
    nibbles, order = some(*size), (0, 4, 1, 5, 2, 6, 3, 7)
    inverse = tuple(order.index(place) for place in range(8))
    assert torch.equal(turned(joined(nibbles.T.contiguous(), inverse).contiguous()), joined(nibbles, ORDER))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_are_quantised_alike_alone_and_together(form: Form) -> None:
    """A matrix of many chunks is, row by row, what each row is by itself, and so is one of experts read back."""
    weight = torch.randn(75, 1920, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = form.quantise(weight)
    alone = [form.quantise(row[None]) for row in weight]
    for name, tensor in whole.items():
        rows = torch.cat([one[name] for one in alone])
        assert torch.equal(tensor.view(torch.uint8), rows.view(torch.uint8)), name
    back = form.dequantise(whole, torch.float32)
    experts = form.dequantise({name: tensor.unflatten(0, (3, 25)) for name, tensor in whole.items()}, torch.float32)
    assert torch.equal(experts.flatten(0, 1), back)
    assert float((back - weight.float()).norm() / weight.float().norm()) < 0.2


@pytest.mark.sampled
@pytest.mark.parametrize("by_bytes", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_in", [1, 8, 24, 33, 40, 64, 72, 1000])
def test_rows_of_any_width_times_int8(
    num_in: int, dtype: torch.dtype, by_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own product in bfloat16 reads behind rows that are no multiple of 16, where other numbers stand."""
    if not by_bytes:
        monkeypatch.setattr(cpu_products, "takes_bytes", lambda dtype: False)
    generator = torch.Generator().manual_seed(num_in)
    for num_out, rows in ((1, 1), (1, 5), (33, 2), (7, 129)):
        tensors = Scaled().quantise(torch.randn(num_out, num_in, generator=generator))
        x = torch.randn(rows + 2, num_in, generator=generator).to(dtype)
        x[-2:] = torch.nan  # what stands behind the rows
        product = cpu_products.int8(tensors["weight"], tensors["weight_scale"], dtype)
        found, want = product(x[:rows]), x[:rows].float() @ Scaled().dequantise(tensors, torch.float32).T
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), want, rtol=0.02, atol=0.02 * float(want.abs().max()))


needs_bytes = pytest.mark.skipif(
    not cpu_products.takes_bytes(torch.bfloat16), reason="this CPU has no instructions for products of bytes"
)


@needs_bytes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(96, 64), (1152, 896), (130, 4864)])
def test_int8_by_bytes_rounds_the_result_only(size: tuple[int, int], dtype: torch.dtype) -> None:
    """Numbers of unlike size lose little beside the result's rounding; a row has the same bits beside others."""
    generator = torch.Generator().manual_seed(1)
    tensors = Scaled().quantise(torch.randn(*size, generator=generator))
    x = torch.randn(70, size[1], generator=generator)
    x[:, :3] *= 30  # as outliers of activations are
    x[5] *= 1e-4
    x[6] = 0.0
    x = x.to(dtype)
    product = cpu_products.int8(tensors["weight"], tensors["weight_scale"], dtype)
    found, want = product(x), x.double() @ Scaled().dequantise(tensors, torch.float32).double().T
    rounded = want.to(dtype).double()
    for row in range(len(x)):
        error, least = (float((one[row].double() - want[row]).norm()) for one in (found, rounded))
        most = 1.1 * least if dtype == torch.bfloat16 else 1e-3 * float(want[row].norm())
        assert error <= most + 1e-12, row
    for num in (1, 2, 3, 16, 33):
        parts = [product(x[at : at + num]) for at in range(0, len(x), num)]
        assert torch.equal(torch.cat(parts), found), num
    assert product(x[:0]).shape == (0, size[0])


@needs_bytes
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_int8_by_bytes_shows_what_is_not_finite(bad: float) -> None:
    """A row with such a number has no finite result, and the rows beside it keep theirs."""
    tensors = Scaled().quantise(torch.randn(40, 64, generator=torch.Generator().manual_seed(2)))
    product = cpu_products.int8(tensors["weight"], tensors["weight_scale"], torch.bfloat16)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    want = product(x)
    x[1, 7] = bad
    found = product(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], want[[0, 2]])


@pytest.mark.sampled
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_number_that_is_not_finite_is_seen(bad: float, dtype: torch.dtype) -> None:
    """Wherever it stands; the largest finite numbers are none, whatever their sum."""
    for place in (0, 7, 40_000, -1):
        weight = torch.full((50_000,), torch.finfo(dtype).max, dtype=dtype)
        assert is_finite(weight)
        weight[place] = bad
        assert not is_finite(weight)
    assert is_finite(torch.empty(0, dtype=dtype))


COUNTS = (1, 2, 7, 16, 17, 33, 64, 65, 129)
HOW = {"act": "gelu_and_mul", "weigh": "output", "first": 0}


@pytest.mark.parametrize("form", [Scaled(), Int4(32), Int4(64, has_zero=True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(130, 896), (74, 4864)])
def test_a_row_of_a_product_on_cpu_has_the_bits_that_it_has_alone(
    form: Form, dtype: torch.dtype, size: tuple[int, int]
) -> None:
    """Torch's products with packed integers do not choose by rows, which `--batch-invariant` relies on."""
    torch.manual_seed(0)
    product = cpu_products.product_of(form, form.quantise(torch.randn(*size)), dtype)
    x = torch.randn(257, size[1]).to(dtype)
    whole = product(x)
    for num in COUNTS:
        assert torch.equal(product(x[-num:]), whole[-num:]), num


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", [Scaled(), Scaled(torch.float8_e4m3fn), None], ids=str)
def test_a_row_of_experts_on_cpu_has_the_bits_that_it_has_alone(dtype: torch.dtype, other: Form | None) -> None:
    """With the activation between, which torch computes otherwise at the end of a tensor, at widths off its vectors.

    Also where one half is written out, or plain.
    """
    num, hidden, inner, form = 3, 64, 36, Scaled()
    binder = KernelBinder([LoadedSet("cpu", "cpu", CpuKernels(), True)], DeviceView("cpu"))
    dims = {"E": num, "H": hidden, "I": inner, "C": 2}
    name = str(dtype).removeprefix("torch.")
    kernel = binder.bind(binder.ask("packed_experts", name, dims, {"forms": (form, other), **HOW}, invariant=True))
    torch.manual_seed(0)
    shapes = {"gate_up": (num, 2 * inner, hidden), "down": (num, hidden, inner)}
    made = {half: torch.randn(shape) for half, shape in shapes.items()}
    tensors = other.quantise(made["down"]) if other else {"weight": made["down"].to(dtype)}
    up, down = kernel.pack(form.quantise(made["gate_up"]), "gate_up"), kernel.pack(tensors, "down")
    x, ids = torch.randn(257, hidden).to(dtype), torch.rand(257, num).topk(2).indices
    shares = torch.rand(257, 2).to(dtype)
    whole = kernel(x, ids, shares, up, None, down, None, None)
    for rows in COUNTS:
        at = slice(257 - rows, 257)
        assert torch.equal(kernel(x[at], ids[at], shares[at], up, None, down, None, None), whole[at]), rows


def test_experts_of_which_torch_has_no_product_are_refused_where_rows_must_not_tell() -> None:
    """They would be written out and multiplied by kernels that are chosen by rows."""
    binder = KernelBinder([LoadedSet("cpu", "cpu", CpuKernels(), True)], DeviceView("cpu"))
    options = {"forms": (Scaled(torch.float8_e4m3fn),) * 2, **HOW}
    dims = {"E": 2, "H": 64, "I": 64, "C": 2}
    binder.bind(binder.ask("packed_experts", "float32", dims, options, invariant=False))
    with pytest.raises(ConfigError, match=r"packed_experts .* computes each row by itself .cpu: torch has no product"):
        binder.bind(binder.ask("packed_experts", "float32", dims, options, invariant=True))
