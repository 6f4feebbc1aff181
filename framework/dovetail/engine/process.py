"""The client of an engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec

from dovetail.engine.messages import Control, EngineInfo, FromEngine, ToEngine
from dovetail.engine.streams import StreamClient
from dovetail.engine.wire import FrameReader, Start, frame
from dovetail.plugins import PluginPlan
from dovetail.settings import EngineSettings

CONNECT_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0


class ProcessClient(StreamClient):
    """Starts the engine process and speaks to it over a Unix socket in a directory that only this user can enter.

    The socket is the death pipe in both directions: when either process dies, by whatever signal, the kernel closes
    it and the other one notices.
    """

    def __init__(self, settings: EngineSettings, plan: PluginPlan, *, log_level: str = "info") -> None:
        super().__init__()
        self._start_message = Start(
            settings=EngineSettings.model_validate(
                {name: getattr(settings, name) for name in EngineSettings.model_fields}
            ).model_dump(mode="json"),
            plan=plan,
            log_level=log_level,
        )
        self._encoder = msgspec.msgpack.Encoder()
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> EngineInfo:
        """See `EngineClient.start`."""
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        directory = tempfile.mkdtemp(prefix="dovetail-")  # mode 0700
        path = Path(directory) / "engine.sock"
        server = await asyncio.start_unix_server(self._connected, path)
        try:
            # Threads that spin at a barrier starve each other as soon as the machine has anything else to do: on two
            # busy cores a decode step took 300 ms instead of 5. Waiting passively costs microseconds.
            environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONUNBUFFERED": "1"}
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "dovetail.engine.main",
                str(path),
                stdin=asyncio.subprocess.DEVNULL,
                env=environment,
            )
            self._tasks.append(loop.create_task(self._watch(self._process)))
            return await asyncio.shield(self._started)
        except BaseException:
            await self.close()
            raise
        finally:
            server.close()
            shutil.rmtree(directory, ignore_errors=True)

    async def close(self) -> None:
        """See `EngineClient.close`."""
        self._closing = True
        if self._writer is not None and self._dead is None:
            self._send(Control(id=0, op="shutdown"))
        if self._process is not None and self._process.returncode is None:
            try:
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        if self._writer is not None:
            self._writer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._lost("the engine was closed")

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(self._encoder.encode(message)))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            writer.close()
            return
        self._writer = writer
        writer.write(frame(self._encoder.encode(self._start_message)))
        self._tasks.append(asyncio.get_running_loop().create_task(self._read(reader)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = FrameReader()
        decoder = msgspec.msgpack.Decoder(FromEngine)
        while data := await reader.read(1 << 20):
            for payload in frames.feed(data):
                self._receive(decoder.decode(payload))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._tasks[1:]:
            await asyncio.wait(self._tasks[1:], timeout=STOP_TIMEOUT_S)  # let what it said last arrive first
        self._lost("the engine was closed" if self._closing else f"the engine process ended with exit code {code}")
