"""What every attention backend must do, on the devices, sizes and features that its `caps` claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.attention import Phase
from dovetail.contracts.cache import SCALED_DTYPES, ScaledDtype
from dovetail.contracts.needs import AttentionCaps
from dovetail.testing.checks import check, fail, raised
from dovetail.testing.conformance.attention_graph import capture_and_replay, padded_prefill, rerun
from dovetail.testing.conformance.attention_latent import verify_latent_heads
from dovetail.testing.conformance.attention_qkv import verify_qkv
from dovetail.testing.conformance.attention_world import (
    NUM_LAYERS,
    Case,
    check_untouched,
    compare,
    make_backend,
    make_world,
    plain,
    readable,
    verify,
)
from dovetail.testing.conformance.base import Conformance
from dovetail.testing.conformance.host_sync import HostSyncs

DECODE = ((7, 1), (33, 1), (1, 1), (16, 1), (15, 1))
PREFILL = ((0, 9), (0, 1), (0, 33), (5, 4), (16, 16), (31, 2), (15, 1))
MIXED = ((7, 1), (40, 1), (0, 9), (13, 4), (20, 1))
WHOLE = ((0, 9), (0, 1), (0, 33), (0, 300), (0, 16))
ROWS = (1, 2, 3, 5, 8, 9, 13, 16, 17, 33, 64, 100, 129, 255, 256)
"""Numbers of decode rows: powers of two, their neighbours, and others."""
COMMON = ((150, 1), (200, 1), (131, 1), (129, 1), (3, 1), (70, 1), (300, 1), (64, 1))
COMMON_TOKENS = (
    (0, 150, 150, 150, 0, 0, 70, 64),
    (0, 130, 130, 130, 3, 3, 70, 64),
    (0, 64, 64, 64, 0, 0, 0, 0),
)
"""Several prefixes side by side, one through all rows but for the shortest, and one of some rows only."""


class AttentionBackendConformance(Conformance):
    """What every attention backend must do.

    Attributes:
        device: Where to test; None: on the CPU if the backend runs there, else on CUDA.
        page_sizes: Page sizes to test, of those that `caps` allows.
        dtype: For the grid; None: the most exact that `caps` allows.
    """

    kind = "attention_backend"
    device: ClassVar[str | None] = None
    page_sizes: ClassVar[tuple[int, ...]] = (1, 3, 16, 64)
    dtype: ClassVar[torch.dtype | None] = None

    def _caps(self) -> AttentionCaps:
        caps = getattr(self.plugin(), "caps", None)
        if not isinstance(caps, AttentionCaps):
            fail("the class has no `caps`: say what it can do with AttentionCaps(…)")
        return caps

    def _device(self) -> torch.device:
        caps = self._caps()
        name = self.device or ("cpu" if "cpu" in caps.devices else sorted(caps.devices)[0])
        if name == "cuda" and not torch.cuda.is_available():
            pytest.skip("the backend runs on cuda only, and there is no CUDA device here")
        return torch.device(name)

    def _case(self, lengths: Any, **changes: Any) -> Case:
        """A case within the caps: their page size, head dim and dtype where they do not take any."""
        caps = self._caps()
        pages, dims = caps.page_sizes, caps.head_dims
        dtypes = [getattr(torch, name) for name in ("float32", "float16", "bfloat16") if name in caps.dtypes]
        fitting: dict[str, Any] = {
            "page_size": 16 if pages is None or 16 in pages else min(pages),
            "head_dim": 16 if dims is None or 16 in dims else min(dims),
            "dtype": self.dtype or dtypes[0],
        }
        return Case(lengths=lengths, **{**fitting, **changes})

    def _verify(self, lengths: Any, what: str = "", **changes: Any) -> None:
        verify(self.plugin(), self._case(lengths, **changes), self._device(), what)

    # The standard tests.

    def test_why_not_is_honest(self) -> None:
        """`why_not` refuses in one line what `caps` does not claim, and nothing that they do."""
        backend, device = self.plugin(), self._device()
        case = self._case(DECODE)
        answer = backend.why_not(case.config(), device, case.dtype, case.page_size)
        check(answer is None, f"why_not refuses what caps claim ({case}): {answer}")
        wrong = {
            "dtype float64": (case.config(), device, torch.float64, case.page_size),
            "device meta": (case.config(), torch.device("meta"), case.dtype, case.page_size),
        }
        if self._caps().page_sizes is not None:
            wrong["page size 7777"] = (case.config(), device, case.dtype, 7777)
        needs: dict[str, dict[str, Any]] = {
            "sliding_window": {"window": 4},
            "chunked": {"chunk": 4},
            "soft_cap": {"soft_cap": 30.0},
            "sinks": {"sinks": True},
            "bidirectional": {"bidirectional": True},
        }
        needs |= {name: {"cache_dtype": name} for name in SCALED_DTYPES}
        needs["latent"], needs["unequal_dims"] = {"latent": True, "num_kv_heads": 1}, {"v_dim": 2 * case.head_dim}
        others = self._caps().mixers | self._caps().cache_dtypes
        served = {name: getattr(self._caps(), name, name in others) for name in needs}
        for name, changes in needs.items():
            if not served[name]:
                wrong[f"a model with {name}"] = (replace(case, **changes).config(), device, case.dtype, case.page_size)
        for what, arguments in wrong.items():
            answer = backend.why_not(*arguments)
            one_line = isinstance(answer, str) and bool(answer) and "\n" not in answer
            check(one_line, f"why_not answers {answer!r} for {what}, which caps do not claim; say why in one line")

    def test_write_kv_fills_the_given_slots(self) -> None:
        """New keys and values stand exactly in `batch.kv_slots` of their layer, and nothing else is written."""
        for size in self._page_sizes():
            world = make_world(self._case(MIXED, page_size=size), self._device())
            backend = make_backend(self.plugin(), world)
            backend.plan(world.batch, Phase.EAGER)
            want = world.pool.memory.clone()
            pages, offsets = world.batch.kv_slots // size, world.batch.kv_slots % size
            want[world.layer.index, pages, 0, offsets], want[world.layer.index, pages, 1, offsets] = world.k, world.v
            backend.write_kv(world.layer, world.k, world.v, world.batch)
            wrong = want.nan_to_num(nan=-9.0) != world.pool.memory.nan_to_num(nan=-9.0)
            if bool(wrong.any()):
                layer, page, which, offset = (int(i) for i in wrong.nonzero()[0][:4])
                fail(
                    f"write_kv writes to the wrong slot: layer {layer}, page {page}, {('keys', 'values')[which]}, "
                    f"offset {offset} differs ({world.case}); slots are page * page_size + offset"
                )

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

    def test_every_row_is_written(self) -> None:
        """An output filled with NaN is finite afterwards, in decode, prefill and mixed batches."""
        for name, lengths in (("decode", DECODE), ("prefill", PREFILL), ("mixed", MIXED), ("one row", ((3, 1),))):
            self._verify(lengths, name)

    def test_every_number_of_rows(self) -> None:
        """Batches of 1 to 256 decode rows, and as many short prompts, agree with float64."""
        for num in ROWS:
            self._verify([(1 + 7 * i % 23, 1) for i in range(num)], f"{num} decode rows")
        for num in (9, 33, 100):
            self._verify([(3 * i % 5, 1 + i % 3 + (3 * i % 5 > 0)) for i in range(num)], f"{num} prefill chunks")

    @pytest.mark.parametrize("size", [1, 3, 16, 64])
    def test_page_sizes(self, size: int) -> None:
        """Decode, prefill and mixed batches agree with float64 for every page size that `caps` allows."""
        if size not in self._page_sizes():
            pytest.skip(f"caps do not allow page size {size}, or the class does not test it")
        for lengths in (DECODE, PREFILL, MIXED):
            self._verify(lengths, f"wrong under page size {size}", page_size=size)

    def test_prefix_of_every_length(self) -> None:
        """Prefill over 0 … n cached tokens agrees with float64."""
        for cached in (*range(0, 5), 15, 16, 17, 31, 32, 33):
            self._verify([(cached, 3), (cached, 17)], f"prefill over {cached} cached tokens")

    @pytest.mark.parametrize(("query", "kv"), [(4, 2), (6, 2), (8, 1), (14, 2)])
    def test_grouped_heads(self, query: int, kv: int) -> None:
        """Groups of query heads share a KV head, neighbours first."""
        for lengths in (DECODE, PREFILL, MIXED):
            self._verify(lengths, f"{query} query heads over {kv} KV heads", num_qo_heads=query, num_kv_heads=kv)

    def test_scale_is_the_layers(self) -> None:
        """Scores are multiplied by `layer.scale`, whatever the head dim."""
        for scale in (0.05, 1.0):
            self._verify(MIXED, scale=scale, num_kv_heads=2)

    def test_every_head_dim_and_dtype(self) -> None:
        """Each dtype and head dim that `caps` claims works, within the dtype's rounding."""
        caps = self._caps()
        for dim in sorted(caps.head_dims or (8, 64, 100, 128)):
            self._verify(MIXED, f"head dim {dim}", head_dim=dim)
        for name in sorted(caps.dtypes):
            self._verify(MIXED, f"dtype {name}", dtype=getattr(torch, name), num_kv_heads=2)

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

    def test_another_layers_cache(self) -> None:
        """A layer without a cache reads another one's: its keys and values are None, and are in the pool."""
        for lengths in (DECODE, PREFILL, MIXED):
            self._verify(lengths, reads_another=True, num_kv_heads=2)

    def test_rows_and_pages_in_any_order(self) -> None:
        """Device rows and page ids come in any order: both are looked up, never assumed."""
        case = self._case(MIXED)
        verify(self.plugin(), plain(case), self._device())
        verify(self.plugin(), case, self._device(), "right with rows and pages in order, wrong with them shuffled")

    def test_layers_are_kept_apart(self) -> None:
        """Each layer reads and writes its own part of the pool."""
        for layer in range(NUM_LAYERS):
            self._verify(MIXED, f"layer {layer} of {NUM_LAYERS}", layer=layer)

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
        with HostSyncs() as syncs:
            try:
                backend.plan_in_graph(world.batch)
                got = world.attend(backend)
            except Exception as error:  # a stranger's backend; the message says what it did
                fail(
                    f"decode as it is recorded into a graph (host-side lengths are empty there) raised {raised(error)}"
                )
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

    def test_batch_invariance(self) -> None:
        """Where `caps` claim it, a request's result has the same bits whatever else is in the batch."""
        if not self._caps().batch_invariant:
            pytest.skip("caps claim no batch invariance")
        for lengths in (DECODE, PREFILL):
            case = self._case(lengths)
            whole = make_world(case, self._device())
            together = whole.run(make_backend(self.plugin(), whole))
            start = 0
            for number, (cached, new) in enumerate(lengths):
                alone = _only(whole.case, number, self._device())
                got = alone.run(make_backend(self.plugin(), alone))
                same = torch.equal(got, together[start : start + new])
                check(
                    same, f"not batch invariant: request {number} ({cached} cached, {new} new) differs alone ({case})"
                )
                start += new

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

    @pytest.mark.gpu
    def test_grid_on_a_gpu(self) -> None:
        """On CUDA too, batches of every shape agree with float64."""
        self._need_gpu()
        device = torch.device("cuda")
        for size in self._page_sizes():
            for lengths in (DECODE, PREFILL, MIXED):
                for query, kv in ((4, 4), (6, 2), (8, 1)):
                    case = self._case(lengths, page_size=size, num_qo_heads=query, num_kv_heads=kv)
                    verify(self.plugin(), case, device, "on a GPU")

    @pytest.mark.gpu
    def test_capture_and_replay(self) -> None:
        """A decode step recorded into a CUDA graph and replayed on other lengths equals the eager step."""
        self._need_gpu()
        if self._caps().graph == "none":
            pytest.skip("caps claim no graphs")
        capture_and_replay(self.plugin(), self._case(DECODE))
        for common in COMMON_TOKENS:
            capture_and_replay(self.plugin(), self._case(COMMON, common=common))

    def _need_gpu(self) -> None:
        if "cuda" not in self._caps().devices:
            pytest.skip("the backend does not run on cuda")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")

    def _two_dims(self) -> tuple[int, int]:
        """A wide and a narrow head that the caps allow."""
        dims = sorted(self._caps().head_dims or (16, 24))
        return dims[-1], dims[0]

    def _verify_layout(self, changes: dict[str, Any]) -> None:
        """Serve batches of a layout under every page size, in graphs where there are some; nothing else is written."""
        for size in self._page_sizes():
            for lengths in (DECODE, PREFILL, MIXED):
                self._verify(lengths, f"page size {size}", page_size=size, **changes)
        world = make_world(self._case(MIXED, **changes), self._device())
        backend = make_backend(self.plugin(), world)
        backend.plan(world.batch, Phase.EAGER)
        before = [memory.clone() for memory in world.pool.everything]
        size, slots = world.case.page_size, world.batch.kv_slots
        backend.write_kv(world.layer, world.k, world.v, world.batch)
        got = [memory.clone() for memory in world.pool.everything]
        for memory, old in zip(world.pool.everything, before, strict=True):
            memory.copy_(old)
        world.pool.write(world.layer.index, slots // size, slots % size, world.k, world.v)
        same = all(
            torch.equal(a.float().nan_to_num(-9.0), b.float().nan_to_num(-9.0))
            for a, b in zip(world.pool.everything, got, strict=True)
        )
        check(same, f"write_kv writes other keys and values, or elsewhere than in batch.kv_slots ({world.case})")
        if self._caps().graph != "none":
            rerun(self.plugin(), self._case(DECODE, **changes), self._device())

    def _page_sizes(self) -> list[int]:
        allowed = self._caps().page_sizes
        return [size for size in self.page_sizes if allowed is None or size in allowed] or sorted(allowed or ())[:3]


def _only(case: Case, number: int, device: torch.device) -> Any:
    """The same request as in the batch, alone: as many requests are drawn, and one is kept."""
    whole, keep = make_world(case, device), slice(number, number + 1)
    alone = make_world(replace(case, lengths=[case.lengths[number]]), device)
    alone.parts = whole.parts[keep]
    q, k, v = alone.parts[0]
    cached = case.lengths[number][0]
    alone.q, alone.k, alone.v = q, k[cached:].contiguous(), v[cached:].contiguous()
    row = alone.batch.rows[0]
    places = torch.arange(cached, device=device)
    pages = alone.batch.page_table[row, places // case.page_size].long()
    alone.pool.memory[case.layer, pages, 0, places % case.page_size] = k[:cached]
    alone.pool.memory[case.layer, pages, 1, places % case.page_size] = v[:cached]
    return alone
