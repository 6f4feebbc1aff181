"""Experts and routers: the quick way equals the plain one, and choices are as they are written."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.contracts.layers import BuildContext, ExpertsSpec, Parallel, Stream
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.experts import GatedExperts
from dovetail.sdk.layers.moe import MixtureOfExperts, Router
from dovetail.sdk.layers.ops.mixture import each_expert
from dovetail.sdk.layers.ops.reference import act_and_mul, linear
from dovetail.sdk.layers.plain import PLAIN
from dovetail.sdk.layers.routing import Routing

CONTEXT = BuildContext(device=torch.device("cpu"), dtype=torch.float32, factory=PLAIN)


def filled(module: Any) -> Any:
    """Random weights."""
    generator = torch.Generator().manual_seed(0)
    for param in (*module.parameters(), *module.buffers()):
        param.data.normal_(generator=generator)
    return module


def spec(num: int, top_k: int, **more: Any) -> ExpertsSpec:
    """Experts of 20 inputs and 12 between."""
    return ExpertsSpec(path="x", num=num, top_k=top_k, hidden=20, inner=12, act="silu_and_mul", **more)


def each(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """What plain experts make of tokens, one expert after the other."""
    up, down, place = experts.gate_up, experts.down, dict(experts._place)
    how = {name: place[name] for name in ("act", "weigh", "first")}
    kernel = each_expert(partial(act_and_mul, act=place["act"]), linear, linear, **how, total=up.num_experts)
    return kernel(x, ids, shares, up.weight, up.bias, down.weight, down.bias, None)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weigh", ["input", "output"])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 70])
def test_sorted_rows_give_what_every_expert_gives(bias: bool, weigh: Any, num_tokens: int) -> None:
    """For few tokens and many, experts that nobody chose among them."""
    experts = filled(GatedExperts(CONTEXT, spec(7, 3, bias=bias, weigh=weigh)))
    x = torch.randn(num_tokens, 20)
    ids = torch.stack([torch.randperm(6)[:3] for _ in range(num_tokens)]) if num_tokens else torch.zeros(0, 3).long()
    weights = torch.rand(num_tokens, 3)
    one_by_one = each(experts, x, ids, weights)
    near = {"rtol": 1e-5, "atol": 1e-6 * float(one_by_one.abs().max()) if num_tokens else 0.0}  # sums of other orders
    torch.testing.assert_close(experts(x, ids, weights), one_by_one, **near)
    added: Stream = experts(x, ids, weights, add=Stream(x.clone()))
    torch.testing.assert_close(added.total(), x + one_by_one, **near)


def test_ranks_that_divide_experts_add_up_to_one() -> None:
    """Each has some of them, whole; to a stream, too, each adds its share."""
    asked = spec(6, 2, bias=True, shard="expert")
    whole = filled(GatedExperts(CONTEXT, asked))
    x, ids, weights = torch.randn(5, 20), torch.stack([torch.randperm(6)[:2] for _ in range(5)]), torch.rand(5, 2)
    shares = []
    for rank in range(3):
        parallel = Parallel(rank=rank, size=3, all_reduce=lambda share: share)
        ctx = BuildContext(device=CONTEXT.device, dtype=torch.float32, factory=PLAIN, parallel=parallel)
        mine: Any = GatedExperts(ctx, asked)
        for name, param in mine.named_parameters():
            param.data.copy_(whole.get_parameter(name)[2 * rank : 2 * rank + 2])
        shares.append(mine(x, ids, weights))
        torch.testing.assert_close(mine(x, ids, weights, add=Stream(x.clone())).total(), x + shares[-1])
    torch.testing.assert_close(sum(shares), whole(x, ids, weights), rtol=1e-4, atol=1e-3)  # numbers are in the hundreds


@pytest.mark.parametrize("has_gate", [False, True])
def test_shared_experts_give_the_same_with_a_stream_and_without(has_gate: bool) -> None:
    """What every token goes through is added to what its chosen experts give, once."""
    given = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 20, "intermediate_size": 12}
    given |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    routing = Routing(num=6, top_k=2, normalise=True)
    moe = filled(MixtureOfExperts(dense_config(given), CONTEXT, routing, 12, shared_inner=16, has_shared_gate=has_gate))
    x = torch.randn(5, 20)
    chosen = moe.experts(x, *moe.router(x))
    shared = moe.shared(x) * (moe.shared_gate(x) if has_gate else 1)
    near = {"rtol": 1e-4, "atol": 1e-5 * float((chosen + shared).abs().max())}
    torch.testing.assert_close(moe(x), chosen + shared, **near)
    torch.testing.assert_close(moe(x, add=Stream(x.clone())).total(), x + chosen + shared, **near)


def chosen(routing: Routing, logits: Tensor, correction: Tensor | None = None) -> dict[int, float]:
    """Experts and shares of one token whose logits are these."""
    router: Any = Router(routing, len(logits), CONTEXT)
    router.weight.data.copy_(torch.diag(logits))
    if router.bias is not None:
        router.bias.data.zero_()
    if router.correction is not None:
        router.correction.data.copy_(correction)
    ids, shares = router(torch.ones(1, len(logits)))
    return {int(i): round(float(share), 4) for i, share in zip(ids[0], shares[0], strict=True)}


def test_routers_choose_as_they_say() -> None:
    """Softmax over all and over the chosen, sigmoid, a correction that chooses and does not weigh, groups."""
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0, 0.5])
    all_of, best_two = logits.softmax(-1), torch.tensor([2.0, 3.0]).softmax(-1)
    plain = {2: round(float(all_of[2]), 4), 3: round(float(all_of[3]), 4)}
    halves = {2: round(float(best_two[0]), 4), 3: round(float(best_two[1]), 4)}
    assert chosen(Routing(num=6, top_k=2, normalise=False), logits) == plain
    assert chosen(Routing(num=6, top_k=2), logits) == halves
    assert chosen(Routing(num=6, top_k=2, score="chosen", bias=True), logits) == halves
    sigmoid = Routing(num=6, top_k=2, score="sigmoid", normalise=False, scale=2.5, correction=True, is_wide=True)
    lift = torch.tensor([9.0, 0, 0, 0, 0, 0])
    assert chosen(sigmoid, logits, lift) == {0: 1.25, 3: round(2.5 * float(torch.tensor(3.0).sigmoid()), 4)}
    by_best = Routing(num=6, top_k=2, groups=3, top_groups=1, group_score="best", normalise=False)
    assert set(chosen(by_best, torch.tensor([2.0, 2.0, 0.0, 3.0, 1.0, 1.0]))) == {2, 3}
    by_two = Routing(num=6, top_k=2, groups=3, top_groups=1, normalise=False)
    assert set(chosen(by_two, torch.tensor([2.5, 2.5, -9.0, 3.0, 1.0, 1.0]))) == {0, 1}
