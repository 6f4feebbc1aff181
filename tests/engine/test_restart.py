"""An engine that dies or hangs is started again, and what was open goes on without gap or repeat."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

import pytest
from restarting import Reading, kill, make_engine, make_scripted, mixed, plain, ready

from dovetail.contracts.errors import EngineDeadError, EngineError
from dovetail.contracts.observers import LoadStats, StatLogger
from dovetail.messages import SamplerParams, Submit
from dovetail_server.observe.observers import Observers
from dovetail_server.supervision import engine_process
from dovetail_server.supervision.engine_process import Restarts

SCRIPTED_AND_REAL = [False, pytest.param(True, marks=pytest.mark.full)]


@pytest.mark.parametrize(("num", "most", "max_tokens"), [(9, 7, 40), pytest.param(64, 16, 160, marks=pytest.mark.full)])
def test_open_streams_go_on_through_a_kill_as_if_nothing_was(
    num: int, most: int, max_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams of every sort, more than run at once, and a kill in the middle: bit for bit an undisturbed run."""

    async def main() -> None:
        client = make_engine(dtype="float32", max_running_requests=most)
        await client.start()
        try:
            submits = mixed(num, max_tokens)
            want = await Reading(client, submits).end()
            reading = Reading(client, submits)
            await reading.reach(sum(len(each[0]) for each in want) // 3)
            await kill(client)
            late = Reading(client, submits[:3])  # while there is no engine
            asked = asyncio.create_task(client.control("stats"))
            assert await reading.end() == want
            assert await late.end() == want[:3]
            assert (await asked)["num_running"] >= 0
            assert (client.num_restarts, client.dead) == (1, None)
            assert (await client.control("stats"))["num_used_tokens"] == 0
        finally:
            await client.close()

    asyncio.run(main())
    lines = [record.getMessage() for record in caplog.records if record.name == "dovetail.engine"]
    assert any("killed by SIGKILL. It is started again" in line for line in lines)
    assert any("The engine is back after" in line for line in lines)


@pytest.mark.parametrize("real", SCRIPTED_AND_REAL)
def test_kills_at_random_moments_lose_and_double_nothing(real: bool) -> None:
    """Several in a row, some before the engine is back: every stream ends as in an undisturbed run, none is refused."""

    async def main() -> None:
        rng = random.Random(1)
        restarts = Restarts(max_restarts=40)
        client = make_engine(restarts, dtype="float32") if real else make_scripted(restarts)
        await client.start()
        try:
            submits = mixed(24, 400) if real else plain(40, 400)
            want = await Reading(client, submits).end()
            reading = Reading(client, submits)
            for _ in range(10 if real else 5):
                await reading.reach(reading.num_tokens + rng.randrange(1, 60))
                await asyncio.sleep(rng.uniform(0, 0.2))
                await kill(client)
                if rng.random() < 0.7:
                    await ready(client)
            assert await reading.end() == want
            assert client.num_restarts >= 3
        finally:
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("real", SCRIPTED_AND_REAL)
def test_a_stopped_engine_is_ended_and_its_streams_go_on(real: bool) -> None:
    """SIGSTOP: after the limit the engine counts as hanging; sixteen streams finish as if nothing was."""

    async def main() -> None:
        client = make_engine(dtype="float32") if real else make_scripted(Restarts(hang_s=0.8))
        await client.start()
        try:
            submits = mixed(16) if real else plain(16)
            want = await Reading(client, submits).end()
            reading = Reading(client, submits)
            await reading.reach(400)
            first, began = client.pid, time.monotonic()
            await kill(client, signal.SIGSTOP)
            assert await reading.end() == want
            assert time.monotonic() - began > (30 if real else 0.8)
            assert client.pid != first
            assert client.num_restarts == 1
        finally:
            await client.close()

    asyncio.run(main())


def test_aborts_and_ends_while_there_is_no_engine() -> None:
    """An abort ends its request at once, a closed stream is not resumed, and the others go on."""

    async def main() -> None:
        client = make_scripted()
        await client.start()
        try:
            params = SamplerParams(max_tokens=300)
            streams = [client.submit(Submit(rid="", prompt_ids=[5, 6, i], params=params)) for i in range(4)]
            for stream in streams:
                await anext(stream)
            streams[0].abort()
            await kill(client)
            assert client.restarting is not None
            streams[1].abort()
            await streams[2].aclose()
            for stream in streams[:2]:
                last = [delta async for delta in stream][-1]
                assert last.finish is not None
                assert last.finish.reason == "abort"
            assert client.restarting is not None, "the aborts waited for the engine"
            assert sum([len(delta.ids) async for delta in streams[3]]) >= 290
            assert (await client.control("stats"))["num_running"] == 0
        finally:
            await client.close()

    asyncio.run(main())


def test_loggers_of_load_are_told_through_a_restart() -> None:
    """What asks the engine at intervals goes on asking the next one."""
    seen: list[int] = []

    class Logger(StatLogger):
        interval_s = 0.02

        def log(self, stats: LoadStats) -> None:
            seen.append(stats.num_running)

    async def main() -> None:
        client = make_scripted()
        await client.start()
        observers = Observers()
        observers.add("dovetail_stat_loggers", "acme", Logger())
        feeding = asyncio.create_task(observers.log_stats(client))
        try:
            for num in range(1, 4):
                before = len(seen)
                while len(seen) < before + 3:
                    assert not feeding.done()
                    await asyncio.sleep(0.01)
                await kill(client)
                await ready(client)
                assert client.num_restarts == num
        finally:
            feeding.cancel()
            observers.close()
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 120))


def fails_after(path: Path, text: str) -> tuple[str, ...]:
    """A program in the engine's place."""
    path.write_text(text, encoding="utf-8")
    return (str(path),)


def test_a_crash_loop_ends(tmp_path: Path) -> None:
    """An engine that cannot start again ends the client after three tries, one that dies too often after the limit."""

    async def main() -> None:
        client = make_scripted()
        await client.start()
        params = SamplerParams(max_tokens=18000)
        stream = client.submit(Submit(rid="", prompt_ids=[1], params=params))
        await anext(stream)
        client.command = fails_after(tmp_path / "fails.py", "raise SystemExit(7)")
        await kill(client)
        with pytest.raises(EngineDeadError, match=r"exit code 7.*not get ready 3 times in a row"):
            async for _ in stream:
                pass
        await client.close()
        client = make_scripted(Restarts(max_restarts=1, window_s=600))
        await client.start()
        await kill(client)
        await ready(client)
        await kill(client)
        while client.dead is None:
            await asyncio.sleep(0.01)
        assert "died 2 times within 600 s" in client.dead
        await client.close()

    asyncio.run(asyncio.wait_for(main(), 200))


@pytest.mark.parametrize("connects", [False, True])
def test_an_engine_that_never_comes_up_is_not_awaited_for_ever(
    connects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that does not connect, or connects and says nothing more, fails the start after the limit."""
    monkeypatch.setattr(engine_process, "CONNECT_S", 4.0 if connects else 0.8)
    monkeypatch.setattr(engine_process, "START_STALL_S", 0.8)
    text = "import socket, sys, time\n"
    text += "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n" if connects else ""

    async def main() -> None:
        client = make_engine()
        client.command = fails_after(tmp_path / "silent.py", text + "time.sleep(600)\n")
        match = "did not get on with its start" if connects else "did not connect within"
        with pytest.raises(EngineError, match=match):
            await client.start()
        assert client.pid is not None
        assert not Path(f"/proc/{client.pid}").exists()

    asyncio.run(asyncio.wait_for(main(), 60))
