"""Whether what a token gets has the same bits whatever is computed with it, where a backend claims so."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail_testing.checks import check
from dovetail_testing.conformance.attention_cases import DECODE, MIXED, PREFILL, AttentionChecks
from dovetail_testing.conformance.attention_world import World, make_backend, make_world

LENGTH = 150
"""Tokens of the request that is cut: more than any backend's first block."""
CUTS = ((0, 7, 16, 41, 128, LENGTH), (0, 64, 65, LENGTH), (0, 149, LENGTH))
PLACES = (1, 15, 16, 31, 63, 64, 127, 128, 149)


class AttentionInvarianceChecks(AttentionChecks):
    """What `caps.batch_invariant` promises, with `AttentionBackend.batch_invariant` set."""

    def test_batch_invariance(self) -> None:
        """Where `caps` claim it, a request's result has the same bits whatever else is in the batch."""
        self._need_claim()
        for lengths in (DECODE, PREFILL, MIXED):
            case = self._case(lengths, **self._features())
            together = self._run(whole := make_world(case, self._device()))
            start = 0
            for number, (cached, new) in enumerate(lengths):
                got = self._run(part_of(whole, number, cached, cached + new))
                same = torch.equal(got, together[start : start + new])
                check(
                    same, f"not batch invariant: request {number} ({cached} cached, {new} new) differs alone ({case})"
                )
                start += new

    def test_invariance_of_chunks(self) -> None:
        """Where `caps` claim it, a token has the same bits in whatever chunk of its prompt, and as a decode row."""
        self._need_claim()
        for features in ({}, self._features()):
            whole = make_world(self._case(((0, LENGTH),), **features), self._device())
            want = self._run(whole)
            for cuts in CUTS:
                for first, end in itertools.pairwise(cuts):
                    same = torch.equal(self._run(part_of(whole, 0, first, end)), want[first:end])
                    check(same, f"not batch invariant: tokens {first} to {end} differ in a chunk ({whole.case})")
            for place in PLACES:
                same = torch.equal(self._run(part_of(whole, 0, place, place + 1)), want[place : place + 1])
                check(same, f"not batch invariant: token {place} differs in a chunk of its own ({whole.case})")

    def _need_claim(self) -> None:
        if not self._caps().batch_invariant:
            pytest.skip("caps claim no batch invariance")

    def _features(self) -> dict[str, Any]:
        """What may choose another kernel, as far as the caps go."""
        caps = self._caps()
        features: dict[str, Any] = {"window": 37} if caps.sliding_window else {}
        features |= {"soft_cap": 20.0} if caps.soft_cap else {}
        return features | ({"sinks": True} if caps.sinks else {})

    def _run(self, world: World) -> Tensor:
        backend = make_backend(self.plugin(), world)
        backend.batch_invariant = True
        return world.run(backend)


def part_of(whole: World, number: int, first: int, end: int) -> World:
    """Return a step of some new tokens of one request of another world, with what is before them in the cache."""
    case = replace(whole.case, lengths=[(first, end - first)])
    world = make_world(case, whole.device)
    q, k, v = whole.parts[number]
    skipped = first - whole.case.lengths[number][0]
    world.parts = [(q[skipped : skipped + end - first].contiguous(), k[:end], v[:end])]
    world.q, world.layer = world.parts[0][0], whole.layer
    world.k, world.v = k[first:end].contiguous(), v[first:end].contiguous()
    places = torch.arange(first, device=whole.device)
    pages = world.batch.page_table[world.batch.rows[0], places // case.page_size].long()
    world.pool.write(world.layer.index, pages, places % case.page_size, k[:first], v[:first])
    return world
