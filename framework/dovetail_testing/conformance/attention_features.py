"""Features of attention that `caps` claim: windows, chunks, sinks, soft caps, and what the cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.contracts.cache import SCALED_DTYPES, ScaledDtype
from dovetail_testing.checks import check
from dovetail_testing.conformance.attention_cases import (
    COMMON,
    COMMON_TOKENS,
    DECODE,
    MIXED,
    PREFILL,
    SEEING,
    SEEN_SPANS,
    WHOLE,
    AttentionChecks,
)
from dovetail_testing.conformance.attention_graph import padded_prefill
from dovetail_testing.conformance.attention_qkv import verify_latent_heads, verify_qkv
from dovetail_testing.conformance.attention_world import compare, make_backend, make_world


class FeatureChecks(AttentionChecks):
    """What a backend that claims a feature must do with it."""

    @pytest.mark.parametrize("window", [1, 5, 16])
    def test_sliding_window(self, window: int) -> None:
        """A query sees the last `sliding_window` tokens, itself included."""
        if not self._caps().sliding_window:
            pytest.skip("caps claim no sliding window")
        for lengths in (DECODE, PREFILL, MIXED):
            self._verify(lengths, window=window)

    @pytest.mark.parametrize("window", [1, 5, 16])
    def test_pages_behind_a_window(self, window: int) -> None:
        """Pages that no query sees any more are the null page in the page table, and are not needed."""
        if not self._caps().sliding_window:
            pytest.skip("caps claim no sliding window")
        for size in self._page_sizes():
            for lengths in (DECODE, PREFILL, MIXED):
                self._verify(lengths, "pages given back", window=window, page_size=size, gives_back=True)

    @pytest.mark.parametrize("chunk", [1, 6, 16])
    def test_chunks(self, chunk: int) -> None:
        """A query sees its own stretch of `chunk_size` tokens, as far as itself; pages before that are not needed."""
        if not self._caps().chunked:
            pytest.skip("caps claim no attention within chunks")
        for size in self._page_sizes():
            for lengths in (DECODE, PREFILL, MIXED):
                self._verify(lengths, chunk=chunk, page_size=size)
                self._verify(lengths, "pages given back", chunk=chunk, page_size=size, gives_back=True)
        for normed in (True, False):
            if not verify_qkv(self.plugin(), self._case(DECODE, chunk=chunk), self._device(), normed=normed):
                break

    def test_sinks(self) -> None:
        """Sinks are one more, valueless key of every query head."""
        if not self._caps().sinks:
            pytest.skip("caps claim no sinks")
        for lengths in (DECODE, PREFILL, MIXED):
            self._verify(lengths, sinks=True, num_kv_heads=2)

    def test_soft_cap(self) -> None:
        """Scores become `soft_cap * tanh(score / soft_cap)` behind the scale, before masks and sinks."""
        if not self._caps().soft_cap:
            pytest.skip("caps claim no soft cap")
        for lengths in (DECODE, PREFILL, MIXED):
            self._verify(lengths, soft_cap=0.7, num_kv_heads=2)
        if self._caps().sliding_window:
            self._verify(MIXED, soft_cap=1.5, window=5)
        if self._caps().sinks:
            self._verify(MIXED, soft_cap=1.5, sinks=True, scale=0.8)

    def test_latent_rows(self) -> None:
        """A latent row is the key of every query head, and its first numbers are the value."""
        if "latent" not in self._caps().mixers:
            pytest.skip("caps claim no latent rows")
        wide, narrow = self._two_dims()
        latent: dict[str, Any] = {"latent": True, "num_kv_heads": 1, "head_dim": wide, "v_dim": narrow}
        self._verify_layout({**latent, "scale": 0.3})
        self._verify(MIXED, "a latent row that is all value", **{**latent, "v_dim": wide})

    def test_keys_and_values_of_different_widths(self) -> None:
        """Values may be wider than keys, or narrower: the result is as wide as they are."""
        if not self._caps().unequal_dims:
            pytest.skip("caps claim keys and values of one width only")
        wide, narrow = self._two_dims()
        for dim, v_dim in ((wide, narrow), (narrow, wide)):
            self._verify_layout({"head_dim": dim, "v_dim": v_dim, "num_kv_heads": 2})

    def test_features_over_different_widths(self) -> None:
        """Windows, chunks, sinks, soft caps, many rows, common prefixes and others' caches hold there, too."""
        caps = self._caps()
        if not caps.unequal_dims:
            pytest.skip("caps claim keys and values of one width only")
        dims = sorted(caps.head_dims or (16, 24))
        claimed: list[tuple[bool, dict[str, Any]]] = [
            (True, {"reads_another": True}),
            (caps.sliding_window, {"window": 5, "gives_back": True}),
            (caps.chunked, {"chunk": 6}),
            (caps.sinks, {"sinks": True}),
            (caps.soft_cap, {"soft_cap": 0.7}),
        ]
        middle = len(dims) // 2
        for dim, v_dim in ((dims[middle], dims[middle - 1]), (dims[0], dims[1 % len(dims)])):
            widths: dict[str, Any] = {"head_dim": dim, "v_dim": v_dim, "num_kv_heads": 2}
            for feature in (feature for is_claimed, feature in claimed if is_claimed):
                for lengths in (DECODE, PREFILL, MIXED):
                    self._verify(lengths, **widths, **feature)
            self._verify([(1 + 7 * i % 23, 1) for i in range(100)], "100 decode rows", **widths)
            for common in COMMON_TOKENS:
                self._verify((*COMMON, (0, 9), (20, 4)), "common prefixes", common=common, **widths)
        if caps.graph == "mixed":
            padded_prefill(self.plugin(), self._case(PREFILL, **widths), self._device())

    @pytest.mark.parametrize("name", SCALED_DTYPES)
    def test_a_cache_of_8_bits(self, name: ScaledDtype) -> None:
        """Keys and values in int8 or float8, a scale for each token and head: in every layout that caps claim.

        What a prompt's own tokens get is of rounded keys and values, too: as it will be when they are read again.
        """
        caps = self._caps()
        if name not in caps.cache_dtypes:
            pytest.skip(f"caps claim no cache in {name}")
        for size in self._page_sizes():
            for lengths in (DECODE, PREFILL, MIXED):
                self._verify(lengths, page_size=size, num_kv_heads=2, cache_dtype=name)
        self._verify_layout({"num_kv_heads": 2, "cache_dtype": name})
        self._verify(COMMON, "common prefixes", common=COMMON_TOKENS[0], num_kv_heads=2, cache_dtype=name)
        for normed in (True, False):
            case = self._case(DECODE, num_kv_heads=2, cache_dtype=name)
            if not verify_qkv(self.plugin(), case, self._device(), normed=normed):
                break
        wide, narrow = self._two_dims()
        if "latent" in caps.mixers:
            latent: dict[str, Any] = {"latent": True, "num_kv_heads": 1, "head_dim": wide, "v_dim": narrow}
            self._verify_layout({**latent, "scale": 0.3, "cache_dtype": name})
        if caps.unequal_dims:
            self._verify_layout({"head_dim": wide, "v_dim": narrow, "num_kv_heads": 2, "cache_dtype": name})

    def test_both_directions(self) -> None:
        """A layer that is not causal keeps nothing: a token sees its whole prompt, or a window to either side."""
        if not self._caps().bidirectional:
            pytest.skip("caps claim no attention in both directions")
        for lengths in (WHOLE, [(0, 1 + i % 7) for i in range(33)]):
            self._verify(lengths, bidirectional=True, num_kv_heads=2)
        for window in (1, 5, 16) if self._caps().sliding_window else ():
            self._verify(WHOLE, bidirectional=True, window=window)
        if self._caps().soft_cap and self._caps().sinks:
            self._verify(WHOLE, bidirectional=True, soft_cap=0.7, sinks=True)

    def test_images_see_both_ways(self) -> None:
        """A token of an image sees all of it, ahead and beyond a window; other tokens of the step see as ever."""
        caps = self._caps()
        if not caps.spans:
            pytest.skip("caps claim no attention in both directions within images")
        seen: dict[str, Any] = {"spans": SEEN_SPANS, "num_kv_heads": 2}
        for size in self._page_sizes():
            self._verify(SEEING, page_size=size, **seen)
        for window in (1, 5, 16, 64) if caps.sliding_window else ():
            self._verify(SEEING, window=window, **seen)
        if caps.soft_cap and caps.sinks:
            self._verify(SEEING, soft_cap=0.7, sinks=True, **seen)
        if caps.unequal_dims:
            wide, narrow = self._two_dims()
            self._verify(SEEING, head_dim=wide, v_dim=narrow, **seen)
        for name in sorted(caps.cache_dtypes):
            self._verify(SEEING, cache_dtype=name, **seen)
        for name in sorted(caps.dtypes):
            self._verify(SEEING, f"dtype {name}", dtype=getattr(torch, name), **seen)
        self._verify(((0, 1100),), spans=(((1000, 1060),),), num_kv_heads=2)
        self._verify(DECODE, "decode rows in a layer whose images see both ways", spans=(((2, 5),),))

    def test_another_layers_cache(self) -> None:
        """A layer without a cache reads another one's: its keys and values are None, and are in the pool."""
        for lengths in (DECODE, PREFILL, MIXED):
            self._verify(lengths, reads_another=True, num_kv_heads=2)

    @pytest.mark.parametrize(("query", "kv", "window"), [(4, 4, None), (6, 2, None), (8, 1, 7)])
    def test_decode_from_the_projection(self, query: int, kv: int, window: int | None) -> None:
        """Where `forward_decode_qkv` serves, it equals norm, rotation, `write_kv` and `forward_decode`."""
        if window is not None and not self._caps().sliding_window:
            pytest.skip("caps claim no sliding window")
        case = self._case(DECODE, num_qo_heads=query, num_kv_heads=kv, window=window)
        for normed in (True, False):
            if not verify_qkv(self.plugin(), case, self._device(), normed=normed):
                pytest.skip("the backend declines forward_decode_qkv")

    @pytest.mark.parametrize("lengths", [((0, 70), (0, 33)), ((30, 1), (37, 80), (0, 65)), ((129, 200),)], ids=str)
    def test_latent_chunks_by_heads(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Where `forward_extend_latent` serves, it equals keys and values of heads written out."""
        if "latent" not in self._caps().mixers:
            pytest.skip("caps claim no latent mixer")
        for size in self._page_sizes():
            case = self._case(lengths, page_size=size, latent=True, num_kv_heads=1, head_dim=56, v_dim=48, scale=0.2)
            if not verify_latent_heads(self.plugin(), case, self._device()):
                pytest.skip("the backend declines forward_extend_latent")


# Decode rows that begin with the same pages: the hint changes how they are read, never what comes out.


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
