"""Kernels for packed weights equal the written-out weights; on CPU they run in Triton's interpreter."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.contracts.kernels import PLAIN_KERNELS, Kernels
from dovetail.contracts.layers import BuildContext, ExpertsSpec, Part, RMSScale, Stream
from dovetail.contracts.quantization import Stored
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.kernels.binding import KernelBinder, LoadedSet
from dovetail.sdk.layers.experts import GatedExperts
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.ops import reference
from dovetail.sdk.layers.ops.mixture import each_expert
from dovetail.sdk.layers.ops.reference import act_and_mul, linear
from dovetail.sdk.layers.packed import PackedFactory
from dovetail.sdk.layers.plain import PLAIN
from dovetail.sdk.quantization.forms import Form, Int4, Mxfp4, Scaled
from dovetail_backends.kernels.triton import TritonKernels, packed, packed_experts
from dovetail_backends.kernels.triton.launch import Tile
from dovetail_backends.kernels.triton.packed_experts import ExpertTiles, packed_gated_experts
from dovetail_backends.kernels.triton.packed_few import few
from dovetail_backends.kernels.triton.packed_halves import by_halves, fits_halves
from dovetail_backends.kernels.triton.packed_integers import by_integers, fits_integers, integers
from dovetail_backends.kernels.triton.packed_row import row
from dovetail_backends.kernels.triton.packed_slots import PackedExpertWeights, PackedSlotTiles, slot_tiles
from dovetail_backends.kernels.triton.packed_weight import PackedWeight, weight_of
from dovetail_backends.kernels.triton.packed_wide import fits_wide, wide
from dovetail_backends.kernels.triton.packed_write import written

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOAT8 = torch.float8_e4m3fn
FORMS = [
    Scaled(FLOAT8),
    Scaled(FLOAT8, 128),
    Scaled(FLOAT8, 32),
    Scaled(FLOAT8, 40),
    Scaled(),
    Scaled(torch.int8, 64),
    Int4(128),
    Int4(64),
    Int4(32, has_zero=True),
    Int4(None),
    Mxfp4(),
]
OUT = 74
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the interpreter divides by zero


def width(form: Form, least: int = 200) -> int:
    """A number of inputs off the tiles that the form's groups divide."""
    group = 32 if isinstance(form, Mxfp4) else getattr(form, "group", None) or 1
    return -(-least // group) * group


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers on the test device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def made(form: Form, weight: Tensor, dtype: torch.dtype = torch.float32) -> tuple[PackedWeight, Tensor]:
    """Quantise a weight; returns it packed for kernels, and written out by the form."""
    tensors = form.quantise(weight)
    assert isinstance(form, Scaled | Int4 | Mxfp4)
    return weight_of(form, tensors, dtype), form.dequantise(tensors, torch.float32)


def close(found: Tensor, want: Tensor, most: float = 1e-5) -> None:
    """Relative error of the whole tensor."""
    assert found.shape == want.shape
    assert (found.double() - want.double()).norm() <= most * want.double().norm()


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 66])
def test_few_rows(form: Form, rows: int) -> None:
    """Plain onto a residual with split inputs, and behind a norm with bias and gate, at widths off the tiles."""
    k = width(form)
    weight, plain = made(form, random(OUT, k))
    x, residual, norm, bias = random(rows, k, seed=1), random(rows, OUT, seed=2), random(k, seed=3), random(OUT, seed=4)
    block_m = 16 if rows < 16 else 32
    close(few(x, weight, None, (block_m, (32, 128, 4, 2, 2)), residual=residual), x @ plain.T + residual)
    found = few(x, weight, bias, (block_m, (32, 128, 4, 2, 1)), norm=norm, eps=1e-6, act="silu_and_mul")
    close(found, reference.norm_gate(x, norm, 1e-6, plain, bias))


@pytest.mark.parametrize("form", [form for form in FORMS if isinstance(form, Scaled)], ids=str)
def test_one_row(form: Form) -> None:
    """As few rows, in the kernel for one."""
    k = width(form)
    weight, plain = made(form, random(OUT, k))
    x, residual, norm, bias = random(1, k, seed=1), random(1, OUT, seed=2), random(k, seed=3), random(OUT, seed=4)
    close(row(x, weight, None, (4, 128, 4), residual=residual), x @ plain.T + residual)
    found = row(x, weight, bias, (4, 256, 4), norm=norm, eps=1e-6, act="silu_and_mul")
    close(found, reference.norm_gate(x, norm, 1e-6, plain, bias))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_zero_and_extreme_scales(form: Form) -> None:
    """A row of zeros gives zero, and rows of tiny and of huge numbers lose nothing beside each other."""
    k = width(form)
    weight, plain = made(
        form,
        random(OUT, k)
        * torch.logspace(-9, 9, OUT, device=DEVICE)[:, None]
        * (torch.arange(OUT, device=DEVICE) != 3)[:, None],
    )
    x = random(2, k, seed=1)
    want = x @ plain.T
    usual = plain.norm(dim=1).clamp_min(1e-30)
    for found in (few(x, weight, None, (16, (32, 128, 4, 2, 1))), x @ written(weight, torch.float32).T):
        close(found / usual, want / usual)
        assert not found[:, 3].any()


@pytest.mark.parametrize("group", [8, 16, 24, 40, 80])
def test_groups_that_kernels_have_no_scales_for(group: int) -> None:
    """Int4 with a scale for less than half a block, or for no multiple of that, makes no packed weight."""
    with pytest.raises(ValueError, match=f"groups of {group} inputs; .* multiples of 32"):
        made(Int4(group), random(OUT, 240))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_written_out(form: Form) -> None:
    """What many rows are multiplied with is the form's own weight, whole and in parts."""
    weight, plain = made(form, random(OUT, width(form)))
    close(written(weight, torch.float32), plain, 1e-7)
    close(written(weight, torch.float32, 50, 24), plain[50:], 1e-7)


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("rows", [2, 40])
def test_rows_as_two_float8_numbers(group: int | None, rows: int) -> None:
    """Products in float8 lose nothing of bfloat16 rows: the error is that of rounding the result."""
    k = 384
    weight, plain = made(Scaled(FLOAT8, group), random(OUT, k))
    assert fits_halves(weight)
    x = random(rows, k, seed=1, dtype=torch.bfloat16) * torch.logspace(-6, 6, rows, device=DEVICE).bfloat16()[:, None]
    residual = x[:, :OUT].contiguous()
    found = by_halves(x, weight, None, (16, (32, 128, 4, 2, 2)), residual=residual).float()
    want = x.float() @ plain.T + residual.float()
    close(found / want.norm(dim=1, keepdim=True), want / want.norm(dim=1, keepdim=True), 1e-2)
    norm, bias = random(k, seed=3, dtype=torch.bfloat16), random(OUT, seed=4, dtype=torch.bfloat16)
    found = by_halves(x, weight, bias, (16, (32, 128, 4, 2, 1)), norm=norm, eps=1e-6, act="silu_and_mul").float()
    close(found, reference.norm_gate(x.float(), norm.float(), 1e-6, plain, bias.float()), 4e-2)


@pytest.mark.parametrize(
    ("n", "k", "gate", "tiles"),
    [
        (6144, 4096, False, [(64, 128, 4, 4, 4), (64, 128, 4, 4, 4), (128, 128, 8, 6, 2)]),
        (28672, 4096, True, [(64, 128, 4, 4, 1), (128, 128, 8, 4, 1), (128, 128, 8, 4, 1)]),
        (4096, 14336, False, [(64, 128, 4, 4, 4), (128, 128, 8, 8, 4), (128, 128, 8, 6, 4)]),
        (128256, 4096, False, [(64, 128, 4, 4, 1), (128, 128, 8, 4, 1), (128, 128, 8, 3, 1)]),
        (10240, 5120, False, [(64, 128, 4, 4, 2)] * 3),  # 80 programs, where 264 have a place
        (6144, 1024, True, [(64, 128, 4, 4, 1), (64, 128, 4, 4, 1), (64, 128, 4, 3, 1)]),
    ],
)
def test_tiles_of_more_rows_have_more_outputs(n: int, k: int, gate: bool, tiles: list[Tile]) -> None:
    """For 16, 32 and 64 rows: where the busiest multiprocessor so reads less, and a small weight does not."""
    weight = PackedWeight("scaled", torch.empty(0), None, None, None, 0, n, k)
    assert [packed.halves_tile(weight, rows, gate=gate)[1] for rows in (16, 32, 64)] == tiles
    assert packed.halves_tile(weight, 17, gate=gate) == packed.halves_tile(weight, 32, gate=gate)


def test_a_gate_of_groups_or_beside_tensor_memory_has_a_stage_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fourth does not fit there, or gains nothing."""
    tile = 64, (128, 128, 8, 3, 1)
    groups = PackedWeight("scaled", torch.empty(0), torch.empty(0, 32), None, None, 128, 28672, 4096)
    assert packed.halves_tile(groups, 64, gate=True) == tile
    monkeypatch.setattr(packed, "has_tensor_memory", lambda device: True)
    weight = PackedWeight("scaled", torch.empty(0), None, None, None, 0, 28672, 4096)
    assert packed.halves_tile(weight, 64, gate=True) == tile


def test_tiles_fit_a_device_with_less_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 99 KiB a program has no tile that takes 192."""
    weight = PackedWeight("scaled", torch.empty(0), None, None, None, 0, 4096, 14336)
    monkeypatch.setattr(packed, "shared_bytes", lambda device: 99 << 10)
    assert packed.halves_tile(weight, 64, gate=False) == (64, (64, 128, 4, 4, 4))


@pytest.mark.first(5)
@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (70, 1), (70, 3)])
def test_wide(form: Form, rows: int, splits: int) -> None:
    """Hundreds of rows: with a bias onto a residual, at sizes off the tiles, K split so that the last part is short."""
    k = width(form, 264)
    weight, plain = made(form, random(OUT, k))
    if isinstance(form, Scaled) and (form.group or 64) % 64:
        assert not fits_wide(weight)
        return
    assert fits_wide(weight)
    x, residual, bias = random(rows, k, seed=1), random(rows, OUT, seed=2), random(OUT, seed=4)
    strided = random(rows, 2 * k, seed=3)[:, :k]
    for depth in (64, 128) if weight.kind != "scaled" or weight.groups == 0 or weight.group % 128 == 0 else (64,):
        tile = (32, (32, depth, 4, 2, splits))
        close(wide(x, weight, bias, tile, residual=residual), x @ plain.T + bias + residual)
        close(wide(strided, weight, None, tile), strided @ plain.T)


def test_wide_tiles_divide_sizes() -> None:
    """Without masks, where tiles divide outputs and inputs."""
    weight, plain = made(Scaled(FLOAT8, 64), random(64, 256))
    x = random(40, 256, seed=1)
    close(wide(x, weight, None, (32, (32, 64, 4, 2, 2))), x @ plain.T)


@pytest.mark.parametrize("form", [FORMS[1], FORMS[4], FORMS[6], FORMS[-1]], ids=str)
def test_hundreds_of_rows_of_a_large_weight(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Get the kernel for them, behind a norm and with a gate; a small weight has too few programs there."""
    k = 256
    weight, plain = made(form, random(OUT, k), torch.float16)
    assert packed.wide_tile(weight, 66) is None
    monkeypatch.setattr(packed, "wide_tile", lambda *_: (32, (32, 64, 4, 2, 2)))
    x, residual, norm = random(66, k, seed=1).half(), random(66, OUT // 2, seed=2).half(), random(k, seed=3).half()
    found = packed.linear(x, weight, None, norm=RMSScale(norm, 1e-6), act="silu_and_mul", residual=residual)
    want = residual.float() + reference.norm_gate(x.float(), norm.float(), 1e-6, plain, None)
    close(found.float(), want, 3e-3)
    close(packed.linear(x, weight, None).float(), x.float() @ plain.T, 2e-3)


@pytest.mark.parametrize("rows", [65, 128, 129, 256, 300, 512])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_wide_tiles_fill_the_device(rows: int, n: int, k: int) -> None:
    """Each product of an 8B model's layer gets a program for most of the multiprocessors, of eight steps at least."""
    weight = PackedWeight("scaled", torch.empty(0), None, None, None, 0, n, k)
    tile = packed.wide_tile(weight, rows)
    assert tile is not None
    block_m, (block_n, block_k, _, _, splits) = tile
    programs = -(-n // block_n) * -(-rows // block_m) * splits
    assert programs >= packed.LEAST_WIDE_PROGRAMS
    assert splits == 1 or k // splits >= 8 * block_k


def test_wide_tiles_leave_no_half_of_a_device_idle() -> None:
    """Where 256 outputs have 64 programs, 128 have twice as many, one for each multiprocessor."""
    weight = PackedWeight("int4", torch.empty(0), None, None, None, 128, 4096, 4096)
    assert packed.wide_tile(weight, 65) == packed.wide_tile(weight, 128) == (128, (128, 128, 8, 4, 4))
    assert packed.wide_tile(weight, 129) == (128, (256, 128, 8, 3, 4))


@pytest.mark.sampled
@pytest.mark.parametrize("form", [FORMS[0], FORMS[1], FORMS[4], FORMS[7], FORMS[-1]], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 130])
def test_every_number_of_rows_has_a_way(form: Form, rows: int) -> None:
    """One row, some, and so many that the weight is written out: with norm, gate and residual."""
    k = width(form, 256)
    weight, plain = made(form, random(OUT, k))
    x, residual, norm = random(rows, k, seed=1), random(rows, OUT // 2, seed=2), random(k, seed=3)
    found = packed.linear(x, weight, None, norm=RMSScale(norm, 1e-6), act="silu_and_mul", residual=residual)
    close(found, residual + reference.norm_gate(x, norm, 1e-6, plain, None))
    close(packed.linear(x, weight, None), x @ plain.T)


@pytest.mark.first(4)
@pytest.mark.sampled
@pytest.mark.parametrize(
    "form",
    [Int4(128), Int4(64), Int4(192, has_zero=True), Int4(32), Int4(96, has_zero=True), Int4(None), Mxfp4()],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_as_integers(form: Int4 | Mxfp4, rows: int) -> None:
    """Products with 4 bits in integers lose less than rounding does: onto a residual, and behind a norm with a gate."""
    k = 384 if isinstance(form, Mxfp4) or form.group else 200
    tensors = form.quantise(random(OUT, k) * torch.logspace(2, -2, k, device=DEVICE))
    if isinstance(form, Int4) and form.has_zero:
        shape = tensors["weight_scale"].shape
        tensors["weight_zero"] = torch.randint(0, 17, shape, generator=torch.Generator().manual_seed(7)).to(
            DEVICE, torch.uint8
        )
    weight = weight_of(form, tensors, torch.bfloat16)
    plain = form.dequantise(tensors, torch.float32)
    assert fits_integers(weight)
    spread = torch.logspace(-3, 3, k, device=DEVICE)
    x, residual = (random(rows, k, seed=1) * spread).half(), random(rows, OUT, seed=2).half()
    found = by_integers(x, weight, None, (4, 128, 4), residual=residual)
    close(found, x.float() @ plain.T + residual.float(), 1e-3)
    norm, bias = random(k, seed=3).half(), random(OUT, seed=4).half()
    found = by_integers(x, weight, bias, (8, 512, 4), norm=norm, eps=1e-6, act="silu_and_mul")
    close(found, reference.norm_gate(x.float(), norm.float(), 1e-6, plain, bias.float()), 3e-3)


@pytest.mark.parametrize(("kind", "planes"), [("int4", (0, 2, 1, 3, 4, 6, 5, 7)), ("mxfp4", (0, 1, 2, 3, 4, 5, 6, 7))])
@pytest.mark.parametrize("is_halved", [False, True])
def test_integers_hold_a_row(kind: Any, planes: tuple[int, ...], is_halved: bool) -> None:
    """To `2 ** -15` of the greatest of 64, zeros and those beside huge ones too; what is not finite stays so."""
    x = random(5, 200).bfloat16()
    x[1, :64] *= 1e20
    x[2] = 0
    x[3, 70], x[4, 70] = float("nan"), float("inf")
    made = integers(x, kind, is_halved=is_halved)
    whole = torch.stack([(made.pairs << 16) >> 16, made.pairs >> 16], 2).flatten(1, 2)  # [M, 8, W]
    whole = whole[:, [planes.index(plane) for plane in range(8)]]
    whole = whole.view(5, 8, -1, 8).transpose(1, 2).flatten(2)  # [M, B, 64]
    sums = whole.view(5, -1, 1 + is_halved, 64 // (1 + is_halved)).sum(-1).transpose(1, 2)
    assert (sums == made.sums)[:3].all()
    back = (whole * made.scale[..., None]).flatten(1)[:, :200]
    most = torch.nn.functional.pad(x.float(), (0, 56)).view(5, -1, 64).abs().amax(-1).repeat_interleave(64, 1)[:, :200]
    assert ((back - x.float()).abs() <= 2.0**-15 * most)[:3].all()
    assert back[3:, 64:128].isnan().all()
    assert back[3:, :64].isfinite().all()


NUM, TOP_K, HIDDEN, INNER = 5, 2, 128, 96


def each(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """What plain experts make of tokens, one expert after the other."""
    up, down, place = experts.gate_up, experts.down, dict(experts._place)
    how = {name: place[name] for name in ("act", "weigh", "first")}
    kernel = each_expert(partial(act_and_mul, act=place["act"]), linear, linear, **how, total=up.num_experts)
    return kernel(x, ids, shares, up.weight, up.bias, down.weight, down.bias, None)


def experts(form: Any, **ways: Any) -> tuple[Any, PackedExpertWeights]:
    """Plain experts, and the same packed."""
    ctx = BuildContext(device=DEVICE, dtype=torch.float32, factory=PLAIN)
    spec = ExpertsSpec(path="x", num=NUM, top_k=TOP_K, hidden=HIDDEN, inner=INNER, **ways)
    plain: Any = GatedExperts(ctx, spec)
    for seed, param in enumerate(plain.parameters()):
        param.data.copy_(random(*param.shape, seed=seed) / 4)
    halves_of = []
    for matrix in (plain.gate_up, plain.down):
        weight, back = made(form, matrix.weight.data)
        matrix.weight.data.copy_(back)
        halves_of.append(weight)
    return plain, PackedExpertWeights(
        halves_of[0], halves_of[1], plain.gate_up.bias, plain.down.bias, 0, ways["act"], ways["weigh"] == "input"
    )


@pytest.mark.first(3)
@pytest.mark.sampled
@pytest.mark.parametrize(
    "form", [Scaled(FLOAT8), Scaled(FLOAT8, 32), Scaled(), Int4(32, has_zero=True), Mxfp4()], ids=str
)
@pytest.mark.parametrize(
    "ways",
    [
        {"act": "clamped_silu_and_mul", "bias": True, "weigh": "output"},
        {"act": "silu_and_mul", "bias": False, "weigh": "input"},
    ],
    ids=["clamped", "input"],
)
@pytest.mark.parametrize(("is_few", "num_tokens"), [(True, 1), (True, 3), (False, 3), (False, 40)])
def test_experts(form: Form, ways: dict[str, Any], is_few: bool, num_tokens: int) -> None:
    """Each choice by itself and sorted, with an expert that nobody chose, and ids of other ranks' experts."""
    plain, weights = experts(form, **ways)
    by_integers = is_few and not isinstance(form, Scaled)
    dtype, most = (torch.float16, 3e-3) if by_integers else (torch.float32, 1e-5)
    x, residual = random(num_tokens, HIDDEN, seed=9), random(num_tokens, HIDDEN, seed=8)
    ids = torch.stack([torch.randperm(NUM - 1)[:TOP_K] for _ in range(num_tokens)]).to(DEVICE)
    ids[0, 0] = NUM + 3
    shares = random(num_tokens, TOP_K, seed=7).abs()
    want = each(plain, x, ids, shares) + residual
    tile = PackedSlotTiles((8, 128, 4), (2, 64, 4)) if is_few else ExpertTiles(16, (32, 128, 4, 2), (64, 128, 4, 2))
    for tiles in (tile, None):
        found = packed_gated_experts(
            x.to(dtype), ids, shares.to(dtype), weights, residual.to(dtype), tiles=tiles, is_few=is_few
        )
        close(found, want, most)


def test_tiles_of_words_read_little_behind_a_rows_end() -> None:
    """A rank's 1,440 inputs take three turns of 512, for two tokens two of 1,024; 2,880 take three of those."""
    for inner, block in ((2880, 1024), (1440, 512), (32, 64), (768, 1024), (200, 256)):
        weights = PackedExpertWeights(
            PackedWeight("mxfp4", *4 * (None,), 32, 2 * inner, 2880),  # type: ignore[arg-type]
            PackedWeight("mxfp4", *4 * (None,), 32, 2880, inner), None, None, 0, "silu_and_mul", False,  # type: ignore[arg-type]
        )  # fmt: skip
        assert slot_tiles(weights, 9) == PackedSlotTiles((4, 1024, 1), (2, block, 1))
        longest = 1024 if inner == 1440 else block
        assert slot_tiles(weights, 8) == PackedSlotTiles((4, 1024, 1), (2, longest, 1))


def test_experts_of_one_short_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 inputs are half a block: tiles are not shorter than one."""
    monkeypatch.setitem(globals(), "HIDDEN", 32)
    monkeypatch.setitem(globals(), "INNER", 32)
    plain, weights = experts(Mxfp4(), act="silu_and_mul", bias=False, weigh="output")
    x, ids, shares = random(1, 32), torch.tensor([[1, 3]], device=DEVICE), random(1, TOP_K).abs()
    found = packed_gated_experts(x.half(), ids, shares.half(), weights, None)
    close(found, each(plain, x, ids, shares), 3e-3)
    matrix, back = made(Mxfp4(), random(OUT, 32))
    close(packed.linear(x.half(), matrix, None), x @ back.T, 3e-3)


def test_float32_words_are_sorted() -> None:
    """Integers hold 16 bits: what would lose more is refused for them, and sorted where nothing is said."""
    _, weights = experts(Mxfp4(), act="silu_and_mul", bias=False, weigh="output")
    x, ids, shares = random(1, HIDDEN), torch.zeros(1, TOP_K, dtype=torch.int64, device=DEVICE), random(1, TOP_K)
    with pytest.raises(ValueError, match="sorted"):
        packed_gated_experts(x, ids, shares, weights, None, is_few=True)
    assert torch.equal(
        packed_gated_experts(x, ids, shares, weights, None),
        packed_gated_experts(x, ids, shares, weights, None, is_few=False),
    )


def test_scales_of_mxfp4_that_kernels_do_not_hold() -> None:
    """A scale of 2 ** 125 is refused by name; 2 ** 124 is served beside one far smaller in its row."""
    form = Mxfp4()
    tensors = form.quantise(random(OUT, 128))
    tensors["weight_scale"][3, 1] = 252
    with pytest.raises(ValueError, match=r"2 \*\* 125"):
        weight_of(form, tensors, torch.float32)
    tensors["weight_scale"][3, 1] = 251
    weight = weight_of(form, tensors, torch.float32)
    close(written(weight, torch.float32), form.dequantise(tensors, torch.float32), 1e-7)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(Scaled(FLOAT8, 32), marks=pytest.mark.full),
        Int4(32, has_zero=True),
        pytest.param(Mxfp4(), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_experts_written_out(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some at a time, of which the last are fewer: with biases, and an expert that nobody chose."""
    plain, weights = experts(form, act="clamped_silu_and_mul", bias=True, weigh="output")
    x, residual = random(40, HIDDEN, seed=9), random(40, HIDDEN, seed=8)
    ids = torch.stack([torch.randperm(NUM - 1)[:TOP_K] for _ in range(40)]).to(DEVICE)
    ids[0, 0] = NUM + 3
    shares = random(40, TOP_K, seed=7).abs()
    want = each(plain, x, ids, shares) + residual
    of_two = 2 * (2 * INNER) * HIDDEN * 4
    for most in (1, of_two, 1 << 30):
        monkeypatch.setattr(packed_experts, "WRITTEN_BYTES", most)
        close(packed_gated_experts(x, ids, shares, weights, residual, is_written=True), want)


@pytest.mark.parametrize("form", [Scaled(FLOAT8), Int4(32), Mxfp4()], ids=str)
def test_layers_use_the_kernels(form: Form) -> None:
    """A packed layer and packed experts compute in the kernels what they do without: norm, gate, stream and scale."""
    x, start = random(3, 64, seed=1), random(3, 64, seed=2)
    ids, shares = torch.tensor([[0, 2], [1, 3], [3, 0]], device=DEVICE), random(3, TOP_K, seed=7).abs()

    def outputs(kernels: Kernels) -> list[Tensor]:
        factory = PackedFactory(Stored({}, is_known=False), PLAIN, form, form)
        ctx = BuildContext(device=DEVICE, dtype=torch.float32, factory=factory, kernels=kernels)
        norm = RMSNorm(64, 1e-6, ctx)
        norm.weight.data.copy_(random(64, seed=5))
        made_of: list[Any] = [
            ctx.linear("a", 64, 96),
            ctx.linear("b", 64, [Part("gate", 96), Part("up", 96)], act="silu_and_mul"),
            ctx.linear("c", 64, 64),
        ]
        moe: Any = ctx.experts("moe", NUM, TOP_K, 64, 96, act="silu_and_mul", bias=False, weigh="output")
        for seed, matrix in enumerate([*made_of, moe.gate_up, moe.down]):
            for name, tensor in form.quantise(random(*matrix_shape(matrix), seed=seed) / 8).items():
                matrix.get_parameter(name).data.copy_(tensor)
            matrix.finalize()
            is_plain = kernels is PLAIN_KERNELS
            assert all((getattr(matrix, name) is not None) == is_plain for name in matrix._names)
        stream, second = Stream(start.clone()), Stream(start.clone())
        made_of[2](x, add=stream)
        moe(x, ids, shares, add=second)
        assert moe(x[:0], ids[:0], shares[:0]).shape == (0, 64)
        return [
            made_of[0](x, norm=norm, scale=0.5), made_of[1](x, norm=norm), stream.total(), second.total(),
            moe(x, ids, shares),
        ]  # fmt: skip

    sets = [LoadedSet("triton", "triton", TritonKernels(), True)]
    binder = KernelBinder(sets, device_of(DEVICE).view)
    for found, right in zip(outputs(binder), outputs(PLAIN_KERNELS), strict=True):
        close(found, right)
    packed_uses = [use for use in binder.table if "packed" in use.operation]
    assert packed_uses
    assert all(use.served[0][2] == "triton" for use in packed_uses)


def matrix_shape(matrix: Any) -> tuple[int, ...]:
    """Of a layer's weight, with its experts."""
    experts_of = () if matrix.num_experts is None else (matrix.local_experts,)
    return (*experts_of, matrix.local_out, matrix.local_in)
