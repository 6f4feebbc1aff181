"""A few tokens through router and packed experts at real sizes on CUDA: started early or not, recorded or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.contracts.layers import RMSScale
from dovetail.sdk.layers.ops import reference
from dovetail.sdk.layers.routing import Routing
from dovetail.sdk.quantization.forms import Mxfp4
from dovetail_backends.kernels.triton import pdl
from dovetail_backends.kernels.triton.packed_integers import Words
from dovetail_backends.kernels.triton.packed_slots import PackedExpertWeights, of_slots, slot_tiles
from dovetail_backends.kernels.triton.packed_weight import stacked, weight_of
from dovetail_backends.kernels.triton.router import routed

pytestmark = pytest.mark.gpu
EPS, HIDDEN, NUM, TOP_K, LAYERS, REPLAYS = 1e-5, 2880, 32, 4, 3, 40
ROUTING = Routing(num=NUM, top_k=TOP_K, score="chosen", bias=True)


def random(*shape: int) -> Tensor:
    """Random numbers in bfloat16."""
    return torch.randn(*shape, device="cuda").bfloat16()


class Layer:
    """Norm, router and experts of one layer of gpt-oss, or of one of two ranks."""

    def __init__(self, inner: int) -> None:
        self.norm, self.router, self.bias = RMSScale(random(HIDDEN), EPS), random(NUM, HIDDEN), random(NUM)
        form, halves = Mxfp4(), []
        for n, k in ((2 * inner, HIDDEN), (HIDDEN, inner)):
            made = [form.quantise(torch.randn(n, k, device="cuda") * 0.02) for _ in range(NUM)]
            packed = [weight_of(form, one, torch.bfloat16) for one in made]
            halves.append(stacked(packed))
        biases = random(NUM, 2 * inner), random(NUM, HIDDEN)
        self.experts = PackedExpertWeights(halves[0], halves[1], *biases, 0, "clamped_silu_and_mul", False)

    def __call__(self, x: Tensor, *, is_apart: bool = False) -> Tensor:
        """The stream behind the layer; apart, by the normed rows, of which a kernel of its own makes integers."""
        words = None if is_apart else Words("mxfp4", True)
        found: Any = routed(x, self.norm, self.router, self.bias, None, ROUTING, scale=1.0, words=words)
        rows, given = (found.rows, None) if is_apart else (x, found.rows)
        tiles = slot_tiles(self.experts, found.ids.numel())
        return of_slots(rows, found.ids, found.shares, self.experts, x, tiles, given=given)


@pytest.mark.parametrize("num", [32, 128])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_choices_are_those_of_the_steps(num: int, tokens: int) -> None:
    """Each chosen logit is among the best, but for what rounding moves; shares and normed tokens are the steps'."""
    torch.manual_seed(0)
    routing = Routing(num=num, top_k=TOP_K, score="chosen", bias=True)
    norm, weight, bias, x = random(HIDDEN), random(num, HIDDEN) / 50, random(num), random(tokens, HIDDEN)
    found: Any = routed(x, RMSScale(norm, EPS), weight, bias, None, routing, scale=1.0)
    rows = reference.rms_norm(x.float(), norm.float(), EPS)
    logits = rows @ weight.float().t() + bias.float()
    best = logits.topk(TOP_K).values[:, -1:]
    mine = logits.gather(1, found.ids)
    assert (mine >= best - 0.05).all()
    assert all(len(set(row)) == TOP_K for row in found.ids.tolist())
    torch.testing.assert_close(found.shares.float(), mine.softmax(-1), atol=0.02, rtol=0.02)
    torch.testing.assert_close(found.rows.float(), rows, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("inner", [1440, 2880])
def test_layers_started_early_have_the_bits_of_those_that_are_not(inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers in a row for 1, 3 and 8 tokens, recorded in a graph and replayed with other tokens each time."""
    torch.manual_seed(0)
    layers = [Layer(inner) for _ in range(LAYERS)]

    def through(x: Tensor, *, is_apart: bool = False) -> Tensor:
        for layer in layers:
            x = layer(x, is_apart=is_apart)
        return x

    for tokens in (1, 3, 8):
        given = [random(tokens, HIDDEN) for _ in range(REPLAYS)]
        with monkeypatch.context() as patch:
            patch.setattr(pdl, "supported", lambda _: False)
            want = [through(x) for x in given]
        x = given[0].clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            through(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = through(x)
        for one, right in zip(given, want, strict=True):
            x.copy_(one)
            graph.replay()
            assert torch.equal(out, right)
        apart = through(given[0], is_apart=True)
        assert (apart - want[0]).float().norm() < 0.01 * want[0].float().norm()
