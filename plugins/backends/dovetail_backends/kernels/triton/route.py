"""The choice of experts in Triton: one program for each token makes of its logits ids and shares.

Of equal scores, the expert of the lower number is chosen.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.sdk.layers.routing import Routing
from dovetail_backends.kernels.triton.pdl import launch_options

NONE: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def _first_best(values, numbers, size: tl.constexpr):
    """The number of the largest value; of several, the lowest."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, numbers, size), 0)


@triton.jit
def choose(
    logits, correction, ids, shares, scale, token,
    E: tl.constexpr, TOP_K: tl.constexpr, SCORE: tl.constexpr, NORMALISE: tl.constexpr, LEAST: tl.constexpr,
    CORRECTION: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr,
    G_BLOCK: tl.constexpr, E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Choose a token's experts; `token` is of 64 bits, and CACHE says how logits are loaded."""
    group = tl.arange(0, G_BLOCK)[:, None]
    member = tl.arange(0, E_BLOCK)[None, :]
    size: tl.constexpr = E // GROUPS
    number = group * size + member
    inside = (group < GROUPS) & (member < size)
    score = tl.load(logits + token * E + number, mask=inside, other=NONE, cache_modifier=CACHE).to(tl.float32)
    if SCORE == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-score))
    if SCORE == "softmax":
        raised = tl.exp(score - tl.max(tl.max(score, 1), 0))
        score = raised / tl.sum(tl.sum(raised, 1), 0)
    choice = score
    if CORRECTION:
        choice += tl.load(correction + number, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(inside, choice, NONE)
    if GROUPS > 1:
        of_group = tl.max(choice, 1)
        if BEST_TWO:
            best = tl.min(tl.where(choice == of_group[:, None], member, E_BLOCK), 1)
            of_group += tl.max(tl.where(member == best[:, None], NONE, choice), 1)
        groups = tl.arange(0, G_BLOCK)
        stays = groups < 0
        for _ in tl.static_range(TOP_GROUPS):
            value, found = _first_best(of_group, groups, G_BLOCK)
            stays = stays | (groups == found)
            of_group = tl.where(groups == found, NONE, of_group)
        choice = tl.where(stays[:, None], choice, NONE)
    lane = tl.arange(0, K_BLOCK)
    chosen = tl.zeros([K_BLOCK], tl.int32)
    share = tl.full([K_BLOCK], NONE, tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.max(tl.max(choice, 1), 0)
        found = tl.min(tl.min(tl.where((choice == best) & inside, number, E), 1), 0)
        is_found = number == found
        value = tl.where(found < E, best, NONE)
        if CORRECTION:
            value = tl.max(tl.max(tl.where(is_found & inside, score, NONE), 1), 0)
        chosen = tl.where(lane == place, tl.minimum(found, E - 1), chosen)  # NaN equals nothing: `found` is E then
        share = tl.where(lane == place, value, share)
        choice = tl.where(is_found, NONE, choice)
    if SCORE == "chosen":
        share = tl.exp(share - tl.max(share, 0))
        share = (share / tl.sum(share, 0)).to(logits.dtype.element_ty).to(tl.float32)
    elif NORMALISE:
        share = share / (tl.sum(tl.where(lane < TOP_K, share, 0.0), 0) + LEAST)
    at = token * TOP_K + lane
    tl.store(ids + at, chosen.to(tl.int64), mask=lane < TOP_K)
    tl.store(shares + at, (share * scale).to(shares.dtype.element_ty), mask=lane < TOP_K)


@triton.jit
def _route_kernel(
    logits, correction, ids, shares, scale,
    E: tl.constexpr, TOP_K: tl.constexpr, SCORE: tl.constexpr, NORMALISE: tl.constexpr, LEAST: tl.constexpr,
    CORRECTION: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr,
    G_BLOCK: tl.constexpr, E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    choose(
        logits, correction, ids, shares, scale, tl.program_id(0).to(tl.int64),
        E, TOP_K, SCORE, NORMALISE, LEAST, CORRECTION, GROUPS, TOP_GROUPS, BEST_TWO, G_BLOCK, E_BLOCK, K_BLOCK, "",
    )  # fmt: skip


def routing_options(routing: Routing, correction: Tensor | None) -> dict[str, Any]:
    """Constants of `choose`."""
    return {
        "E": routing.num, "TOP_K": routing.top_k, "SCORE": routing.score, "NORMALISE": routing.normalise,
        "LEAST": routing.least, "CORRECTION": correction is not None, "GROUPS": routing.groups,
        "TOP_GROUPS": routing.top_groups, "BEST_TWO": routing.group_score == "best_two",
        "G_BLOCK": triton.next_power_of_2(routing.groups),
        "E_BLOCK": triton.next_power_of_2(routing.num // routing.groups),
        "K_BLOCK": triton.next_power_of_2(routing.top_k),
    }  # fmt: skip


def room_for_choice(
    routing: Routing, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return ids and shares to be filled."""
    shape = num_tokens, routing.top_k
    return torch.empty(shape, dtype=torch.int64, device=device), torch.empty(shape, dtype=dtype, device=device)


def route(
    logits: Tensor, correction: Tensor | None, scale: float, *, routing: Routing, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `mixture.route`; `correction` `[E]` float32 or None."""
    ids, shares = room_for_choice(routing, len(logits), dtype, logits.device)
    logits = logits.contiguous()
    if len(logits):
        _route_kernel[(len(logits),)](
            logits, logits if correction is None else correction, ids, shares, routing.scale * scale,
            **routing_options(routing, correction), num_warps=1, **launch_options(logits),
        )  # fmt: skip
    return ids, shares
