"""Triton's experts and routers equal the plain ones; on CPU they run in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.contracts.layers import BuildContext, ExpertsSpec, Stream
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.kernels.binding import KernelBinder, LoadedSet
from dovetail.sdk.layers.experts import GatedExperts
from dovetail.sdk.layers.moe import Router
from dovetail.sdk.layers.ops import mixture
from dovetail.sdk.layers.ops.mixture import each_expert
from dovetail.sdk.layers.ops.reference import act_and_mul, linear
from dovetail.sdk.layers.plain import PLAIN
from dovetail.sdk.layers.routing import Routing
from dovetail_backends.kernels.triton import TritonKernels
from dovetail_backends.kernels.triton.experts import (
    ExpertWeights,
    SlotTiles,
    SortedTiles,
    few,
    many,
    sorted_slots,
)
from dovetail_backends.kernels.triton.route import route

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DOT_DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32]
"""Triton's interpreter multiplies bfloat16 matrices as if their bits were integers."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
NUM, TOP_K, HIDDEN, INNER = 7, 3, 70, 36
WAYS = {
    "few": lambda *args: few(*args, SlotTiles((32, 64, 4), (32, 32, 4))),
    "many": lambda *args: many(*args, SortedTiles(16, (32, 32, 4, 2), (16, 16, 4, 2))),
    "more": lambda *args: many(*args, SortedTiles(64, (16, 64, 4, 2), (64, 32, 4, 2))),
}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random numbers on the test device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def made(dtype: torch.dtype, *, kernels: bool = False, **ways: Any) -> Any:
    """Experts with random weights, plain or with our kernels."""
    ctx = BuildContext(device=DEVICE, dtype=dtype, factory=PLAIN)
    if kernels:
        sets = [LoadedSet("triton", "triton", TritonKernels(), True)]
        ctx = replace(ctx, kernels=KernelBinder(sets, device_of(DEVICE).view))
    wanted: Any = {"act": "silu_and_mul", **ways}
    experts = GatedExperts(ctx, ExpertsSpec(path="x", num=NUM, top_k=TOP_K, hidden=HIDDEN, inner=INNER, **wanted))
    for seed, param in enumerate(experts.parameters()):
        param.data.copy_(random(*param.shape, dtype=dtype, seed=seed) / 8)
    return experts


def some_of(experts: Any, first: int, num: int) -> ExpertWeights:
    """A rank's part of them."""
    up, down = experts.gate_up, experts.down
    here = slice(first, first + num)
    cut = [None if one is None else one[here].contiguous() for one in (up.weight, down.weight, up.bias, down.bias)]
    return ExpertWeights(*cut, first, experts._place["act"], experts._place["weigh"] == "input")  # type: ignore[arg-type]


def each(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """What plain experts make of tokens, one expert after the other."""
    up, down, place = experts.gate_up, experts.down, dict(experts._place)
    how = {name: place[name] for name in ("act", "weigh", "first")}
    kernel = each_expert(partial(act_and_mul, act=place["act"]), linear, linear, **how, total=up.num_experts)
    return kernel(x, ids, shares, up.weight, up.bias, down.weight, down.bias, None)


def choices(num_tokens: int, num: int = NUM - 1) -> Tensor:
    """Different experts for each token; the last one is nobody's."""
    generator = torch.Generator().manual_seed(num_tokens)
    rows = [torch.randperm(num, generator=generator)[:TOP_K] for _ in range(num_tokens)]
    return torch.stack(rows).to(DEVICE)


def close(found: Tensor, want: Tensor) -> None:
    """Relative error of the whole tensor below the dtype's tolerance."""
    assert found.shape == want.shape
    assert found.dtype == want.dtype
    assert (found.double() - want.double()).norm() <= TOLERANCE[want.dtype] * want.double().norm()


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("way", "num_tokens"), [("few", 1), ("few", 5), ("many", 1), ("many", 9), ("more", 65)])
@pytest.mark.parametrize(
    "ways",
    [
        {},
        {"bias": True, "act": "clamped_silu_and_mul"},
        {"weigh": "input", "act": "gelu_and_mul"},
        {"bias": True, "weigh": "input", "act": "gelu_tanh_and_mul"},
    ],
    ids=["plain", "clamped", "input", "all"],
)
def test_kernels_equal_every_expert(dtype: torch.dtype, way: str, num_tokens: int, ways: dict[str, Any]) -> None:
    """With and without what they are added to, for widths off the tiles and experts that nobody chose."""
    experts, x = made(dtype, **ways), random(num_tokens, HIDDEN, dtype=dtype, seed=9)
    ids, shares = choices(num_tokens), random(num_tokens, TOP_K, dtype=dtype, seed=8).abs()
    want = each(experts, x, ids, shares)
    close(WAYS[way](x, ids, shares, some_of(experts, 0, NUM), None), want)
    residual = random(num_tokens, HIDDEN, dtype=dtype, seed=7)
    close(WAYS[way](x, ids, shares, some_of(experts, 0, NUM), residual), residual + want)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_with_some_of_the_experts_add_up(way: str) -> None:
    """Each adds what its own ones make, nothing for the others."""
    experts, x = made(torch.float32), random(9, HIDDEN, dtype=torch.float32)
    ids, shares = choices(9, NUM), random(9, TOP_K, dtype=torch.float32).abs()
    parts = [WAYS[way](x, ids, shares, some_of(experts, *cut), None) for cut in ((0, 3), (3, 1), (4, 3))]
    close(sum(parts, torch.zeros_like(x)), each(experts, x, ids, shares))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_token_of_nan_hurts_no_other(way: str) -> None:
    """Nor one whose ids are no experts'."""
    experts, x = made(torch.float32), random(9, HIDDEN, dtype=torch.float32)
    ids, shares = choices(9), random(9, TOP_K, dtype=torch.float32).abs()
    want = each(experts, x, ids, shares)
    x[4], shares[4], ids[4] = float("nan"), float("nan"), NUM
    found = WAYS[way](x, ids, shares, some_of(experts, 0, NUM), None)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    close(found[others], want[others])


@pytest.mark.parametrize("num_tokens", [1, 5, 700])
def test_a_slots_place_is_stable(num_tokens: int) -> None:
    """Slots stand by expert, and in their order among those of one expert, over several blocks of them."""
    ids = torch.randint(0, NUM - 1, (num_tokens, TOP_K), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    order, bounds = sorted_slots(ids, NUM, 0)
    assert order.tolist() == ids.flatten().argsort(stable=True).tolist()
    assert bounds.tolist() == [int((ids < expert).sum()) for expert in range(NUM + 1)]


ROUTINGS = {
    "softmax": Routing(num=11, top_k=3),
    "not normalised": Routing(num=8, top_k=8, normalise=False, scale=2.5),
    "sigmoid": Routing(num=11, top_k=1, score="sigmoid", normalise=False),
    "corrected": Routing(num=12, top_k=4, score="sigmoid", correction=True, scale=1.5, is_wide=True),
    "groups": Routing(num=12, top_k=4, score="sigmoid", correction=True, groups=3, top_groups=2),
    "best group": Routing(num=20, top_k=2, groups=5, top_groups=3, group_score="best"),
    "chosen": Routing(num=11, top_k=4, score="chosen", bias=True),
}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routes_equal_the_plain_choice(dtype: torch.dtype, name: str) -> None:
    """Ids and shares, whatever the order."""
    routing = ROUTINGS[name]
    ctx = BuildContext(device=DEVICE, dtype=dtype, factory=PLAIN)
    router: Any = Router(routing, HIDDEN, ctx)
    for seed, tensor in enumerate((*router.parameters(), *router.buffers())):
        tensor.data.copy_(random(*tensor.shape, dtype=tensor.dtype, seed=seed))
    steps = torch.stack([torch.randperm(routing.num) for _ in range(9)]).to(DEVICE)
    logits = (steps / 4).to(dtype)  # no two are equal
    how = {"routing": routing, "dtype": dtype}
    want_ids, want = mixture.route(logits, router.correction, 0.5, **how)
    ids, shares = route(logits, router.correction, 0.5, **how)
    assert (ids.dtype, shares.dtype) == (torch.int64, dtype)
    order, want_order = ids.argsort(), want_ids.argsort()
    assert ids.gather(1, order).tolist() == want_ids.gather(1, want_order).tolist()
    close(shares.gather(1, order), want.gather(1, want_order))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logits_that_are_no_numbers_choose_experts_that_exist() -> None:
    """Whatever comes in, nobody reads beyond the last expert; of equals, the first are chosen."""
    routing = Routing(num=11, top_k=3)
    logits = torch.zeros(3, 11, device=DEVICE)
    logits[0], logits[1, 4] = float("nan"), float("nan")
    ids, _ = route(logits, None, 1.0, routing=routing, dtype=torch.float32)
    assert bool(((ids >= 0) & (ids < 11)).all())
    assert ids[2].tolist() == [0, 1, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 600, 3000])
def test_experts_on_the_device_equal_plain_ones(num_tokens: int) -> None:
    """Whichever way they take by the number of tokens."""
    experts, x = made(torch.bfloat16, kernels=True), random(num_tokens, HIDDEN, dtype=torch.bfloat16)
    ids, shares = choices(num_tokens), random(num_tokens, TOP_K, dtype=torch.bfloat16).abs()
    want = each(experts, x, ids, shares)
    close(experts(x, ids, shares), want)
    close(experts(x, ids, shares, add=Stream(x.clone())).total(), x + want)
