"""The attention backends against attention written out in float64; Triton runs in its interpreter on CPU."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.cache.pool import KVCache
from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, Phase
from dovetail.contracts.config import ModelConfig, RopeConfig, dense_layers
from dovetail_backends.torch_native import TorchNativeBackend
from dovetail_backends.triton import TritonBackend
from dovetail_testing.conformance.attention_qkv import verify_qkv
from dovetail_testing.conformance.attention_world import Case

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def naive(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None) -> Tensor:
    """One request's new queries `[n, Hq, D]` over all keys `[L, Hk, D]`, one query and head at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    offset, group = k.shape[0] - q.shape[0], q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        last = offset + i
        first = 0 if window is None else max(0, last - window + 1)
        for h in range(q.shape[1]):
            keys, values = k[first : last + 1, h // group].double(), v[first : last + 1, h // group].double()
            scores = keys @ q[i, h].double() * scale
            if sinks is not None:
                weights = torch.cat((scores, sinks[h : h + 1].double())).softmax(0)[:-1]
            else:
                weights = scores.softmax(0)
            out[i, h] = weights @ values
    return out


GRID = [
    # page size, query heads, KV heads, head dim, window, sinks, [(cached, new)], decode rows first
    (16, 4, 2, 64, None, False, [(0, 33)]),
    (3, 4, 4, 16, None, False, [(7, 1), (20, 1), (1, 1)]),
    (1, 6, 2, 8, None, False, [(5, 1), (0, 9), (13, 4)]),
    (16, 14, 2, 64, None, False, [(31, 1), (100, 1), (16, 16), (0, 1)]),
    (4, 4, 2, 32, 5, False, [(30, 1), (2, 1), (0, 20), (11, 7)]),
    (3, 8, 2, 16, None, True, [(30, 1), (2, 1), (0, 20), (11, 7)]),
    (5, 4, 1, 16, 6, True, [(17, 1), (0, 12)]),
]


@pytest.mark.parametrize("backend_class", [TorchNativeBackend, TritonBackend])
@pytest.mark.parametrize("case", GRID, ids=lambda case: f"page{case[0]}-{case[6]}")
def test_attention_equals_float64(
    case: tuple[int, int, int, int, int | None, bool, list[tuple[int, int]]], backend_class: type[AttentionBackend]
) -> None:
    """Decode rows, prefill with and without prefix, and mixes agree with float64 within float32's rounding."""
    page, hq, hk, d, window, with_sinks, lengths = case
    rng, torch_rng = random.Random(1), torch.Generator().manual_seed(1)
    config = ModelConfig(
        architecture="Test", vocab_size=1, hidden_size=1, intermediate_size=1,
        num_layers=1, layers=dense_layers(1, num_qo_heads=hq, num_kv_heads=hk, head_dim=d),
        norm_eps=1e-6, hidden_act="silu", max_position_embeddings=1, tie_word_embeddings=False, rope=RopeConfig(),
        dtype="float32",
    )  # fmt: skip
    pool = KVCache(config.cache_groups, [80 if page > 2 else 200], page, torch.float32, DEVICE)
    backend = backend_class(config, pool, DEVICE)
    sinks = torch.randn(hq, generator=torch_rng).to(DEVICE) if with_sinks else None
    layer = AttentionLayer(
        index=0,
        num_qo_heads=hq,
        num_kv_heads=hk,
        qk_dim=d,
        v_dim=d,
        scale=1 / math.sqrt(d),
        sliding_window=window,
        sinks=sinks,
    )
    free = list(range(1, pool.num_pages))
    rng.shuffle(free)
    table = torch.zeros(len(lengths) + 2, 64 if page > 2 else 190, dtype=torch.int32)
    rows = list(range(len(lengths) + 2))
    rng.shuffle(rows)
    keys, values, queries, slots = [], [], [], []
    for (cached, new), row in zip(lengths, rows, strict=False):
        num = cached + new
        pages = [free.pop() for _ in range(-(-num // page))]
        table[row, : len(pages)] = torch.tensor(pages)
        k, v = torch.randn(2, num, hk, d, generator=torch_rng)
        places = [pages[i // page] * page + i % page for i in range(num)]
        flat = pool.layer(0)
        for i in range(cached):
            flat[places[i] // page, 0, places[i] % page], flat[places[i] // page, 1, places[i] % page] = k[i], v[i]
        keys.append(k), values.append(v), slots.extend(places[cached:])
        queries.append(torch.randn(new, hq, d, generator=torch_rng))
    news = [new for _, new in lengths]
    num_decode = next((i for i, (cached, new) in enumerate(lengths) if new > 1 or cached == 0), len(lengths))
    starts = torch.tensor([0, *news]).cumsum(0).int()
    batch = ForwardBatch(
        num_decode=num_decode,
        positions=(torch.cat([torch.arange(c, c + n) for c, n in lengths])).to(DEVICE),
        kv_slots=(torch.tensor(slots)).to(DEVICE),
        rows=(torch.tensor(rows[: len(lengths)])).to(DEVICE),
        page_table=table.to(DEVICE),
        seq_lens=(torch.tensor([c + n for c, n in lengths])).to(DEVICE),
        q_starts=starts.to(DEVICE),
        seq_lens_cpu=[c + n for c, n in lengths],
        q_lens_cpu=news,
        attention=backend,
        last_tokens=(starts[1:] - 1).long().to(DEVICE),
    )
    new_k = torch.cat([k[c:] for k, (c, _) in zip(keys, lengths, strict=True)]).to(DEVICE)
    new_v = torch.cat([v[c:] for v, (c, _) in zip(values, lengths, strict=True)]).to(DEVICE)
    q = torch.cat(queries).to(DEVICE)
    out = torch.full(q.shape, float("nan"), device=DEVICE)
    backend.plan(batch, Phase.EAGER)
    backend.write_kv(layer, new_k, new_v, batch)
    if num_decode == len(lengths):
        backend.forward_decode(q, new_k, new_v, layer, batch, out)
    elif num_decode:
        backend.forward_mixed(q, new_k, new_v, layer, batch, out)
    else:
        backend.forward_extend(q, new_k, new_v, layer, batch, out)
    want = torch.cat(
        [
            naive(*x, layer.scale, layer.sliding_window, None if sinks is None else sinks.cpu())
            for x in zip(queries, keys, values, strict=True)
        ]
    )
    error = (out.cpu().double() - want).norm() / want.norm()
    assert error < 1e-6


@pytest.mark.sampled
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        ([(70, 1), (0, 1), (1, 1), (200, 1)], {}),
        ([(3, 1), (64, 1), (129, 1)], {"head_dim": 80, "num_qo_heads": 6, "num_kv_heads": 2, "page_size": 1}),
        ([(150, 1), (63, 1)], {"num_qo_heads": 7, "num_kv_heads": 1, "sinks": True, "page_size": 64}),
        ([(150, 1), (2, 1), (65, 1)], {"window": 20, "head_dim": 96, "page_size": 3}),
        ([(150, 1), (2, 1), (65, 1)], {"window": 20, "head_dim": 40, "page_size": 3}),
        ([(3, 1), (64, 1), (129, 1)], {"head_dim": 200, "num_qo_heads": 6, "num_kv_heads": 2}),
        ([(3, 1), (64, 1)], {"head_dim": 8, "num_kv_heads": 2}),
        ([(65, 1)], {"window": 1}),
    ],
    ids=str,
)
def test_decode_from_the_projection(lengths: list[tuple[int, int]], changes: dict[str, Any], normed: bool) -> None:
    """One kernel for norm, rotation, write and attention equals the single steps; padding rows write nothing."""
    case = Case(lengths=lengths, **changes)
    assert verify_qkv(TritonBackend, case, DEVICE, normed=normed)


def test_a_backend_says_why_it_cannot_serve() -> None:
    """Device, dtype and page size outside the capabilities give a sentence, not a crash."""
    config = ModelConfig(
        architecture="Test", vocab_size=1, hidden_size=1, intermediate_size=1, num_layers=1,
        layers=dense_layers(1, num_qo_heads=1, num_kv_heads=1, head_dim=8),
        norm_eps=1e-6, hidden_act="silu", max_position_embeddings=1, tie_word_embeddings=False, rope=RopeConfig(),
        dtype="float32",
    )  # fmt: skip
    assert TorchNativeBackend.why_not(config, CPU, torch.bfloat16, 16) is None
    assert "float64 is not supported" in (TorchNativeBackend.why_not(config, CPU, torch.float64, 16) or "")
    assert TorchNativeBackend.why_not(config, torch.device("meta"), torch.float32, 16) is None  # whatever torch has
    assert "device 'cpu' is not supported; it runs on cuda" in (
        TritonBackend.why_not(config, CPU, torch.float32, 16) or ""
    )
