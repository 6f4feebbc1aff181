"""The batches in which attention backends are compared with float64, and what the checks of all of them share."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.attention import Phase
from dovetail.contracts.needs import AttentionCaps
from dovetail_testing.checks import check, fail
from dovetail_testing.conformance.attention_graph import rerun
from dovetail_testing.conformance.attention_world import Case, make_backend, make_world, verify
from dovetail_testing.conformance.base import Conformance

DECODE = ((7, 1), (33, 1), (1, 1), (16, 1), (15, 1))
PREFILL = ((0, 9), (0, 1), (0, 33), (5, 4), (16, 16), (31, 2), (15, 1))
MIXED = ((7, 1), (40, 1), (0, 9), (13, 4), (20, 1))
WHOLE = ((0, 9), (0, 1), (0, 33), (0, 300), (0, 16))
SEEING = ((7, 1), (40, 1), (0, 9), (20, 45), (0, 1), (37, 70))
SEEN_SPANS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((2, 6),),
    (),
    ((0, 4), (4, 9)),
    ((3, 11), (18, 40), (44, 65)),
    (),
    ((37, 103),),
)
"""Images of these: cached, side by side, first and last, cut by what is cached, and longer than a tile of queries."""
ROWS = (*range(1, 18), 21, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 250, 255, 256)
"""Numbers of decode rows: small ones, powers of two and their neighbours, and others; multiples of all small primes."""
COMMON = ((150, 1), (200, 1), (131, 1), (129, 1), (3, 1), (70, 1), (300, 1), (64, 1))
COMMON_TOKENS = (
    (0, 150, 150, 150, 0, 0, 70, 64),
    (0, 130, 130, 130, 3, 3, 70, 64),
    (0, 64, 64, 64, 0, 0, 0, 0),
)
"""Several prefixes side by side, one through all rows but for the shortest, and one of some rows only."""


class AttentionChecks(Conformance):
    """What the checks of an attention backend share; the attributes stand at `AttentionBackendConformance`."""

    device: ClassVar[str | None]
    page_sizes: ClassVar[tuple[int, ...]]
    dtype: ClassVar[torch.dtype | None]

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

    def _two_dims(self) -> tuple[int, int]:
        """A wide and a narrow head that the caps allow."""
        dims = sorted(self._caps().head_dims or (16, 24))
        return dims[-1], dims[0]

    def _need_gpu(self) -> None:
        if "cuda" not in self._caps().devices:
            pytest.skip("the backend does not run on cuda")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
