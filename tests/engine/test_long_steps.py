"""A step that takes long is no hang as long as its layers get on; what never returns is ended; a retry is smaller."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from restarting import make_engine
from warm_starts import CODE

from dovetail.engine.limits import StepLimits
from dovetail.engine.recovery import MAX_PATIENCE, PATIENCE, Recovery
from dovetail.messages import Finish, SamplerParams, Submit
from dovetail_server.supervision.engine_process import ProcessClient, Restarts

BODY = """
import ctypes, pathlib, sys, time
from dovetail_server.supervision import engine_main
from dovetail.sdk.layers.decoder import DecoderLayer

forward, number = DecoderLayer.forward, [0]

def changed(self, stream, rope, batch):
    tokens, layer = len(batch.positions), number[0] % 8
    number[0] += 1
    {}
    return forward(self, stream, rope, batch)

DecoderLayer.forward = changed
sys.exit(engine_main.main(sys.argv[1:]))
"""
PROMPT = [7 + i % 200 for i in range(500)]


def engine(each_layer: str, hang_s: float, num_ranks: int = 1) -> ProcessClient:
    """The demo model, whose layers do something else first, on the first rank; its start has steps of 12 tokens."""
    client = make_engine(Restarts(hang_s=hang_s), chunked_prefill_size=512, tensor_parallel_size=num_ranks)
    client.command = (CODE, BODY.format(each_layer))
    return client


async def ask(client: ProcessClient, max_tokens: int = 3) -> tuple[list[int], Finish | None]:
    """Read the reply to a long prompt."""
    params = SamplerParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    deltas = [delta async for delta in client.submit(Submit(rid="", prompt_ids=PROMPT, params=params))]
    return [i for delta in deltas for i in delta.ids], deltas[-1].finish


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_step_may_take_longer_than_the_limit(num_ranks: int) -> None:
    """Eight layers of half a second each, with 2 s to get on: nothing is ended, no rank is blamed, the reply comes."""

    async def main() -> None:
        client = engine("time.sleep(0.5 if tokens > 50 else 0)", 2.0, num_ranks)
        await client.start()
        try:
            began = time.monotonic()
            ids, finish = await ask(client)
            assert time.monotonic() - began > 4
            assert (len(ids), finish) == (3, Finish("length"))
            assert client.num_restarts == 0
        finally:
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "never",
    [
        pytest.param("time.sleep(600)", marks=pytest.mark.full),
        pytest.param("ctypes.PyDLL(None).sleep(600)", id="in C"),
    ],
)
def test_a_layer_that_never_returns_is_ended_within_the_limit(never: str, tmp_path: Path) -> None:
    """Also where it keeps Python's lock, and although the layers before took long; the next engine answers."""
    mark, at = tmp_path / "mark", tmp_path / "at"
    code = f"""
    mark = pathlib.Path({str(mark)!r})
    if tokens > 50 and not mark.exists():
        time.sleep(0.3)
        if layer == 5:
            mark.write_text(str(time.monotonic()))
            {never}
"""

    async def main() -> None:
        client = engine(code, 3.0)
        await client.start()
        try:
            asked = asyncio.create_task(ask(client))
            while client.restarting is None:
                await asyncio.sleep(0.01)
            at.write_text(str(time.monotonic()))
            assert "no step and no layer for" in client.restarting
            ids, finish = await asked
            assert (len(ids), finish) == (3, Finish("length"))
            assert client.num_restarts == 1
        finally:
            await client.close()

    asyncio.run(main())
    took_s = float(at.read_text()) - float(mark.read_text())
    assert 1.5 < took_s < 30, took_s  # the engine's end is noticed later, on a busy machine by seconds


def test_a_chunk_whose_layers_take_too_long_is_smaller_in_the_next_engine() -> None:
    """Five milliseconds a token: 500 at once never come to the end of a layer, 64 do; nobody is refused."""

    async def main() -> None:
        client = engine("time.sleep(0.005 * tokens if layer == 0 else 0)", 1.5)
        await client.start()
        try:
            ids, finish = await ask(client)
            assert (len(ids), finish) == (3, Finish("length"))
            assert client.num_restarts == 1
        finally:
            await client.close()

    asyncio.run(main())


def test_hangs_in_a_row_shrink_chunks_and_good_steps_bring_them_back() -> None:
    """An eighth for each, at least a page, and for longer each time; prompts that cannot be cut are not."""
    limits = StepLimits(max_running_requests=8, max_prefill_tokens=4096)

    def after(num: int, limits: StepLimits = limits) -> tuple[Recovery, Any]:
        scheduler: Any = SimpleNamespace(limits=limits, pages=SimpleNamespace(page_size=16), poison_candidates=[])
        recovery = Recovery(scheduler)
        recovery.hung(num)
        return recovery, scheduler

    assert [after(num)[1].limits.max_prefill_tokens for num in range(5)] == [4096, 512, 64, 16, 16]
    whole = StepLimits(max_running_requests=8, max_prefill_tokens=4096, cut_prompts=False)
    assert after(3, whole)[1].limits is whole
    recovery, scheduler = after(2)
    plan: Any = SimpleNamespace(requests=[1])
    for _ in range(4 * PATIENCE):
        assert scheduler.limits.max_prefill_tokens == 64
        recovery.worked(plan)
    assert scheduler.limits.max_prefill_tokens == 128
    for _ in range(5 * 4 * PATIENCE):
        recovery.worked(plan)
    assert scheduler.limits is limits
    assert after(60)[0]._patience == MAX_PATIENCE
