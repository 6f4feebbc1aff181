"""What a backend must do that serves decode rows straight from the projection."""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionBackend, Phase
from dovetail.sdk.cache import DTYPES, rounded
from dovetail.sdk.layers.ops import reference
from dovetail_testing.checks import check, no_error
from dovetail_testing.conformance.attention_reference import error_by_token
from dovetail_testing.conformance.attention_world import TOLERANCE, Case, World, compare, make_backend, make_world

EPS = 1e-5
ROUNDING = 0.05
"""Relative error of keys and values in 8 bits, at most."""


def verify_qkv(backend_class: type[AttentionBackend], case: Case, device: torch.device, *, normed: bool) -> bool:
    """Compare `forward_decode_qkv` with the single steps in float64; without norm, the last row pads its batch.

    Returns:
        Whether the backend serves at all.
    """
    world = make_world(case, device)
    backend = make_backend(backend_class, world)
    batch, heads = world.batch, case.num_qo_heads + case.num_kv_heads
    batch.attention = backend
    if not normed:
        batch.kv_slots[-1] = -1
    rng = torch.Generator().manual_seed(5)
    weight, (cos, sin) = _random(rng, world, heads), (_random(rng, world, batch.num_tokens)[:, None] for _ in "cs")
    qkv = torch.cat((world.q, world.k, world.v), dim=1)
    before, given = [memory.clone() for memory in world.pool.everything], qkv.clone()
    out = torch.full_like(world.q, float("nan"))
    with no_error("forward_decode_qkv", f" ({case})"):
        backend.plan(batch, Phase.EAGER)
        backend.plan_in_graph(batch)
        norm = (weight, EPS) if normed else None
        if not backend.forward_decode_qkv(qkv, norm, (cos, sin), world.layer, batch, out):
            check(bool(out.isnan().all()), "forward_decode_qkv declines but has written to `out`")
            return False
    check(torch.equal(qkv, given), "forward_decode_qkv changes qkv, which it must only read")
    qk = reference.norm_rotate(qkv[:, :heads], weight if normed else None, EPS, cos, sin)
    q, k = qk[:, : case.num_qo_heads], qk[:, case.num_qo_heads :]
    kept = k if case.cache_dtype is None else rounded(k, DTYPES[case.cache_dtype])
    world.parts = [
        (q[i : i + 1], torch.cat((keys[:-1], kept[i : i + 1])), values)
        for i, (_, keys, values) in enumerate(world.parts)
    ]
    compare(world, out, backend_class, "forward_decode_qkv")
    _check_pool(world, before, k)
    return True


def _check_pool(world: World, before: list[Tensor], k: Tensor) -> None:
    """The new keys and values stand in their slots, a padding row's nowhere, and nothing else has changed."""
    case, live = world.case, world.batch.kv_slots >= 0
    slots, size, index = world.batch.kv_slots[live], case.page_size, world.layer.index
    for name, new in (("k", k[live]), ("v", world.v[live])):
        found = world.pool.tensor(index, name)[slots // size, slots % size].double()
        off = TOLERANCE[case.dtype]
        if case.cache_dtype is not None:
            found *= world.pool.tensor(index, f"{name}_scale")[slots // size, slots % size].double()[..., None]
            off += ROUNDING
        wrong = (found - new.double()).norm() > off * new.double().norm()
        check(not bool(wrong), f"forward_decode_qkv writes wrong keys and values to the pool ({case})")
    for memory, now in zip(before, world.pool.everything, strict=True):
        at = (
            (index, slots // size, slice(None), slots % size) if now.ndim == 6 else (index, slots // size, slots % size)
        )
        kept, found = memory.view(torch.uint8), now.view(torch.uint8)
        kept[at] = found[at]
        check(torch.equal(kept, found), f"forward_decode_qkv writes where it has no slot ({case})")


def _random(rng: torch.Generator, world: World, num: int) -> Tensor:
    return torch.randn(num, world.case.head_dim, generator=rng).to(world.device, world.case.dtype)


# What a backend must do that serves prefill chunks of latent layers by keys and values of heads.

MADE, VALUE = 24, 20
"""Widths of a head's key and value that are made of a row."""


def verify_latent_heads(
    backend_class: type[AttentionBackend], case: Case, device: torch.device, made: int = MADE, value: int = VALUE
) -> bool:
    """Compare `forward_extend_latent` with attention written out in float64.

    Returns:
        Whether the backend serves at all.
    """
    world = make_world(case, device)
    backend = make_backend(backend_class, world)
    batch, rank = world.batch, case.value_dim
    batch.attention = backend
    rng = torch.Generator().manual_seed(7)
    heads = torch.randn(case.num_qo_heads, made + value, rank, generator=rng).to(device, case.dtype) * rank**-0.5
    first = batch.num_decode
    num = sum(batch.q_lens_cpu[first:])
    q = torch.randn(num, case.num_qo_heads, made + case.head_dim - rank, generator=rng).to(device, case.dtype)
    out = q.new_full((num, case.num_qo_heads, value), float("nan"))
    given = q.clone(), heads.clone()
    with no_error("forward_extend_latent", f" ({case})"):
        backend.plan(batch, Phase.EAGER)
        backend.plan_in_graph(batch)
        backend.write_kv(world.layer, world.k, world.v, batch)
        memory = world.pool.memory.clone()
        serves = backend.forward_extend_latent(q, heads, world.layer, batch, out)
    if not serves:
        check(bool(out.isnan().all()), "forward_extend_latent declines but has written to `out`")
        return False
    for name, before, after in (("q", given[0], q), ("heads", given[1], heads), ("the KV pool", memory, None)):
        after = world.pool.memory if after is None else after
        same = torch.equal(before.nan_to_num(nan=-9.0), after.nan_to_num(nan=-9.0))
        check(same, f"forward_extend_latent changes {name}, which it must only read")
    worst = float(error_by_token(out, _want(world, q, heads, value)).max())
    check(worst <= TOLERANCE[case.dtype], f"forward_extend_latent: wrong result: relative error {worst:.2g} ({case})")
    return True


def _want(world: World, q: Tensor, heads: Tensor, value: int) -> Tensor:
    """What heads find, `[T', Hq, V]`, in float64."""
    case, start, found = world.case, 0, []
    for (cached, new), (_, rows, _) in list(zip(case.lengths, world.parts, strict=True))[world.batch.num_decode :]:
        row = rows[:, 0].double()
        both = torch.einsum("lr,hwr->hlw", row[:, : case.value_dim], heads.double())
        rest = row[:, case.value_dim :].expand(case.num_qo_heads, -1, -1)
        keys = torch.cat((both[..., : heads.shape[1] - value], rest), dim=-1)
        scores = q[start : start + new].double().transpose(0, 1) @ keys.transpose(1, 2) * world.layer.scale
        unseen = torch.ones(new, cached + new, dtype=torch.bool, device=q.device).triu(cached + 1)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        found.append((weights @ both[..., heads.shape[1] - value :]).transpose(0, 1))
        start += new
    return torch.cat(found)
