"""On CPU, what a token gets does not depend on what it is computed with, to the last bit."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.cache.pool import KVCache
from dovetail.contracts.attention import AttentionLayer, ForwardBatch, Phase
from dovetail.contracts.config import ModelConfig, RopeConfig, dense_layers
from dovetail_backends.kernels.cpu_linear import Repacked
from dovetail_backends.torch_native import TorchNativeBackend

CPU = torch.device("cpu")
needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no products in bfloat16"
)


def few_rows_round_as_many() -> bool:
    """Whether torch's own attention says the same of three queries as of them among all, on this CPU."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, 768, 64, generator=rng).bfloat16() for _ in range(3))
    reach = torch.full((768, 768), float("-inf"), dtype=torch.bfloat16).triu(1)
    whole = F.scaled_dot_product_attention(q, k, v, attn_mask=reach)
    parts = [
        F.scaled_dot_product_attention(q[:, :, at : at + 3], k, v, attn_mask=reach[at : at + 3])
        for at in range(0, 768, 3)
    ]
    return torch.equal(torch.cat(parts, dim=2), whole)


class World:
    """Requests whose queries, keys and values are given; computed in whatever steps a test wants."""

    def __init__(self, lens: list[int], heads: tuple[int, int, int], page: int, window: int | None):
        hq, hk, d = heads
        rng, chance = torch.Generator().manual_seed(3), random.Random(3)
        config = ModelConfig(
            architecture="Test", vocab_size=1, hidden_size=1, intermediate_size=1, num_layers=1,
            layers=dense_layers(1, num_qo_heads=hq, num_kv_heads=hk, head_dim=d), norm_eps=1e-6, hidden_act="silu",
            max_position_embeddings=1, tie_word_embeddings=False, rope=RopeConfig(), dtype="float32",
        )  # fmt: skip
        self.page, dtype = page, torch.bfloat16
        self.width = -(-max(lens) // page)
        self.pool = KVCache(config.cache_groups, [len(lens) * self.width + 1], page, dtype, CPU)
        self.backend = TorchNativeBackend(config, self.pool, CPU)
        self.layer = AttentionLayer(
            index=0, num_qo_heads=hq, num_kv_heads=hk, qk_dim=d, v_dim=d, scale=1 / math.sqrt(d), sliding_window=window
        )
        self.q = [torch.randn(n, hq, d, generator=rng).to(dtype) for n in lens]
        self.k = [torch.randn(n, hk, d, generator=rng).to(dtype) for n in lens]
        self.v = [torch.randn(n, hk, d, generator=rng).to(dtype) for n in lens]
        pages = list(range(1, self.pool.num_pages))
        chance.shuffle(pages)
        self.pages = [[pages.pop() for _ in range(-(-n // page))] for n in lens]

    def step(self, decode: list[tuple[int, int]], chunks: list[tuple[int, int, int]]) -> list[Tensor]:
        """Compute decode rows `(request, position)` and chunks `(request, start, end)`; a result for each."""
        parts = [(r, p, p + 1) for r, p in decode] + chunks
        table = torch.zeros(len(parts), self.width, dtype=torch.int32)
        for i, (r, _, end) in enumerate(parts):
            used = self.pages[r][: -(-end // self.page)]
            table[i, : len(used)] = torch.tensor(used)
        places = [p for _, a, b in parts for p in range(a, b)]
        slots = [self.pages[r][p // self.page] * self.page + p % self.page for r, a, b in parts for p in range(a, b)]
        news = [b - a for _, a, b in parts]
        starts = torch.tensor([0, *news]).cumsum(0).int()
        batch = ForwardBatch(
            num_decode=len(decode), positions=torch.tensor(places), kv_slots=torch.tensor(slots),
            rows=torch.arange(len(parts)), page_table=table, seq_lens=torch.tensor([b for _, _, b in parts]),
            q_starts=starts, seq_lens_cpu=[b for _, _, b in parts], q_lens_cpu=news, attention=self.backend,
            last_tokens=(starts[1:] - 1).long(),
        )  # fmt: skip
        q, k, v = (torch.cat([x[r][a:b] for r, a, b in parts]) for x in (self.q, self.k, self.v))
        out = torch.full_like(q, float("nan"))
        self.backend.plan(batch, Phase.EAGER)
        self.backend.write_kv(self.layer, k, v, batch)
        if len(decode) == len(parts):
            self.backend.forward_decode(q, k, v, self.layer, batch, out)
        elif decode:
            self.backend.forward_mixed(q, k, v, self.layer, batch, out)
        else:
            self.backend.forward_extend(q, k, v, self.layer, batch, out)
        return list(out.split(news))


@needs_bfloat16
@pytest.mark.parametrize("num_in", [640, 1152, 4864])
def test_a_row_of_a_product_is_the_same_beside_any_others(num_in: int) -> None:
    """One row alone, two, and many give the same bits."""
    rng = torch.Generator().manual_seed(1)
    packed_linear = Repacked(batch_invariant=False)
    packed = packed_linear.pack({"weight": (torch.randn(700, num_in, generator=rng) / num_in**0.5).bfloat16()})
    x = torch.randn(120, num_in, generator=rng).bfloat16()
    want = packed_linear(x, packed, None)
    for num in (1, 2, 3, 17, 64):
        got = [packed_linear(x[at : at + num], packed, None) for at in range(0, len(x), num)]
        assert torch.equal(torch.cat(got), want), num


LENS = [700, 290, 47, 1]


@needs_bfloat16
@pytest.mark.skipif(
    torch.ops.mkldnn._is_mkldnn_bf16_supported() and not few_rows_round_as_many(),
    reason="torch's attention in bfloat16 rounds few rows otherwise than many on this CPU",
)
@pytest.mark.parametrize(
    ("heads", "page", "window"),
    [((8, 2, 64), 16, None), ((14, 2, 64), 16, None), ((4, 4, 32), 16, None), ((8, 4, 128), 48, None),
     ((8, 2, 64), 1, None), ((8, 2, 64), 16, 100)],
)  # fmt: skip
def test_how_tokens_are_put_together_changes_no_bit(heads: tuple[int, int, int], page: int, window: int | None) -> None:
    """Whole prompts, chunks of any length, single tokens, decode rows alone and beside longer ones: one result."""
    world = World(LENS, heads, page, window)
    want = world.step([], [(r, 0, n) for r, n in enumerate(LENS)])
    chance = random.Random(5)
    for most in (1, 3, 40, 300):
        for r, n in enumerate(LENS):
            at, got = 0, []
            while at < n:
                end = min(n, at + chance.randrange(1, most + 1)) if at or most == 1 else min(n, 5 * most)
                [found] = world.step([], [(r, at, end)])
                got.append(found)
                at = end
            assert torch.equal(torch.cat(got), want[r]), f"chunks of {most}, request {r}"
    for at in range(0, max(LENS), 7):
        rows = [(r, at) for r, n in enumerate(LENS) if at < n]
        together = world.step(rows, [])
        for (r, p), row, alone in zip(rows, together, [world.step([row], [])[0] for row in rows], strict=True):
            assert torch.equal(row[0], want[r][p]), f"row {p} beside others"
            assert torch.equal(alone[0], want[r][p]), f"row {p} alone"
    mixed = world.step([(2, 46), (1, 255)], [(0, 100, 411)])
    assert torch.equal(torch.cat(mixed), torch.cat([want[2][46:47], want[1][255:256], want[0][100:411]]))
