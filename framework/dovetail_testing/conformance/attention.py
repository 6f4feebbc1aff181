"""What every attention backend must do, on the devices, sizes and features that its `caps` claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.attention import Phase
from dovetail.contracts.cache import SCALED_DTYPES
from dovetail_testing.checks import check, fail
from dovetail_testing.conformance.attention_cases import DECODE, MIXED, PREFILL, ROWS, SEEN_SPANS
from dovetail_testing.conformance.attention_features import FeatureChecks, PrefixChecks
from dovetail_testing.conformance.attention_steps import AttentionInvarianceChecks, StepChecks
from dovetail_testing.conformance.attention_world import NUM_LAYERS, make_backend, make_world, plain, verify


class AttentionBackendConformance(FeatureChecks, StepChecks, AttentionInvarianceChecks, PrefixChecks):
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

    def test_why_not_is_honest(self) -> None:
        """`why_not` refuses in one line what `caps` does not claim, and nothing that they do."""
        backend, device = self.plugin(), self._device()
        case = self._case(DECODE)
        answer = backend.why_not(case.config(), device, case.dtype, case.page_size)
        check(answer is None, f"why_not refuses what caps claim ({case}): {answer}")
        wrong = {
            "dtype float64": (case.config(), device, torch.float64, case.page_size),
        }
        if "*" not in self._caps().devices:
            wrong["device meta"] = (case.config(), torch.device("meta"), case.dtype, case.page_size)
        if self._caps().page_sizes is not None:
            wrong["page size 7777"] = (case.config(), device, case.dtype, 7777)
        needs: dict[str, dict[str, Any]] = {
            "sliding_window": {"window": 4},
            "chunked": {"chunk": 4},
            "soft_cap": {"soft_cap": 30.0},
            "sinks": {"sinks": True},
            "bidirectional": {"bidirectional": True},
            "spans": {"spans": SEEN_SPANS},
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

    def test_rows_and_pages_in_any_order(self) -> None:
        """Device rows and page ids come in any order: both are looked up, never assumed."""
        case = self._case(MIXED)
        verify(self.plugin(), plain(case), self._device())
        verify(self.plugin(), case, self._device(), "right with rows and pages in order, wrong with them shuffled")

    def test_layers_are_kept_apart(self) -> None:
        """Each layer reads and writes its own part of the pool."""
        for layer in range(NUM_LAYERS):
            self._verify(MIXED, f"layer {layer} of {NUM_LAYERS}", layer=layer)

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
