"""The client of an engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import cast

import msgspec

from dovetail.engine.messages import Control, EngineInfo, FromEngine, ToEngine
from dovetail.engine.streams import StreamClient
from dovetail.engine.wire import FrameReader, Start, frame
from dovetail.plugins import PluginPlan
from dovetail.settings import EngineSettings

CONNECT_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
LOT_BYTES = 1 << 16
"""So much at once from the engine means that this process is behind."""


class ProcessClient(StreamClient):
    """Starts the engine process and speaks to it over a Unix socket in a directory that only this user can enter.

    The socket is the death pipe in both directions: when either process dies, by whatever signal, the kernel closes
    it and the other one notices.
    """

    def __init__(self, settings: EngineSettings, plan: PluginPlan, *, log_level: str = "info") -> None:
        super().__init__(seed=settings.random_seed)
        self.command: tuple[str, ...] = ("-m", "dovetail.engine.main")
        """Arguments of the interpreter, before the path of the socket."""
        self._start_message = Start(
            settings=EngineSettings.model_validate(
                {name: getattr(settings, name) for name in EngineSettings.model_fields}
            ).model_dump(mode="json"),
            plan=plan,
            log_level=log_level,
        )
        self._encoder = msgspec.msgpack.Encoder()
        self._link: _Link | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
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
        server = await loop.create_unix_server(lambda: _Link(self), str(path))
        try:
            # Threads that spin at a barrier starve each other as soon as the machine has anything else to do: on two
            # busy cores a decode step took 300 ms instead of 5. Waiting passively costs microseconds.
            environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONUNBUFFERED": "1"}
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self.command,
                str(path),
                stdin=asyncio.subprocess.DEVNULL,
                env=environment,
            )
            self._watcher = loop.create_task(self._watch(self._process))
            return await asyncio.shield(self._started)
        except BaseException:
            await self.close()
            raise
        finally:
            server.close()
            shutil.rmtree(directory, ignore_errors=True)

    async def close(self, *, wait: bool = True) -> None:
        """See `EngineClient.close`."""
        self._closing = True
        if self._link is not None and self._dead is None:
            self._send(Control(id=0, op="shutdown"))
        if self._process is not None and self._process.returncode is None:
            try:
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S if wait else 0)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        if self._link is not None:
            self._link.close()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        self._lost("the engine was closed")

    def connected(self, link: _Link) -> bool:
        """Take the connection of the engine, the first that comes."""
        if self._link is not None:
            return False
        self._link = link
        link.send(self._encoder.encode(self._start_message))
        return True

    def _send(self, message: ToEngine) -> None:
        if self._link is not None:
            self._link.send(self._encoder.encode(message))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._link is not None:
            await self._link.wait_closed(STOP_TIMEOUT_S)  # let what it said last arrive first
        self._lost("the engine was closed" if self._closing else f"the engine process ended with exit code {code}")


class _Link(asyncio.Protocol):
    """The client's end of the socket. All messages that have come are taken at once."""

    def __init__(self, client: ProcessClient) -> None:
        self._client = client
        self._receive = client._receive
        self._frames = FrameReader()
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Offer itself to the client."""
        self._transport = cast("asyncio.Transport", transport)
        if not self._client.connected(self):
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Take what has arrived. After a lot of it the streams go first: more of theirs gathers in the socket."""
        for payload in self._frames.feed(data):
            self._receive(self._decode(payload))
        if len(data) >= LOT_BYTES and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that nothing more will come."""
        self._closed.set()

    def send(self, payload: bytes) -> None:
        """Send one message, unless the engine is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(payload))

    def close(self) -> None:
        """Close the socket."""
        if self._transport is not None:
            self._transport.close()

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait until the engine has closed its end and everything from it has been taken."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), timeout_s)
