"""Triton decode that reads a common prefix once per group of rows, in the interpreter on CPU, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.contracts.attention import Phase
from dovetail_backends.triton import TritonBackend
from dovetail_backends.triton.prefix import TILE, SharedPrefix, rows_per_group
from dovetail_testing.conformance.attention_qkv import verify_qkv
from dovetail_testing.conformance.attention_reference import error_by_token
from dovetail_testing.conformance.attention_world import Case, World, make_world

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXACT = 2e-6


def make(case: Case) -> tuple[World, TritonBackend]:
    """A batch and a backend for it."""
    world = make_world(case, DEVICE)
    return world, TritonBackend(case.config(), world.pool, DEVICE)


def shared(backend: TritonBackend) -> tuple[int, list[int]]:
    """Rows of a group, and shared tokens of each group, as the last step found them."""
    assert backend._prefixes is not None
    found: SharedPrefix = backend._prefixes.shared
    return found.group, found.groups[0].tolist()


def behind(num: int, prefix: int, *more: tuple[int, int]) -> dict[str, Any]:
    """`num` rows behind one prefix, each with a few tokens of its own, then `more` rows `(cached, common)`."""
    lengths = [(prefix + 3 * i, 1) for i in range(num)] + [(cached, 1) for cached, _ in more]
    return {"lengths": lengths, "common": [0, *[prefix] * (num - 1), *(common for _, common in more)]}


SMALL: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 16}
CASES: list[tuple[dict[str, Any], tuple[int, list[int]]]] = [
    # what is special, (rows of a group, what a run of each group shares)
    ({**behind(5, 140), "num_qo_heads": 1}, (8, [128])),
    ({**behind(18, 70), "num_qo_heads": 1}, (16, [64, 64])),
    ({**behind(3, 300, (500, 320)), "num_qo_heads": 2}, (4, [256])),
    ({**behind(17, 64), "num_qo_heads": 2}, (16, [64, 0])),
    ({**behind(2, 150, (1, 0), (200, 0)), "num_qo_heads": 4}, (4, [128])),
    ({**behind(3, 300, (500, 90), (501, 90), (90, 0)), "num_qo_heads": 2}, (8, [256])),
    ({**behind(3, 200, (500, 0), (501, 450), (3, 0)), "num_qo_heads": 2}, (8, [448])),
    ({**behind(1, 30, (300, 0), (301, 300), (302, 300), (40, 0)), "num_qo_heads": 2}, (8, [256])),
    ({**behind(1, 30, (63, 0), (64, 64), (65, 64)), "num_qo_heads": 2}, (4, [64])),
    ({**behind(4, 60, (99, 0)), "num_qo_heads": 2}, (8, [0])),
    ({**behind(9, 128, (700, 128)), "num_qo_heads": 7}, (8, [128, 128])),
    ({**behind(3, 192), "num_qo_heads": 16}, (4, [192])),
    ({**behind(4, 200, (130, 0), (130, 130)), "num_qo_heads": 32}, (2, [192, 192, 128])),
    ({**behind(3, 130), "num_qo_heads": 2, "page_size": 1}, (4, [128])),
    ({**behind(3, 200), "num_qo_heads": 2, "page_size": 64}, (4, [192])),
    ({**behind(3, 300), "num_qo_heads": 2, "page_size": 128}, (4, [256])),
    ({**behind(3, 200), "num_qo_heads": 2, "page_size": 3}, (4, [192])),
    ({**behind(3, 130), "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 80, "sinks": True}, (4, [128])),
    ({**behind(3, 130), "num_qo_heads": 2, "head_dim": 96}, (4, [128])),
    ({**behind(3, 130), "num_qo_heads": 2, "head_dim": 24}, (4, [128])),
    ({**behind(3, 130), "num_qo_heads": 2, "head_dim": 184, "sinks": True}, (4, [128])),
    ({**behind(3, 130), "num_qo_heads": 2, "head_dim": 256, "sinks": True}, (4, [128])),
    ({**behind(3, 130), "num_qo_heads": 8, "head_dim": 512}, (4, [128])),
    ({**behind(3, 130), "num_qo_heads": 2, "head_dim": 192, "v_dim": 128, "soft_cap": 0.7}, (4, [128])),
    ({**behind(9, 70), "num_qo_heads": 2, "head_dim": 16, "v_dim": 40, "page_size": 3}, (16, [64])),
]


@pytest.mark.first(12)
@pytest.mark.parametrize(("changes", "want"), CASES, ids=str)
def test_a_common_prefix_is_found_and_attended_exactly(changes: dict[str, Any], want: tuple[int, list[int]]) -> None:
    """A run of each group shares what its rows begin with, in whole tiles; results equal float64 but for rounding."""
    world, backend = make(Case(**{**SMALL, **changes}))
    got = world.run(backend)
    assert shared(backend) == want
    assert float(error_by_token(got, world.want()).max()) < EXACT


def test_a_batch_that_shares_no_prefixes_looks_for_none() -> None:
    """Where the engine says so, each row reads its own keys."""
    world, backend = make(Case(**{**SMALL, **CASES[0][0]}))
    world.batch.shares_prefixes = False
    got = world.run(backend)
    assert backend._prefixes is None
    assert float(error_by_token(got, world.want()).max()) < EXACT


@pytest.mark.sampled
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {**behind(4, 140), "num_qo_heads": 1},
        {**behind(3, 64, (1, 0)), "num_qo_heads": 2, "sinks": True},
        {**behind(3, 65, (300, 60)), "num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 80},
        {**behind(9, 64), "num_qo_heads": 7, "page_size": 1},
    ],
    ids=str,
)
def test_a_common_prefix_from_the_projection(changes: dict[str, Any], normed: bool) -> None:
    """The prefix's queries are normalised and rotated too; the last row pads its batch where there is no norm."""
    assert verify_qkv(TritonBackend, Case(**{**SMALL, **changes}), DEVICE, normed=normed)


def test_a_common_prefix_in_half_precision() -> None:
    """Within the dtype's rounding, from queries and from the projection; the interpreter has no bfloat16."""
    case = Case(**{**SMALL, **behind(4, 140), "num_qo_heads": 4, "dtype": torch.float16})
    world, backend = make(case)
    assert float(error_by_token(world.run(backend), world.want()).max()) < 4e-3
    assert verify_qkv(TritonBackend, case, DEVICE, normed=True)


@pytest.mark.parametrize(
    ("dead", "want"),
    [
        ([5], [192, 0]),
        ([4, 5], [192, 0]),
        ([0], [128, 0]),
        ([1], [128, 0]),
        ([0, 1, 2], [0, 0]),
        ([0, 2], [0, 0]),
        ([3], [192, 0]),
        (range(6), [0, 0]),
    ],
    ids=str,
)
def test_padding_rows_share_nothing_and_spoil_nothing(dead: Any, want: list[int]) -> None:
    """Rows with negative slots are in no run; one row alone shares nothing; all results are finite."""
    lengths = [(200, 1), (210, 1), (250, 1), (140, 1), (90, 1), (30, 1)]
    case = Case(lengths=lengths, common=[0, 192, 192, 128, 0, 0], num_qo_heads=16, num_kv_heads=1)
    world, backend = make(case)
    world.batch.kv_slots[list(dead)] = -1
    world.batch.page_table[world.batch.rows[list(dead)]] = 0
    world.batch.seq_lens[list(dead)] = 1
    got = world.run(backend)
    assert shared(backend) == (4, want)
    alive = [i for i in range(len(lengths)) if i not in dead]
    assert bool(got.isfinite().all())
    if alive:
        assert float(error_by_token(got[alive], world.want()[alive]).max()) < EXACT


def test_a_page_table_is_undefined_past_a_requests_pages() -> None:
    """Entries there may be equal, or any number: only pages that every row has cached are compared and read."""
    world, backend = make(Case(**{**SMALL, **behind(4, 128), "num_qo_heads": 1}))
    table, size = world.batch.page_table, world.case.page_size
    for row, (cached, new) in zip(world.batch.rows.tolist(), world.case.lengths, strict=True):
        table[row, -(-(cached + new) // size) :] = 2**31 - 1
    got = world.run(backend)
    assert shared(backend) == (4, [128])
    assert float(error_by_token(got, world.want()).max()) < EXACT


def test_a_request_that_all_others_begin_with() -> None:
    """The newest token is never shared, though the page that it stands in may be another's full page."""
    case = Case(**{**SMALL, "lengths": [(200, 1), (TILE, 1), (200, 1)], "common": [0, 64, 64], "num_qo_heads": 1})
    world, backend = make(case)
    for new, want in ((1, [TILE]), (0, [0])):
        world.batch.seq_lens[1] = TILE + new
        backend.plan(world.batch, Phase.EAGER)
        backend.plan_in_graph(world.batch)
        assert shared(backend)[1] == want


def test_a_window_reads_no_prefix_of_others() -> None:
    """Under a sliding window each row reads its own keys; a full layer of the same step still shares."""
    case = Case(**{**SMALL, **behind(4, 140), "num_qo_heads": 2, "window": 50})
    world, backend = make(case)
    assert backend.prefix_group == 0  # there is no full layer
    backend.prefix_group = 16
    assert float(error_by_token(world.run(backend), world.want()).max()) < EXACT
    assert shared(backend) == (4, [128])
    world.layer = replace(world.layer, sliding_window=None)
    assert float(error_by_token(world.attend(backend), world.want()).max()) < EXACT


def test_rows_of_a_group_fill_a_matrix_instruction() -> None:
    """Rows times query heads per KV head are at most 64; where two rows are too many there is no group."""
    assert [rows_per_group(g, 256) for g in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 33, 64, 65)] == [
        *(16, 16, 16, 16, 8, 8, 8, 4, 4, 2, 2, 0, 0, 0)
    ]
    assert [rows_per_group(g, 264) for g in (1, 2, 3, 8, 16, 17)] == [16, 16, 8, 4, 2, 0]
    case = Case(**{**behind(4, 130), "num_qo_heads": 40, "num_kv_heads": 1})
    world, backend = make(case)
    assert backend.prefix_group == 0
    assert float(error_by_token(world.run(backend), world.want()).max()) < EXACT
    assert backend._prefixes is None
