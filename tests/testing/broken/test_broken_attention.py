"""Attention backends with one fault each: the kit names every fault, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from right_attention import FromProjection, LargePages, MakesHeads, Prefilling, Right, SeesImages, Sharing
from torch import Tensor

from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, Phase
from dovetail_backends.torch_native import TorchNativeBackend
from dovetail_testing import check_class, conformance_class
from dovetail_testing.conformance.attention_reference import RIGHT


def mistaken(**mistake: Any) -> type[Right]:
    return type("Broken", (Right,), {"mistake": replace(RIGHT, sentence="seeded", **mistake), "__module__": __name__})


def blind(**mistake: Any) -> type[Right]:
    return type(
        "Blind", (SeesImages,), {"mistake": replace(RIGHT, sentence="seeded", **mistake), "__module__": __name__}
    )


class TakesZeroForTheEnd(Right):
    """Counts a request's pages by the entries of its page table."""

    def gather(self, layer: AttentionLayer, batch: ForwardBatch, number: int, num: int) -> tuple[Tensor, Tensor]:
        table = batch.page_table[batch.rows[number]]
        kept = torch.cat((table[table > 0], table[table == 0]))
        return super().gather(layer, replace(batch, page_table=kept[None], rows=batch.rows * 0), number, num)


class WrongScaleWhenGrouped(Right):
    def one(self, q: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        group = layer.num_qo_heads / layer.num_kv_heads
        super().one(q, keys, values, replace(layer, scale=layer.scale / group**0.5), out)


class UsualScale(Right):
    def one(self, q: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        super().one(q, keys, values, replace(layer, scale=layer.qk_dim**-0.5), out)


class OneHeadDim(Right):
    def one(self, q: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        super().one(q, keys, values, layer, out)
        if layer.qk_dim != 16:
            out[..., -1] = 0


class PagesOfPowersOfTwo(Right):
    def gather(self, layer: AttentionLayer, batch: ForwardBatch, number: int, num: int) -> tuple[Tensor, Tensor]:
        kv, size = self.kv_pool.layer(layer.index), self.kv_pool.page_size
        shift = size.bit_length() - 1
        places = torch.arange(num)
        pages = batch.page_table[batch.rows[number], places >> shift].long()
        return kv[pages, 0, places & (size - 1)], kv[pages, 1, places & (size - 1)]


class SkipsRows(Right):
    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, out: Any) -> None:
        self.attend(q, layer, batch, out, range(batch.num_decode // 2 * 2))


class ReadsUnownedPages(Right):
    def gather(self, layer: AttentionLayer, batch: ForwardBatch, number: int, num: int) -> tuple[Tensor, Tensor]:
        keys, values = super().gather(layer, batch, number, num)
        everything = self.kv_pool.layer(layer.index)
        return keys + 0 * everything[:, 0].sum(), values


class IgnoresRows(Right):
    def gather(self, layer: AttentionLayer, batch: ForwardBatch, number: int, num: int) -> tuple[Tensor, Tensor]:
        in_order = torch.arange(batch.num_requests)
        return super().gather(layer, replace(batch, rows=in_order), number, num)


class WritesToPage(Right):
    def write_kv(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        size = self.kv_pool.page_size
        kv, slots = self.kv_pool.layer(layer.index), batch.kv_slots
        kv[slots // size, 0, batch.positions % size] = k
        kv[slots // size, 1, (batch.positions + 1) % size] = v


class WritesPadding(Right):
    caps = replace(Right.caps, graph="decode")

    def write_kv(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        size = self.kv_pool.page_size
        kv, slots = self.kv_pool.layer(layer.index), batch.kv_slots
        kv[slots // size, 0, slots % size] = k
        kv[slots // size, 1, slots % size] = v


class AlwaysFirstLayer(Right):
    def gather(self, layer: AttentionLayer, batch: ForwardBatch, number: int, num: int) -> tuple[Tensor, Tensor]:
        return super().gather(replace(layer, index=1), batch, number, num)


class SyncsInDecode(Right):
    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, out: Any) -> None:
        longest = int(batch.seq_lens.max().item())
        assert longest > 0
        super().forward_decode(q, k, v, layer, batch, out)


class ListsInDecode(Right):
    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, out: Any) -> None:
        assert batch.seq_lens.tolist()
        super().forward_decode(q, k, v, layer, batch, out)


class MasksInDecode(Right):
    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, out: Any) -> None:
        super().forward_decode(q, k, v, layer, batch, out)
        out[batch.seq_lens == 0] = 0


class HostLensInDecode(Right):
    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, out: Any) -> None:
        assert batch.seq_lens_cpu[0] > 0
        super().forward_decode(q, k, v, layer, batch, out)


class PlansEveryReplay(Right):
    """Copies lengths in `plan`, as if a replay were planned too."""

    def plan(self, batch: ForwardBatch, phase: Phase) -> None:
        super().plan(batch, phase)
        self.is_recording = False


class TakesPaddingForTokens(Prefilling):
    """Takes all tokens of the batch for the chunk's own."""

    def last_place(self, batch: ForwardBatch, number: int, length: Tensor, end: Tensor) -> Tensor:
        return length - (end * 0 + batch.num_tokens if batch.num_decode == 0 else end)


class EightRows(Right):
    """Looks no further than eight rows."""

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, out: Any) -> None:
        super().forward_decode(q, k, v, layer, batch, out)
        if batch.num_decode > 8:
            out[8:] = out[:1]


class SevenRows(Right):
    """Has a way of its own for seven rows, and for their multiples."""

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, out: Any) -> None:
        super().forward_decode(q, k, v, layer, batch, out)
        if batch.num_decode % 7 == 0:
            out[6] = out[0]


class PlansOnce(Right):
    def plan(self, batch: ForwardBatch, phase: Phase) -> None:
        if len(self.lens) != batch.num_requests:
            super().plan(batch, phase)


class ChangesQueries(Right):
    def one(self, q: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        super().one(q, keys, values, layer, out)
        q.mul_(layer.scale)


class DependsOnTheBatch(Right):
    def attend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor, requests: range) -> None:
        super().attend(q, layer, batch, out, requests)
        out.mul_(1 + 1e-6 * batch.num_requests)


class DependsOnTheChunk(Right):
    def attend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor, requests: range) -> None:
        super().attend(q, layer, batch, out, requests)
        start = 0
        for _, new in (self.lens[number] for number in requests):
            out[start : start + new].mul_(1 + 1e-6 * (new == 1))
            start += new


class LatentDependsOnTheChunk(DependsOnTheChunk):
    def attend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor, requests: range) -> None:
        (super() if layer.latent else super(DependsOnTheChunk, self)).attend(q, layer, batch, out, requests)


class Boastful(Right):
    @classmethod
    def why_not(cls, config: Any, device: Any, dtype: Any, page_size: int) -> str | None:
        return None


class OneMaskForAllLayers(Right):
    window: Any = "unknown"

    def one(self, q: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        if self.window == "unknown":
            self.window = layer.sliding_window
        super().one(q, keys, values, replace(layer, sliding_window=self.window), out)


class ForgetsRest(MakesHeads):
    """Leaves out the part of a key that heads share."""

    forgets_rest = True


class KeysAsTheyWere(TorchNativeBackend):
    """Attends a prompt's own keys and values as they were before they were rounded for the cache."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._layout.fresh = lambda layer, k, v: (k, v)  # type: ignore[method-assign]


class ValuesAtTheEnd(Right):
    """Takes the last numbers of a latent row for its value."""

    def gather(self, layer: AttentionLayer, batch: ForwardBatch, number: int, num: int) -> tuple[Tensor, Tensor]:
        keys, values = super().gather(layer, batch, number, num)
        return keys, keys[..., -layer.v_dim :] if layer.latent else values


class WritesValuesOverKeys(Right):
    """Writes the values of a latent layer as well, with zeros behind them."""

    def write_kv(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        super().write_kv(layer, k, v, batch)
        if layer.latent:
            padded = torch.nn.functional.pad(v, (0, layer.qk_dim - layer.v_dim))
            super().write_kv(layer, padded, v, batch)


class KeysOfTheStep(Right):
    """Takes the step's own keys from its arguments, which a layer without a cache does not have."""

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, out: Any) -> None:
        assert k.shape[0] == q.shape[0]
        super().forward_extend(q, k, v, layer, batch, out)


class AsWideAsKeys(Right):
    """Forgets that values may be wider than keys."""

    def one(self, q: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        width = min(layer.qk_dim, layer.v_dim)
        super().one(q, keys, values[..., :width], layer, out[..., :width])
        out[..., width:] = 0


class OneWidthHasSinks(Right):
    """Forgets sinks where keys and values differ."""

    def one(self, q: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        sinks = layer.sinks if layer.qk_dim == layer.v_dim else None
        super().one(q, keys, values, replace(layer, sinks=sinks), out)


class RotatesNothing(FromProjection):
    rotates = False


class WritesNothing(FromProjection):
    writes = False


class TakesNeighboursForEqual(Sharing):
    def num_common(self, batch: ForwardBatch, number: int) -> int:
        return min(self.lens[number][0], self.lens[number - 1][0]) - 1


class SinksOfEveryPart(Sharing):
    shares = False

    def attend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor, requests: range) -> None:
        self.shares = batch.shares_prefixes
        super().attend(q, layer, batch, out, requests)

    def one(self, q: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        if self.shares and layer.sinks is not None:
            layer = replace(layer, sinks=layer.sinks + 2.0**0.5)
        super().one(q, keys, values, layer, out)


class PaddingShares(Sharing):
    def num_common(self, batch: ForwardBatch, number: int) -> int:
        if batch.kv_slots[number - 1] < 0:
            return min(self.kv_pool.page_size, self.lens[number][0] - 1)
        return super().num_common(batch, number)


class RemembersWhatIsCommon(Sharing):
    def __init__(self, config: Any, kv_pool: Any, device: torch.device) -> None:
        super().__init__(config, kv_pool, device)
        self.known: dict[int, int] = {}

    def num_common(self, batch: ForwardBatch, number: int) -> int:
        known = self.known.setdefault(number, super().num_common(batch, number))
        return min(known, self.lens[number][0] - 1)


FAULTS: dict[str, tuple[type[Right], str, str]] = {
    "wrong under page size 3": (PagesOfPowersOfTwo, "test_page_sizes", "wrong under page size 3"),
    "wrong for a head dim that it claims": (OneHeadDim, "test_every_head_dim_and_dtype", "head dim 8: wrong result at"),
    "NaN rows": (
        SkipsRows,
        "test_every_row_is_written",
        "NaN rows: a row of `out` is not written at request 4 (decode",
    ),
    "reads unowned pages": (ReadsUnownedPages, "test_page_sizes", "it reads a page that no request of the batch owns"),
    "host sync by item": (
        SyncsInDecode,
        "test_no_host_sync_in_decode",
        "host sync in decode, which caps.graph='decode'",
    ),
    "host sync by tolist": (ListsInDecode, "test_no_host_sync_in_decode", "tolist() at test_broken_attention.py"),
    "host sync by mask": (MasksInDecode, "test_no_host_sync_in_decode", "indexing with a mask at"),
    "host lengths in decode": (HostLensInDecode, "test_no_host_sync_in_decode", "host-side lengths are empty there"),
    "takes zero for the end": (TakesZeroForTheEnd, "test_pages_behind_a_window", "pages given back: wrong result at"),
    "ignores the window": (mistaken(ignores_window=True), "test_sliding_window", "it ignores the sliding window"),
    "window off by one": (mistaken(window_shift=1), "test_sliding_window", "window is one token too wide"),
    "ignores the chunk": (mistaken(ignores_chunk=True), "test_chunks", "it ignores the chunk"),
    "slides the chunk": (mistaken(slides_chunk=True), "test_chunks", "it takes the chunk for a sliding window"),
    "ignores sinks": (mistaken(ignores_sinks=True), "test_sinks", "it ignores the sinks"),
    "ignores the soft cap": (mistaken(ignores_soft_cap=True), "test_soft_cap", "it ignores the soft cap of the scores"),
    "ignores the prefix": (
        mistaken(ignores_prefix=True),
        "test_prefix_of_every_length",
        "prefill over 1 cached tokens: it ignores the cached prefix",
    ),
    "not causal": (mistaken(sees_the_future=True), "test_prefix_of_every_length", "it is not causal"),
    "causal where it must not be": (mistaken(is_causal=True), "test_both_directions", "it is causal, and the layer"),
    "a window to one side": (
        mistaken(looks_back_only=True),
        "test_both_directions",
        "its sliding window bounds what is before a token only",
    ),
    "causal within images": (blind(ignores_spans=True), "test_images_see_both_ways", "it is causal within an image"),
    "beyond its image": (blind(sees_later_spans=True), "test_images_see_both_ways", "a token sees what is behind its"),
    "a window within images": (blind(clips_spans=True), "test_images_see_both_ways", "what a token sees of its own"),
    "misses the newest token": (mistaken(misses_newest=1), "test_page_sizes", "it misses the newest token"),
    "wrong heads": (mistaken(interleaves_heads=True), "test_grouped_heads", "it takes KV head h % num_kv_heads"),
    "wrong scale with grouped heads": (
        WrongScaleWhenGrouped,
        "test_grouped_heads",
        "its scale is wrong with grouped heads",
    ),
    "scale of its own": (UsualScale, "test_scale_is_the_layers", "by 1/sqrt(head_dim), not by layer.scale"),
    "writes KV to the wrong slot": (
        WritesToPage,
        "test_write_kv_fills_the_given_slots",
        "write_kv writes to the wrong slot",
    ),
    "writes a graph's padding": (
        WritesPadding,
        "test_write_kv_leaves_a_graphs_padding_out",
        "write_kv writes for tokens with a negative slot",
    ),
    "ignores the row": (IgnoresRows, "test_rows_and_pages_in_any_order", "wrong with them shuffled"),
    "one layer for all": (AlwaysFirstLayer, "test_layers_are_kept_apart", "layer 0 of 3"),
    "plan of an earlier step": (
        PlansOnce,
        "test_steps_do_not_depend_on_each_other",
        "in a later step of the same instance",
    ),
    "one mask for all layers": (
        OneMaskForAllLayers,
        "test_layers_with_different_windows_in_one_step",
        "after a layer with another window",
    ),
    "keys that are not rounded": (KeysAsTheyWere, "test_a_cache_of_8_bits", "a cache in int8 with scales"),
    "value of a latent row": (ValuesAtTheEnd, "test_latent_rows", "whose first 8 numbers are the value"),
    "writes latent values": (
        WritesValuesOverKeys,
        "test_latent_rows",
        "latent rows whose first 8 numbers are the value",
    ),
    "one width for both": (
        AsWideAsKeys,
        "test_keys_and_values_of_different_widths",
        "head dim 8, values 16 wide",
    ),
    "sinks with one width only": (OneWidthHasSinks, "test_features_over_different_widths", "sinks"),
    "needs the step's keys": (KeysOfTheStep, "test_another_layers_cache", "it raised AttributeError: 'NoneType'"),
    "changes its inputs": (ChangesQueries, "test_inputs_are_only_read", "it changes q, which it must only read"),
    "not batch invariant": (DependsOnTheBatch, "test_batch_invariance", "not batch invariant: request 0"),
    "chunks round otherwise": (DependsOnTheChunk, "test_invariance_of_chunks", "tokens 64 to 65 differ in a chunk"),
    "latent chunks round otherwise": (LatentDependsOnTheChunk, "test_invariance_of_chunks", "latent rows whose"),
    "projection not rotated": (RotatesNothing, "test_decode_from_the_projection", "forward_decode_qkv: wrong result"),
    "projection not written": (
        WritesNothing,
        "test_decode_from_the_projection",
        "forward_decode_qkv writes wrong keys and values",
    ),
    "half a key": (ForgetsRest, "test_latent_chunks_by_heads", "forward_extend_latent: wrong result"),
    "takes neighbours for equal": (TakesNeighboursForEqual, "test_common_prefixes", "common prefixes: wrong result"),
    "sinks of every part": (SinksOfEveryPart, "test_common_prefixes_and_features", "common prefixes with sinks"),
    "padding shares": (PaddingShares, "test_common_prefixes_of_a_graphs_padding", "as padding"),
    "what was common": (
        RemembersWhatIsCommon,
        "test_a_hint_of_one_step_is_not_used_in_the_next",
        "after a step with other common prefixes",
    ),
    "wrong beyond eight rows": (EightRows, "test_every_number_of_rows", "9 decode rows: wrong result at request 8"),
    "wrong at seven rows": (SevenRows, "test_every_number_of_rows", "7 decode rows: wrong result at request 6"),
    "plans every replay": (
        PlansEveryReplay,
        "test_a_replay_needs_no_plan",
        "for other lengths than those that were planned",
    ),
    "takes padding for tokens": (
        TakesPaddingForTokens,
        "test_padded_prefill_of_a_graph",
        "padded to 24 tokens and 5 chunks",
    ),
    "claims too much": (Boastful, "test_why_not_is_honest", "why_not answers None for dtype float64"),
}


@pytest.mark.parametrize(
    ("backend", "select"),
    [
        pytest.param(Right, "", marks=pytest.mark.full),
        (FromProjection, "projection"),
        (SeesImages, "images_see"),
        (MakesHeads, "latent"),
        (Sharing, "common or hint"),
        (LargePages, "page_sizes or scale"),
        (Prefilling, "padded or replay"),
    ],
)
def test_a_right_backend_passes(backend: type[AttentionBackend], select: str) -> None:
    """The backends that the faults are made from have none: the first in all, others in what they do besides."""
    report = check_class(conformance_class("attention_backend", plugin_class=backend), select)
    assert report.passed, report.text()


@pytest.mark.first(16)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_names_the_fault(fault: str, caught: Callable[..., None]) -> None:
    """An attention backend with one fault fails the test for it, with a message that names it."""
    plugin, test, message = FAULTS[fault]
    caught("attention_backend", plugin, test, message, select=test)
