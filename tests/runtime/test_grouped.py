"""What the backend of each group sees of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.cache import Window
from dovetail.contracts.config import dense_layers
from dovetail.runtime.attention.grouped import of_group, rows_of_tokens, slots_of
from dovetail.sdk.config import dense_config

TABLE = torch.tensor([[5, 6, 7], [0, 0, 0], [8, 9, 1]], dtype=torch.int32)
HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 10, "hidden_size": 32, "intermediate_size": 16,
    "num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def batch(lengths: list[tuple[int, int]], rows: list[int], num_decode: int, padding: int = 0) -> ForwardBatch:
    """A step of requests (cached, new); slots of the first group are 1000 and up, and -1 for padding."""
    news = [new for _, new in lengths]
    num, unset = sum(news), None
    positions = [place for cached, new in lengths for place in range(cached, cached + new)] + [0] * padding
    return ForwardBatch(
        num_decode=num_decode,
        positions=torch.tensor(positions),
        kv_slots=torch.tensor(list(range(1000, 1000 + num)) + [-1] * padding),
        rows=torch.tensor(rows),
        page_table=torch.zeros(3, 3, dtype=torch.int32),
        seq_lens=torch.tensor([cached + new for cached, new in lengths]),
        q_starts=torch.tensor([0, *news]).cumsum(0).int(),
        seq_lens_cpu=[],
        q_lens_cpu=news,
        attention=unset,  # type: ignore[arg-type]
        last_tokens=torch.tensor([0]),
    )


def test_tokens_find_their_rows() -> None:
    """Decode rows bring one token each, chunks several or none, and padding stands behind all."""
    assert rows_of_tokens(batch([(3, 1), (9, 1)], [2, 0], 2)).tolist() == [2, 0]
    mixed = batch([(3, 1), (2, 3), (0, 0), (4, 2)], [2, 0, 1, 2], 1)
    assert rows_of_tokens(mixed).tolist() == [2, 0, 0, 0, 2, 2]
    padded = batch([(2, 3), (0, 0)], [0, 1], 0, padding=4)
    assert rows_of_tokens(padded)[:3].tolist() == [0, 0, 0]
    assert rows_of_tokens(padded).shape == (7,)


def test_tokens_go_where_their_groups_pages_are() -> None:
    """By the group's own page table; nothing is written where the first group writes nothing."""
    mixed = batch([(3, 1), (2, 3)], [2, 0], 1, padding=2)
    slots = slots_of(mixed, rows_of_tokens(mixed), TABLE, 4)
    assert slots.tolist() == [8 * 4 + 3, 5 * 4 + 2, 5 * 4 + 3, 6 * 4, -1, -1]


def test_a_backend_is_told_of_its_group() -> None:
    """Its layers with their own numbers, and nothing of the others."""
    config = dense_config(HF)
    layers = tuple(replace(s, reach=Window(8)) if s.index == 1 else s for s in config.layers)
    config = replace(config, layers=layers)
    full, window = config.cache_groups
    assert of_group(config, full).layers == (layers[0], layers[2])
    assert of_group(config, window).layers == (layers[1],)
    plain = dense_config(HF)
    assert of_group(plain, plain.cache_groups[0]).layers == dense_layers(3, num_qo_heads=2, num_kv_heads=2, head_dim=16)
