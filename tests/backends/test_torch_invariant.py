"""Attention by blocks in plain torch, beyond what the conformance kit asks of the backend that uses it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionLayer
from dovetail_backends.torch_invariant import KEYS, QUERIES, attend_blocks, row_blocks


def before(queries: Tensor, places: Tensor) -> Tensor:
    return places <= queries


@pytest.mark.parametrize("soft_cap", [None, 20.0])
def test_what_stands_behind_the_last_key_is_not_used(soft_cap: float | None) -> None:
    """Neither not-a-number nor infinity there gets into a result, of one request or of several, to the last bit."""
    torch.manual_seed(0)
    layer = AttentionLayer(index=0, num_qo_heads=4, num_kv_heads=2, qk_dim=8, v_dim=8, scale=0.4, soft_cap=soft_cap)
    lens = torch.tensor([3, KEYS, KEYS + 1, 2 * KEYS - 1, 40])
    blocks, starts = row_blocks(torch.randn(5, 4, 8), lens - 1)
    keys, values = torch.randn(2, 5, 2, 2 * KEYS, 8).unbind()
    want = attend_blocks(blocks, starts, keys, values, lens, layer, before)
    for number, end in enumerate(lens.tolist()):
        keys[number, :, end:], values[number, :, end:] = float("nan"), float("inf")
        one = slice(number, number + 1)
        given = (blocks[one], starts[one], keys[one], values[one], lens[one])
        assert torch.equal(attend_blocks(*given, layer, before), want[one])
    assert torch.equal(attend_blocks(blocks, starts, keys, values, lens, layer, before), want)
    assert want.shape == (5, QUERIES, 4, 8)
    assert not want.isnan().any()
