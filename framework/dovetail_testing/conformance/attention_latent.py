"""What a backend must do that serves prefill chunks of latent layers by keys and values of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionBackend, Phase
from dovetail_testing.checks import check, fail, raised
from dovetail_testing.conformance.attention_reference import error_by_token
from dovetail_testing.conformance.attention_world import TOLERANCE, Case, World, make_backend, make_world

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
    try:
        backend.plan(batch, Phase.EAGER)
        backend.plan_in_graph(batch)
        backend.write_kv(world.layer, world.k, world.v, batch)
        memory = world.pool.memory.clone()
        serves = backend.forward_extend_latent(q, heads, world.layer, batch, out)
    except Exception as error:  # a stranger's backend; the message says what it did
        fail(f"forward_extend_latent raised {raised(error)} ({case})")
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
