"""A real engine, behind the real transport, whose device only takes time: so much for a step and for each token."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dovetail.contracts.cache import FULL
from dovetail.engine.core import EngineCore
from dovetail.engine.loop import ClosedError, run_loop
from dovetail.messages import ProfileSpec, Ready
from dovetail.messages.step import ExecutorInfo, GraphKey, PrepareResult, StepInput, StepLate, StepOutput
from dovetail.plugins import load
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_server.supervision.wire import SocketTransport
from dovetail_testing.engine import make_plans

CONTEXT_LEN = 1 << 17
PAGE_SIZE = 16
NUM_TOKENS = 1 << 20
WEIGHTS_PER_S = 2e12
"""Bytes of weights that a step reads in a second, beside its tokens."""


class PacedExecutor:
    """Computes nothing: a step is done when its time is over, one after another, and every token is the same."""

    progress = 0

    def __init__(self, vocab_size: int, step_s: float, token_s: float) -> None:
        """Seconds that a step takes, and each token of a prompt beside it."""
        self._step_s, self._token_s = step_s, token_s
        self._free_at = 0.0
        self._flying: deque[tuple[float, StepOutput]] = deque()
        self._masks = np.zeros((256, (vocab_size + 31) // 32), dtype=np.int32)
        self.info = ExecutorInfo(
            architecture="Paced", dtype="float32", device="cpu", vocab_size=vocab_size, hidden_size=1,
            context_len=CONTEXT_LEN, page_size=PAGE_SIZE, num_pages=(NUM_TOKENS // PAGE_SIZE,), reaches=(FULL,),
            chunk_size=8192, attention_backend="none", prefix_group=0, weight_bytes=int(step_s * WEIGHTS_PER_S),
            kv_bytes=0, load_s=0.0, graphs=(), prepared=PrepareResult(),
        )  # fmt: skip

    def launch(self, step: StepInput) -> None:
        """Begin when the step before is done."""
        took = self._step_s + self._token_s * int(step.num_new[step.num_new > 1].sum())
        self._free_at = max(self._free_at, time.perf_counter()) + took
        num = np.zeros(len(step.rows), dtype=np.int32)
        num[: step.num_sampled] = 1
        output = StepOutput(
            step=step.step, num=num, tokens=np.full(step.num_sampled, 5, dtype=np.int64),
            finite=np.ones(len(step.rows), dtype=np.bool_),
        )  # fmt: skip
        self._flying.append((self._free_at, output))

    def read(self) -> StepOutput:
        """Wait until the oldest step is done."""
        done_at, output = self._flying.popleft()
        time.sleep(max(0.0, done_at - time.perf_counter()))
        return output

    def masks(self, num: int) -> npt.NDArray[np.int32]:
        """Nobody looks at them."""
        return self._masks[:num]

    def choose(self, late: StepLate) -> None:
        """Every token is the same."""

    def is_computing(self) -> bool:
        """Never."""
        return False

    def device_memory(self) -> tuple[int, int]:
        """No device."""
        return 0, 0

    def prepare(self, key: GraphKey | None = None) -> PrepareResult:
        """There are no graphs."""
        return PrepareResult()

    def check(self) -> None:
        """There is nothing to look after."""

    def start_profile(self, spec: ProfileSpec) -> None:
        """Record nothing."""

    def stop_profile(self) -> list[str]:
        """Write nothing."""
        return []

    def close(self) -> None:
        """Nothing runs beside it."""


def main() -> None:
    """Connect and serve."""
    step_s, token_s, folder, path = float(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    transport = SocketTransport(path)
    transport.receive_start()
    settings, plan = make_plans(
        folder, load_format="dummy", max_total_tokens=NUM_TOKENS, page_size=PAGE_SIZE, max_running_requests=256,
        overlap_on_cpu=True,
    )  # fmt: skip
    executor = PacedExecutor(Tokenizer.load(folder).vocab_size, step_s, token_s)
    core = EngineCore(settings, load(plan, "engine"), executor, eos_ids=())
    transport.send(Ready(core.info))
    with contextlib.suppress(ClosedError):
        run_loop(core, transport)


if __name__ == "__main__":
    main()
