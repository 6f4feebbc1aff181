"""One backend instance through many steps: nothing stays of the last one, in graphs and outside of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.contracts.attention import Phase
from dovetail_testing.checks import check, no_error
from dovetail_testing.conformance.attention_cases import COMMON, COMMON_TOKENS, DECODE, MIXED, PREFILL, AttentionChecks
from dovetail_testing.conformance.attention_graph import capture_and_replay, padded_prefill, rerun
from dovetail_testing.conformance.attention_world import (
    World,
    check_untouched,
    compare,
    make_backend,
    make_world,
    readable,
)
from dovetail_testing.conformance.host_sync import HostSyncs


class StepChecks(AttentionChecks):
    """What must hold from one step to the next, and of steps that are recorded into graphs."""

    def test_inputs_are_only_read(self) -> None:
        """Attending changes nothing but `out`."""
        for lengths in (DECODE, PREFILL, MIXED):
            world = make_world(self._case(lengths), self._device())
            backend = make_backend(self.plugin(), world)
            world.run(backend)
            before = readable(world)
            world.run(backend)
            check_untouched(world, before, readable(world))

    def test_steps_do_not_depend_on_each_other(self) -> None:
        """One instance serves one batch after the other: what `plan` prepared for the last step is not used again."""
        case = self._case(((300, 1),))
        world = make_world(case, self._device())
        backend = make_backend(self.plugin(), world)
        for seed, lengths in enumerate((MIXED, DECODE, PREFILL, MIXED, DECODE[:2], ((50, 1),)), start=1):
            after = make_world(replace(case, lengths=lengths), self._device(), seed, world.pool)
            compare(after, after.run(backend), self.plugin(), "in a later step of the same instance")

    def test_layers_with_different_windows_in_one_step(self) -> None:
        """Windowed and full layers follow each other within one step."""
        if not self._caps().sliding_window:
            pytest.skip("caps claim no sliding window")
        world = make_world(self._case(MIXED, window=5), self._device())
        backend = make_backend(self.plugin(), world)
        world.run(backend)
        for window in (None, 3, 5):
            world.layer = replace(world.layer, sliding_window=window)
            world.case = replace(world.case, window=window)
            compare(world, world.attend(backend), self.plugin(), "after a layer with another window")

    def test_write_kv_leaves_a_graphs_padding_out(self) -> None:
        """Tokens with a negative slot, which pad the batch of a graph, change nothing in the pool."""
        if self._caps().graph == "none":
            pytest.skip("caps claim no graphs")
        world = make_world(self._case(MIXED), self._device())
        backend = make_backend(self.plugin(), world)
        backend.plan(world.batch, Phase.EAGER)
        world.pool.memory.zero_()
        size, slots = world.case.page_size, world.batch.kv_slots.clone()
        world.batch.kv_slots[::2] = -1
        backend.write_kv(world.layer, world.k, world.v, world.batch)
        want = torch.zeros_like(world.pool.memory)
        live = slots[1::2]
        want[world.layer.index, live // size, 0, live % size] = world.k[1::2]
        want[world.layer.index, live // size, 1, live % size] = world.v[1::2]
        check(
            torch.equal(want, world.pool.memory),
            "write_kv writes for tokens with a negative slot: they pad the batch of a graph and have no place",
        )

    def test_no_host_sync_in_decode(self) -> None:
        """Where `caps` claim graphs, decode reads nothing back to the host and no host-side lengths."""
        if self._caps().graph == "none":
            pytest.skip("caps claim no graphs")
        world = make_world(self._case(DECODE), self._device())
        backend = make_backend(self.plugin(), world)
        backend.init_graph_state(max_batch=16, max_tokens=16)
        world.batch.attention = backend
        backend.plan(world.batch, Phase.CAPTURE)
        world.batch.seq_lens_cpu, world.batch.q_lens_cpu = [], []
        what = "decode as it is recorded into a graph (host-side lengths are empty there)"
        with HostSyncs() as syncs, no_error(what):
            backend.plan_in_graph(world.batch)
            got = world.attend(backend)
        calls = "; ".join(dict.fromkeys(syncs.found))
        check(not calls, f"host sync in decode, which caps.graph={self._caps().graph!r} rules out: {calls}")
        compare(world, got, self.plugin(), "in a graph")

    def test_a_replay_needs_no_plan(self) -> None:
        """Where `caps` claim graphs, a step that was planned once serves other lengths: the device reads them."""
        if self._caps().graph == "none":
            pytest.skip("caps claim no graphs")
        rerun(self.plugin(), self._case(DECODE), self._device())

    def test_padded_prefill_of_a_graph(self) -> None:
        """Where `caps` claim graphs of prefills, one plan serves every division of its tokens into chunks, padded."""
        if self._caps().graph != "mixed":
            pytest.skip("caps claim no graphs of prefills")
        padded_prefill(self.plugin(), self._case(PREFILL, num_kv_heads=2), self._device())

    @pytest.mark.gpu
    def test_capture_and_replay(self) -> None:
        """A decode step recorded into a CUDA graph and replayed on other lengths equals the eager step."""
        self._need_gpu()
        if self._caps().graph == "none":
            pytest.skip("caps claim no graphs")
        capture_and_replay(self.plugin(), self._case(DECODE))
        for common in COMMON_TOKENS:
            capture_and_replay(self.plugin(), self._case(COMMON, common=common))


# Whether what a token gets has the same bits whatever is computed with it, where a backend claims so.

LENGTH = 150
"""Tokens of the request that is cut: more than any backend's first block."""
CUTS = ((0, 7, 16, 41, 128, LENGTH), (0, 64, 65, LENGTH), (0, 149, LENGTH))
INVARIANT_SPANS = (((10, 40), (41, 128)),)
SPAN_CUTS = ((0, 7, 40, 41, 128, LENGTH), (0, 10, LENGTH), (0, 41, 129, LENGTH))
"""Images of it, and cuts between them."""
PLACES = (1, 15, 16, 31, 63, 64, 127, 128, 149)


class AttentionInvarianceChecks(AttentionChecks):
    """What `caps.batch_invariant` promises, with `AttentionBackend.batch_invariant` set."""

    def test_batch_invariance(self) -> None:
        """Where `caps` claim it, a request's result has the same bits whatever else is in the batch."""
        self._need_claim()
        for lengths, features in itertools.product((DECODE, PREFILL, MIXED), (self._features(), *self._latent())):
            case = self._case(lengths, **features)
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
        spans = [{"spans": INVARIANT_SPANS}] if self._caps().spans else []
        for features in ({}, self._features(), *spans, *self._latent()):
            whole = make_world(self._case(((0, LENGTH),), **features), self._device())
            want = self._run(whole)
            for cuts in CUTS if not whole.case.spans else SPAN_CUTS:
                for first, end in itertools.pairwise(cuts):
                    same = torch.equal(self._run(part_of(whole, 0, first, end)), want[first:end])
                    check(same, f"not batch invariant: tokens {first} to {end} differ in a chunk ({whole.case})")
            for place in PLACES if not whole.case.spans else ():
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

    def _latent(self) -> list[dict[str, Any]]:
        """Latent rows, if the caps claim them."""
        wide, narrow = self._two_dims()
        latent: dict[str, Any] = {"latent": True, "num_kv_heads": 1, "head_dim": wide, "v_dim": narrow, "scale": 0.3}
        return [latent] if "latent" in self._caps().mixers else []

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
