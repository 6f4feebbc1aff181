"""The engine in its own process: start, failure, death of either side."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest
from restarting import make_scripted

from dovetail.base.frames import FrameReader, frame
from dovetail.base.settings import EngineSettings
from dovetail.contracts.errors import ConfigError, EngineDeadError
from dovetail.messages import SamplerParams, StepDeltas, Submit, TokenDelta
from dovetail.plugins import Registry, make_plan
from dovetail_server.supervision.engine_process import ProcessClient, Restarts
from dovetail_server.supervision.process_handle import BACKLOG_BYTES, EngineConnection, EngineProcess
from dovetail_testing.engine import collect, tokens


def process_client(folder: Path, **changes: object) -> ProcessClient:
    """A client of an engine process for a tiny Qwen3."""
    settings = EngineSettings.model_validate({"model_path": str(folder), "max_total_tokens": 4096, **changes})
    plan = make_plan(Registry.scan(), model="Qwen3ForCausalLM", attention_backend="auto", device="cpu")
    return ProcessClient(settings, plan, log_level="warning")


def long_request(rid: str = "a") -> Submit:
    """A request that runs for a while."""
    return Submit(rid=rid, prompt_ids=[1, 2, 3], params=SamplerParams(max_tokens=400, temperature=0, ignore_eos=True))


def gone(pid: int, within_s: float = 60) -> bool:
    """Whether a process disappears in time."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if "State:\tZ" in Path(f"/proc/{pid}/status").read_text(encoding="ascii"):
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_requests_run_in_the_engine_process_and_close_ends_it(qwen3: Path) -> None:
    """Concurrent requests are served across the socket, and after `close` the process is gone."""

    async def main() -> int:
        client = process_client(qwen3)
        info = await client.start()
        assert (info.architecture, info.max_total_tokens) == ("Qwen3ForCausalLM", 4096)
        outputs = await asyncio.gather(*(collect(client, long_request(str(i))) for i in range(5)))
        assert len({tuple(tokens(deltas)) for deltas in outputs}) == 1
        assert client.step > 0
        first, *_, last = (row["step"] for row in (await client.control("steps"))["steps"])
        assert first < last
        assert (await client.control("steps", after=last - 1))["steps"][0]["step"] == last
        pid = client.pid
        await client.close()
        await client.close()
        with pytest.raises(EngineDeadError):
            client.submit(long_request())
        assert pid is not None
        return pid

    assert gone(asyncio.run(main()))


def test_without_restarts_a_killed_engine_ends_every_stream_with_an_error() -> None:
    """After `kill -9` of the engine, open streams and later calls raise, none hangs."""

    async def main() -> None:
        client = make_scripted(Restarts(max_restarts=0))
        await client.start()
        stream = client.submit(long_request())
        await anext(stream)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"killed by SIGKILL.*restarts are off"):
            async for _ in stream:
                pass
        assert client.dead is not None
        with pytest.raises(EngineDeadError):
            await client.control("stats")
        await client.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_configuration_error_of_the_engine_reaches_the_parent(qwen3: Path) -> None:
    """What is wrong inside the engine process comes back as one ConfigError, and the process ends."""

    async def main() -> None:
        client = process_client(qwen3, context_length=100, chunked_prefill_size=0)
        with pytest.raises(ConfigError, match="chunked-prefill-size 0"):
            await client.start()
        assert client.pid is None or gone(client.pid)

    asyncio.run(main())


def test_the_engine_ends_when_its_parent_is_killed(qwen3: Path, tmp_path: Path) -> None:
    """After `kill -9` of the parent, the engine process exits by itself, also in mid-request."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio, sys
            from dovetail.messages import SamplerParams, Submit
            from dovetail_server.supervision.engine_process import ProcessClient
            from dovetail.plugins import Registry, make_plan
            from dovetail.base.settings import EngineSettings

            async def main():
                plan = make_plan(Registry.scan(), model="Qwen3ForCausalLM", attention_backend="auto", device="cpu")
                client = ProcessClient(EngineSettings(model_path={str(qwen3)!r}, max_total_tokens=4096), plan)
                await client.start()
                while True:
                    params = SamplerParams(max_tokens=400, ignore_eos=True)
                    async for _ in client.submit(Submit(rid="a", prompt_ids=[1], params=params)):
                        print(client.pid, flush=True)

            asyncio.run(main())
            """
        ),
        encoding="utf-8",
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.stdout.close()
    assert gone(pid)


class Wire(asyncio.Transport):
    """Notes whether it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")

    def write(self, data: object) -> None:
        self.calls.append("write")


def test_streams_go_before_more_messages_when_there_are_many(qwen3: Path) -> None:
    """After a lot of messages at once the socket is left alone until those who wait for them have run."""

    async def main() -> None:
        client, wire = process_client(qwen3), Wire()
        client._handle = life = EngineProcess((), client._start_message, client._take)
        life.is_ready = True
        link = EngineConnection(life)
        link.connection_made(wire)
        stream = client.submit(long_request())
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        del wire.calls[:]
        delta = TokenDelta(handle=1, ids=[1] * 100, prompt_tokens=3)
        message = frame(msgspec.msgpack.encode(StepDeltas(step=1, deltas=[delta])))
        link.data_received(message)
        assert wire.calls == []
        link.data_received(message * (BACKLOG_BYTES // len(message) + 1))
        assert wire.calls == ["pause"]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert wire.calls == ["pause", "resume"]
        assert len((await reader).ids) == 100 * (BACKLOG_BYTES // len(message) + 2)

    asyncio.run(main())


def test_frames_survive_any_cut() -> None:
    """Frames come out whole whatever the pieces in which the bytes arrive."""
    payloads = [b"", b"a", b"bc" * 300, b"d"]
    stream = b"".join(frame(p) for p in payloads)
    for size in (1, 2, 5, 7, 100, len(stream)):
        reader = FrameReader()
        found = [f for at in range(0, len(stream), size) for f in reader.feed(stream[at : at + size])]
        assert found == payloads
