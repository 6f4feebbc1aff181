"""What a step costs the host beside its computing, at 256 decode rows: `python tests/benchmarks/step_build.py`.

No model. Building a step whose batch is what it was; one that has lost a row; and the masks of all rows, which grammars
write into the memory that the device copies from. Microseconds, medians of 500.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dovetail.engine.device_rows import DeviceRows
from dovetail.engine.request import EngineRequest, StepPlan
from dovetail.engine.step_builder import GraphChooser, StepBuilder
from dovetail.grammar.matching.bitmask import fill_masks
from dovetail.messages import SamplerParams, Submit
from dovetail.messages.step import ExecutorInfo, PrepareResult
from dovetail.runtime.sampling.masks import MaskBuffer

NUM_ROWS, NUM_TIMES, NUM_WORDS = 256, 500, (151_936 + 31) // 32
INFO = ExecutorInfo(
    architecture="", dtype="", device="cpu", vocab_size=1, hidden_size=1, context_len=1,
    page_size=16, num_pages=(1,),
    reaches=(), chunk_size=1, attention_backend="", prefix_group=0, weight_bytes=0, kv_bytes=0, load_s=0.0, graphs=(),
    prepared=PrepareResult(),
)  # fmt: skip


class Line:
    """In place of a constraint: its mask is one write."""

    matching = backend = None

    def fill(self, row: Any, matched: bool) -> bool:
        """Allow all."""
        row[:] = -1
        return True


def microseconds(call: Callable[[], object]) -> float:
    """Median of a call."""
    took = []
    for _ in range(NUM_TIMES):
        started = time.perf_counter()
        call()
        took.append(time.perf_counter() - started)
    return 1e6 * statistics.median(took)


def main() -> int:
    """Measure and print."""
    params = SamplerParams(max_tokens=9)
    requests = []
    for row in range(NUM_ROWS):
        submit = Submit(rid="", handle=row, prompt_ids=[1] * 40, params=params)
        requests.append(EngineRequest.from_submit(submit, arrival=row, eos_ids=()))
        requests[-1].row, requests[-1].pages = row, [[row * 4 + 1]]
    builder = StepBuilder(DeviceRows(NUM_ROWS), GraphChooser(INFO, lambda key: PrepareResult()))
    same = microseconds(lambda: builder.build(StepPlan(list(requests), [])))
    turn = [requests[:-1], requests]
    other = microseconds(lambda: builder.build(StepPlan(list(turn[0]), [])) if turn.reverse() is None else None)
    lines: list[Any] = [Line() for _ in requests]
    buffer = MaskBuffer(NUM_WORDS, torch.device("cpu"))
    memory = buffer.lend(NUM_ROWS)
    written = microseconds(lambda: memory.fill(-1))
    masks = microseconds(lambda: fill_masks(lines, [False] * NUM_ROWS, buffer.lend))
    sent = buffer.mask_of(np.arange(NUM_ROWS, dtype=np.int32))
    is_one = sent is not None and sent.words.data_ptr() == memory.ctypes.data
    print(f"step of {NUM_ROWS} rows as before: {same:.0f} µs; of another batch: {other:.0f} µs")
    print(f"{NUM_ROWS} masks: {masks:.0f} µs, of which writing them once {written:.0f}; sent from there: {is_one}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
