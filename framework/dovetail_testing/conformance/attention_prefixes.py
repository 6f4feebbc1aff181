"""Decode rows that begin with the same pages: the hint changes how they are read, never what comes out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dovetail_testing.checks import check
from dovetail_testing.conformance.attention_cases import COMMON, COMMON_TOKENS, AttentionChecks
from dovetail_testing.conformance.attention_qkv import verify_qkv
from dovetail_testing.conformance.attention_world import compare, make_backend, make_world


class PrefixChecks(AttentionChecks):
    """What must hold of rows with common prefixes."""

    @pytest.mark.parametrize("common", COMMON_TOKENS, ids=str)
    def test_common_prefixes(self, common: tuple[int, ...]) -> None:
        """Decode rows that begin with the same pages get the same results whether the hint is given or not."""
        for size in self._page_sizes():
            for hint in (True, False):
                changes = {"common": common, "hint": hint, "num_kv_heads": 2}
                self._verify(COMMON, "common prefixes", page_size=size, **changes)
        case = self._case(COMMON, num_kv_heads=2, common=common)
        for normed in (True, False):
            if not verify_qkv(self.plugin(), case, self._device(), normed=normed):
                break

    @pytest.mark.parametrize(("query", "kv"), [(4, 4), (8, 1), (14, 2)])
    def test_common_prefixes_and_features(self, query: int, kv: int) -> None:
        """So do groups of heads, windows and sinks, as far as `caps` claim them, and mixed batches."""
        heads: dict[str, Any] = {"num_qo_heads": query, "num_kv_heads": kv, "common": COMMON_TOKENS[0]}
        self._verify(COMMON, "common prefixes", **heads)
        self._verify((*COMMON, (0, 9), (20, 4)), "common prefixes of the decode rows of a mixed batch", **heads)
        if self._caps().sliding_window:
            self._verify(COMMON, "common prefixes under a window", window=100, **heads)
        if self._caps().sinks:
            self._verify(COMMON, "common prefixes with sinks", sinks=True, **heads)
        if self._caps().soft_cap:
            self._verify(COMMON, "common prefixes with capped scores", soft_cap=0.7, **heads)

    def test_common_prefixes_of_a_graphs_padding(self) -> None:
        """Rows with a negative slot, which pad the batch of a graph, do not change their neighbours' results."""
        if self._caps().graph == "none":
            pytest.skip("caps claim no graphs")
        for dead in ([6, 7], [0, 3], [1, 2, 3, 4, 5, 6, 7], list(range(8))):
            world = make_world(self._case(COMMON, common=COMMON_TOKENS[0]), self._device())
            backend = make_backend(self.plugin(), world)
            world.batch.kv_slots[dead] = -1
            # As the engine's spare row: one token, on the null page.
            world.batch.page_table[world.batch.rows[dead]] = 0
            world.batch.seq_lens[dead] = 1
            world.batch.seq_lens_cpu = world.batch.seq_lens.tolist()
            got = world.run(backend)
            check(bool(got.isfinite().all()), f"not finite with rows {dead} as padding ({world.case})")
            got[dead] = world.want()[dead].to(got.dtype)
            compare(world, got, self.plugin(), f"with rows {dead} as padding")

    def test_a_hint_of_one_step_is_not_used_in_the_next(self) -> None:
        """One instance serves batches with and without common prefixes in turn."""
        case = self._case(COMMON, common=COMMON_TOKENS[0])
        world = make_world(case, self._device())
        backend = make_backend(self.plugin(), world)
        for seed, common in enumerate((COMMON_TOKENS[0], (), COMMON_TOKENS[1], COMMON_TOKENS[2])):
            after = make_world(replace(case, common=common), self._device(), seed, world.pool)
            compare(after, after.run(backend), self.plugin(), "after a step with other common prefixes")
