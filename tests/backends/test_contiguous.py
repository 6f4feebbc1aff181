"""Long prompts over a copy of their keys, without pages, are what they are over pages.

In float16: the interpreter of kernels has no bfloat16.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from dovetail.contracts.attention import Phase
from dovetail_backends.triton import TritonBackend, contiguous
from dovetail_testing.conformance.attention_world import Case, make_backend, make_world, verify

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chunks of eight tokens are long; returns how many heads each copy of the test had."""
    heads: list[int] = []

    def noted(*args: Any) -> Any:
        for copy in contiguous.copies(*args):
            heads.append(len(copy.kv[0]))
            yield copy

    monkeypatch.setattr(contiguous, "LONG", 8)
    monkeypatch.setattr(sys.modules[TritonBackend.__module__ + ".extend"], "copies", noted)
    return heads


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [{}, {"sinks": True}, {"soft_cap": 2.0}, {"head_dim": 24}, {"head_dim": 32, "v_dim": 16}, {"page_size": 3}],
    ids=str,
)
@pytest.mark.parametrize(
    "lengths", [[(0, 70)], [(37, 9), (0, 3), (150, 33)], [(40, 1), (2, 1), (129, 8), (0, 1)]], ids=str
)
def test_a_copy_gives_what_pages_give(
    lengths: list[tuple[int, int]], changes: dict[str, Any], copied: list[int]
) -> None:
    """Chunks with and without a prefix, several requests, beside decode rows, heads of odd and of two widths."""
    case = Case(lengths=lengths, dtype=torch.float16, **{"num_qo_heads": 6, "num_kv_heads": 3} | changes)  # type: ignore[arg-type]
    verify(TritonBackend, case, DEVICE)
    assert set(copied) == {3}


@pytest.mark.parametrize("at_once", [1, 2])
def test_fewer_heads_are_copied_at_once_where_there_is_no_room(
    at_once: int, copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prefix takes no more memory, and its heads one after the other."""
    case = Case(lengths=[(200, 40), (5, 17)], dtype=torch.float16, num_qo_heads=6, num_kv_heads=3)
    monkeypatch.setattr(contiguous, "COPY_BYTES", (262 * 2 * 16 * 2) * at_once + 7)
    verify(TritonBackend, case, DEVICE)
    assert copied[: 3 // at_once + 3 % at_once] == ([1, 1, 1] if at_once == 1 else [2, 1])


@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        ([(500, 7)], {}),
        ([(0, 40)], {"window": 9}),
        ([(0, 40)], {"chunk": 16}),
        ([(0, 40)], {"dtype": torch.float32}),
        ([(0, 40)], {"cache_dtype": "int8"}),
        ([(0, 40)], {"head_dim": 136}),
    ],
    ids=str,
)
def test_other_chunks_stay_with_pages(
    lengths: list[tuple[int, int]], changes: dict[str, Any], copied: list[int]
) -> None:
    """Short chunks, windows, other numbers and wide heads are not copied."""
    verify(TritonBackend, Case(lengths=lengths, **{"dtype": torch.float16} | changes), DEVICE)  # type: ignore[arg-type]
    assert not copied


def test_a_head_that_is_too_large_stays_with_pages(copied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not even one head's keys have room, pages are looked up."""
    monkeypatch.setattr(contiguous, "COPY_BYTES", 100)
    verify(TritonBackend, Case(lengths=[(100, 30)], dtype=torch.float16), DEVICE)
    assert not copied


def test_lengths_that_the_host_does_not_know_stay_with_pages(copied: list[int]) -> None:
    """In a graph, lengths change behind the host's back."""
    world = make_world(Case(lengths=[(0, 40)], dtype=torch.float16), DEVICE)
    backend = make_backend(TritonBackend, world)
    backend.plan(world.batch, Phase.EAGER)
    world.batch.seq_lens_cpu = []
    out = torch.empty_like(world.q)
    backend.write_kv(world.layer, world.k, world.v, world.batch)
    backend.forward_extend(world.q, world.k, world.v, world.layer, world.batch, out)
    assert not copied
