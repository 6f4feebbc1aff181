"""Kimi Delta Attention in pieces, in torch and in Triton's interpreter, against its definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.contracts.kernels import make_ask, meaning
from dovetail.runtime.device.devices import device_of
from dovetail_testing.conformance.kernels_mixers import MixerRequests, Weights, split_at

CPU = torch.device("cpu")
HEADS, DIM, WIDTH = 2, 20, 16
NAMES = ("x", "b", "f", "a_log", "dt_bias", "rows", "starts", "pieces", "table", "saves", "state", "copies")
DECAYS = ("trained", "none", "huge", "one number and token of many")


def kernel(which: str, bound: float = 0.0) -> Any:
    """The operation at these widths, in torch or in Triton."""
    ask = make_ask("kda_prefill", device_of(CPU).view, "float32", {"G": HEADS, "D": DIM, "W": WIDTH}, {"bound": bound})
    if which == "torch":
        return meaning(ask)
    pytest.importorskip("triton")
    from dovetail_backends.kernels.triton import TritonKernels

    return TritonKernels().make(ask)


def operands(num: int, decays: str, requests: MixerRequests) -> list[Any]:
    """Tokens whose keys resemble one another, and decays of a kind."""
    generator = torch.Generator().manual_seed(num)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    channels = HEADS * (2 * DIM + WIDTH)
    x, f = draw(1, channels) + 0.3 * draw(num, channels), draw(num, HEADS, DIM)
    if decays == "none":
        f -= 90
    elif decays == "huge":
        f += 400
    elif decays.startswith("one"):  # behind it, a difference of sums would have no digit of what decays little
        f[num // 3 :: 29, :, 3] += 9000
    numbers = [Weights.draw(size, generator, CPU) for size in (HEADS, HEADS * DIM)]
    states = [draw(size, HEADS, DIM, WIDTH) for size in (len(requests.rows) + 2, requests.num_copies)]
    return [x, draw(num, HEADS), f, numbers[0].a_log, numbers[1].dt_bias, *requests.plan(), *states]


def by_definition(given: dict[str, Any], own: slice, state: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Fold a request's tokens one by one: what they read `[n, G, W]`, and the state."""
    x, b, f = (given[name][own].double() for name in "xbf")
    q, k, v = x.split([HEADS * DIM, HEADS * DIM, HEADS * WIDTH], 1)
    q, k = (one.view(-1, HEADS, DIM) for one in (q, k))
    q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
    steps, factor = f + given["dt_bias"].double().view(HEADS, DIM), given["a_log"].double().exp()[:, None]
    decay = bound * (factor * steps).sigmoid() if bound else -factor * torch.nn.functional.softplus(steps)
    decay, state, reads = decay.exp(), state.double(), []
    for at, value in enumerate(v.view(-1, HEADS, WIDTH)):
        state = state * decay[at, :, :, None]
        change = b[at].sigmoid()[:, None] * (value - torch.einsum("gd,gdw->gw", k[at], state))
        state = state + k[at, :, :, None] * change[:, None]
        reads.append(torch.einsum("gd,gdw->gw", q[at] * DIM**-0.5, state))
    return torch.stack(reads), state


def error(found: Tensor, want: Tensor) -> float:
    """Relative, of the whole."""
    return float((found.double() - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("which", "decays", "bound"),
    [*(("torch", decays, 0.0) for decays in DECAYS), ("torch", "trained", -5.0), ("triton", DECAYS[-1], 0.0),
     *(pytest.param("triton", decays, 0.0, marks=pytest.mark.full) for decays in DECAYS[:-1]),
     pytest.param("triton", DECAYS[-1], -5.0, marks=pytest.mark.full)],
)  # fmt: skip
def test_pieces_are_folded_as_defined(which: str, decays: str, bound: float) -> None:
    """Two requests, one begun within a piece: what tokens read, states, and the copy behind a piece."""
    requests = MixerRequests([70, 30], [0, 50], CPU, 4)
    given = operands(100, decays, requests)
    by_name, before = dict(zip(NAMES, given, strict=True)), given[-2].clone()
    found = kernel(which, bound)(*given)
    for own, row in ((slice(0, 70), 3), (slice(70, 100), 2)):
        read, state = by_definition(by_name, own, before[row], bound)
        assert error(found[own], read) < 1e-5
        assert error(by_name["state"][row], state) < 1e-5
    assert requests.saves.tolist()[:2] == [1, -1]
    assert error(by_name["copies"][1], by_definition(by_name, slice(0, 64), before[3], bound)[1]) < 1e-5
    assert torch.equal(by_name["state"][:2], before[:2])


@pytest.mark.parametrize("cuts", [(64, 128, 150), (128, 129)], ids=str)
def test_a_cut_changes_no_bit(cuts: tuple[int, ...]) -> None:
    """In torch, as with a kernel, which the kit tries: what tokens read, and the state."""
    fold = kernel("torch")
    whole = operands(cuts[-1], "trained", MixerRequests([cuts[-1]], [0], CPU, 3))
    parts = [one.clone() if isinstance(one, Tensor) else one for one in whole]
    at_once = fold(*whole)
    found = torch.cat([fold(*own) for own in split_at(NAMES, parts, cuts, CPU)])
    assert torch.equal(found, at_once)
    assert torch.equal(parts[-2], whole[-2])
