"""The engine over an executor that is a script: the messages alone say all that a device has to know."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from script_executor import ENDS, VOCAB, ScriptExecutor, next_token, state_of

from dovetail.demo import MODEL_DIR
from dovetail.engine.core import EngineCore
from dovetail.messages import Abort, Finish, SamplerParams, Submit
from dovetail.messages.step import AT_DEVICE, NONE, SAMPLE
from dovetail.plugins import load
from dovetail_testing.engine import make_plans

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])


def start(overlap: bool, *, num_pages: int = 80, rows: int = 6, page_size: int = 4) -> tuple[EngineCore, Any]:
    """An engine without a model."""
    settings, plan = make_plans(
        MODEL_DIR, max_running_requests=rows, overlap_on_cpu=overlap, disable_overlap_schedule=not overlap,
        chunked_prefill_size=24, page_size=page_size,
    )  # fmt: skip
    executor = ScriptExecutor(num_pages=num_pages, page_size=page_size)
    return EngineCore(settings, load(plan, "engine"), executor, eos_ids=ENDS), executor


def want(prompt: list[int], params: SamplerParams, seed: int) -> list[int]:
    """What a request gets, by itself."""
    tokens = list(prompt)
    for _ in range(params.max_tokens):
        tokens.append(next_token(seed, tuple(tokens)))
        if tokens[-1] in params.stop_token_ids:
            break
    return tokens[len(prompt) :]


class Run:
    """Steps an engine; the books are right after every step."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.pooled: dict[int, float] = {}

    def submit(self, handle: int, prompt: list[int], params: SamplerParams, **more: Any) -> None:
        """Send a request."""
        self.tokens[handle] = []
        self.core.handle(Submit(rid="", handle=handle, prompt_ids=prompt, params=params, **more))

    def step(self) -> None:
        """Make one step."""
        for delta in self.core.step().deltas:
            self.tokens[delta.handle] += delta.ids
            if delta.pooled is not None:
                self.pooled[delta.handle] = np.frombuffer(delta.pooled, dtype=np.float32)[0]
            if delta.finish is not None:
                self.finishes[delta.handle] = delta.finish
        assert self.core.pages.check_counts(self.core.scheduler.running)
        assert self.core.pages.check_ownership(self.core.scheduler.running)

    def drain(self) -> None:
        """Until nothing is left."""
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work
        assert self.core.pages.check_ownership([])
        assert self.core.pages.num_used == 0


@BOTH
@pytest.mark.parametrize("seed", range(6))
def test_random_loads_leave_nothing_unsaid(seed: int, overlap: bool) -> None:
    """Prefixes, chunks, stops, aborts, retractions, failing steps and numbers that are not finite: the right tokens."""
    rng = random.Random(seed)
    size = rng.choice([1, 4])
    core, executor = start(overlap, num_pages=rng.choice([60, 240]) // size, page_size=size)
    executor.fails = lambda step: step.step % 17 == 5
    bad: set[int] = set()

    def finite(step: Any, at: int) -> bool:
        if step.step % 23 != 7 or at != len(step.rows) - 1:
            return True
        bad.add(step.step)
        return False

    executor.finite = finite
    run, asked = Run(core), {}
    pools = [rng.choice([None, None, "last", "mean"]) for _ in range(40)]
    shared = [rng.randrange(90) for _ in range(11)]
    for handle in range(40):
        prompt = shared * rng.randrange(2) + [rng.randrange(90) for _ in range(rng.randrange(1, 30))]
        stops = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 8])))
        params = SamplerParams(
            max_tokens=rng.randrange(1, 12), stop_token_ids=stops, ignore_eos=True, seed=handle,
        )  # fmt: skip
        asked[handle] = prompt, params
        run.submit(handle, prompt, params, pool=pools[handle])
        for _ in range(rng.randrange(3)):
            run.step()
        if rng.random() < 0.15:
            core.handle(Abort(rng.randrange(handle + 1)))
    run.drain()
    ended = [handle for handle, finish in run.finishes.items() if "not finite" in (finish.message or "")]
    assert len(ended) <= len(bad)
    assert len(run.finishes) == len(asked)
    for handle, (prompt, params) in asked.items():
        if pools[handle] is not None:
            states = [state_of(tuple(prompt[: at + 1])) for at in range(len(prompt))]
            mean = np.float32(np.mean(states if pools[handle] == "mean" else states[-1]))
            assert run.pooled.get(handle, mean) == mean
            assert (handle in run.pooled) == (run.finishes[handle].reason == "stop")
            assert not run.tokens[handle]
            continue
        right = want(prompt, params, handle)
        if run.finishes[handle].reason == "abort":
            assert run.tokens[handle] == right[: len(run.tokens[handle])]
        else:
            assert run.tokens[handle] == right


def test_rows_stand_in_the_order_of_the_contract() -> None:
    """Rows that decode, chunks that end what is known, other chunks; ids of the chunks alone."""
    core, executor = start(False)
    run = Run(core)
    run.submit(1, [1, 2, 3], SamplerParams(max_tokens=20, ignore_eos=True))
    run.step()
    run.submit(2, [5] * 30, SamplerParams(max_tokens=3, ignore_eos=True))
    run.submit(3, [6, 7], SamplerParams(max_tokens=3, ignore_eos=True))
    run.step()
    run.step()
    step = executor.steps[2]
    assert step.start.tolist() == [AT_DEVICE, 24, 0]
    assert step.num_new.tolist() == [1, 6, 2]
    assert step.task.tolist() == [SAMPLE, SAMPLE, SAMPLE]
    assert step.ids.tolist() == [5] * 6 + [6, 7]
    assert executor.steps[1].task.tolist() == [SAMPLE, NONE]
    assert (executor.steps[1].num_decode, executor.steps[1].num_sampled) == (1, 1)


def test_a_batch_that_is_what_it_was_is_the_same_arrays() -> None:
    """And nothing else of a step is new, but where a page is needed; a request that leaves makes another batch."""
    core, executor = start(True, num_pages=400, page_size=16)
    run = Run(core)
    for handle in range(5):
        run.submit(handle, [handle] * 3, SamplerParams(max_tokens=8 if handle == 2 else 40, ignore_eos=True))
    run.drain()
    decode = [step for step in executor.steps if step.num_decode == len(step.rows)]
    kept = [a for a, b in pairwise(decode) if a.rows is b.rows]
    assert len(kept) >= len(decode) - 5
    for before, step in pairwise(decode):
        if step.rows is before.rows:
            assert step.start is before.start
            assert step.waits is before.waits
            assert step.admit == ()
            assert step.ids.size == step.zeroed.size == 0
    assert sum(step.cleared.size for step in decode) <= 5
    assert sum(step.tables.shape[1] > 0 for step in decode) <= 3 * len(decode) // 16 + 5


def test_how_a_request_is_sampled_travels_once() -> None:
    """With its admission; again after a retraction, with its history if tokens are counted."""
    core, executor = start(False, num_pages=9)
    core.scheduler.ratio.value = core.scheduler.ratio.floor = 0.0  # type: ignore[misc]
    run = Run(core)
    plain = SamplerParams(max_tokens=24, ignore_eos=True, seed=3)
    counted = SamplerParams(max_tokens=24, ignore_eos=True, seed=4, frequency_penalty=0.5)
    run.submit(1, [1, 2, 3, 4], plain)
    run.submit(2, [5, 6, 7], counted)
    run.drain()
    admits = [admit for step in executor.steps for admit in step.admit]
    assert [admit.params for admit in admits[:2]] == [plain, counted]
    assert [admit.history for admit in admits[:2]] == [(), (5, 6, 7)]
    again = admits[2:]
    assert again, "nobody was retracted"
    for admit in again:
        if admit.params == counted:
            as_times = [5, 6, 7, *run.tokens[2]]
            assert list(admit.history) == as_times[: len(admit.history)]
            assert len(admit.history) > 3
        else:
            assert admit.history == ()


def test_a_step_is_told_of_changes_once_even_if_it_fails() -> None:
    """What a failed step said of rows and pages is not said again, and holds."""
    core, executor = start(False)
    run = Run(core)
    executor.fails = lambda step: step.step in (1, 6)
    for handle in (1, 2):
        run.submit(handle, [handle, 2, 3], SamplerParams(max_tokens=6, ignore_eos=True, seed=9))
    run.drain()
    for handle in (1, 2):
        assert run.tokens[handle] == want([handle, 2, 3], SamplerParams(max_tokens=6), 9)


def test_an_engine_imports_no_torch() -> None:
    """Nor what computes its steps."""
    code = (
        "import sys, dovetail.engine.core, dovetail_server.supervision.engine_process, dovetail.messages.executor\n"
        "found = [m for m in sys.modules if m == 'torch' or m.startswith(('dovetail.runtime', 'dovetail.executor'))]\n"
        "print(found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_outputs_belong_to_rows_not_to_owners() -> None:
    """A row that is taken again before its last step was read gets nothing of the one who had it."""
    core, executor = start(True, rows=1)
    run = Run(core)
    for handle in range(6):
        run.submit(handle, [handle, 2], SamplerParams(max_tokens=1 + handle % 3, ignore_eos=True, seed=handle))
    run.drain()
    for handle in range(6):
        assert run.tokens[handle] == want([handle, 2], SamplerParams(max_tokens=1 + handle % 3), handle)
    assert {int(row) for step in executor.steps for row in step.rows} == {0}
    assert np.unique([step.step for step in executor.steps]).size == len(executor.steps)


@BOTH
def test_a_second_request_under_a_running_ones_handle_is_one_line(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The request that has the handle goes on as alone, also where the second could be refused at once."""
    core, _ = start(overlap)
    run = Run(core)
    run.submit(7, [1, 2, 3], SamplerParams(max_tokens=6, seed=5))
    run.step()
    for prompt in ([4, 5], []):
        core.handle(Submit(rid="", handle=7, prompt_ids=prompt, params=SamplerParams(max_tokens=2, seed=1)))
    run.drain()
    assert run.tokens[7] == want([1, 2, 3], SamplerParams(max_tokens=6), 5)
    assert [record.getMessage() for record in caplog.records if "handle" in record.getMessage()] == [
        "Ignored a request: handle 7 belongs to one that has not ended; use another."
    ] * 2
