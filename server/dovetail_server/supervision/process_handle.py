"""One life of the engine process: started, connected, listened to, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec

from dovetail.base.frames import FrameReader, frame
from dovetail.base.process_limits import ENGINE_ENVIRONMENT
from dovetail.messages import EngineFailed, FromEngine, ToEngine
from dovetail_server.supervision.wire import Start, SubmitEncoder

# The directory of the socket between server and engine, which only this user can enter.
#
# A server that was killed leaves its directory behind. So each holds a lock on its own for as long as it lives, which
# the system releases when it dies, and removes the directories without a holder.

PREFIX = "dovetail-engine-"
SOCKET = "engine.sock"
TRIES = 10
MAX_PATH = 104
"""Bytes of a socket's path, its end included, that every system takes."""


class SocketDir:
    """A directory in the system's one for temporary files.

    Attributes:
        path: Of the socket in it.
    """

    def __init__(self) -> None:
        """Make and lock it.

        Raises:
            OSError: There is no room for it.
        """
        for _ in range(TRIES):
            directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_parent()))  # mode 0700
            held = _lock(directory)
            if held is not None:
                self._directory, self._held, self.path = directory, held, directory / SOCKET
                return
        raise OSError(f"directories of sockets cannot be locked in {_parent()}")

    def close(self) -> None:
        """Remove it."""
        _remove(self._directory)
        os.close(self._held)


def remove_stale() -> None:
    """Remove the directories of servers that were killed."""
    with contextlib.suppress(OSError), os.scandir(_parent()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and _is_own(entry):
                directory = Path(entry.path)
                held = _lock(directory)
                if held is not None:
                    _remove(directory)
                    os.close(held)


def _parent() -> str:
    """The directory for temporary files; /tmp where a socket's path would be too long in it."""
    found = tempfile.gettempdir()
    longest = os.path.join(found, f"{PREFIX}12345678", SOCKET)
    return found if len(os.fsencode(longest)) < MAX_PATH else "/tmp"


def _is_own(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        found = entry.stat(follow_symlinks=False)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def _lock(directory: Path) -> int | None:
    """Return the lock's descriptor; None if another process has it or has removed the directory."""
    try:
        held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(held), os.stat(directory)):
            return held
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(held)
        raise
    os.close(held)
    return None


def _remove(directory: Path) -> None:
    """Remove a directory that holds only a socket; other files stay, and the directory with them."""
    with contextlib.suppress(OSError):
        (directory / SOCKET).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


LAST_WORDS_S = 5.0
"""Time for what a dead engine had said to arrive."""
BACKLOG_BYTES = 1 << 16
"""So much at once from the engine means that this process is behind."""


class EngineProcess:
    """An engine process and the Unix socket to it, in a directory that only this user can enter.

    The socket is the death pipe in both directions: when either process dies, by whatever signal, the kernel closes
    it and the other one notices.

    Attributes:
        is_ready: The engine has started; set by whoever hears it say so.
        has_hung: It was ended for standing still; set by whoever ends it.
        failure: The engine's own word on why it failed.
    """

    def __init__(self, command: Sequence[str], start: Start, receive: Callable[[FromEngine], None]) -> None:
        """Prepare.

        Args:
            command: Arguments of the interpreter, before the path of the socket.
            start: What the engine is started with.
            receive: Called with all that it says.
        """
        self.is_ready = self.has_hung = False
        self.failure: EngineFailed | None = None
        self._command, self._start, self._receive = command, start, receive
        self._requests = SubmitEncoder()
        self._link: EngineConnection | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ended_for: str | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the engine, once it is on its way."""
        return self._process.pid if self._process is not None else None

    @property
    def is_connected(self) -> bool:
        """Whether the engine has come up far enough to connect."""
        return self._link is not None

    @property
    def ended_from_outside(self) -> bool:
        """Whether neither the engine nor its client ended it."""
        code = None if self._process is None else self._process.returncode
        return self._ended_for is None and code in (-signal.SIGKILL, -signal.SIGTERM)

    async def run(self) -> str:
        """Live, to the end; returns why it came. Cancelling ends the process."""
        loop = asyncio.get_running_loop()
        place: SocketDir | None = None
        server: asyncio.AbstractServer | None = None
        try:
            remove_stale()
            place = SocketDir()
            server = await loop.create_unix_server(lambda: EngineConnection(self), str(place.path))
            environment = {**ENGINE_ENVIRONMENT, **os.environ, "PYTHONUNBUFFERED": "1"}
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *self._command, str(place.path), stdin=asyncio.subprocess.DEVNULL, env=environment
            )
            await self._process.wait()
        except OSError as error:
            return f"the engine process could not be started: {error}"
        finally:
            if server is not None:
                server.close()
            if place is not None:
                place.close()
            await self._end()
        return self._why()

    def send(self, message: ToEngine) -> None:
        """Send one message, unless the engine is gone or not there yet."""
        if self._link is not None:
            self._link.send(self._requests.encode(message))

    def kill(self, why: str) -> None:
        """End the process at once, if it has not ended."""
        if self._process is not None and self._process.returncode is None:
            self._ended_for = self._ended_for or why
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def wait(self, limit_s: float) -> bool:
        """Wait for the end of the process; False if it did not come in time."""
        if self._process is None:
            return True
        try:
            await asyncio.wait_for(self._process.wait(), limit_s)
        except TimeoutError:
            return False
        return True

    def connected(self, link: EngineConnection) -> bool:
        """Take the connection of the engine, the first that comes."""
        if self._link is not None:
            return False
        self._link = link
        link.send(msgspec.msgpack.encode(self._start))
        return True

    def heard(self, message: FromEngine) -> None:
        """Pass on what the engine said."""
        if isinstance(message, EngineFailed):
            self.failure = message
        self._receive(message)

    async def _end(self) -> None:
        self.kill("its client has ended")
        if self._process is not None:
            await self._process.wait()
        if self._link is not None:
            await self._link.wait_closed(LAST_WORDS_S)  # what it said last arrives first
            self._link.close()

    def _why(self) -> str:
        code = None if self._process is None else self._process.returncode
        if self.failure is not None:
            return self.failure.message
        if self._ended_for is not None:
            return self._ended_for
        if code is not None and code < 0:
            return f"the engine process was killed by {signal.Signals(-code).name}"
        return f"the engine process ended with exit code {code}"


class EngineConnection(asyncio.Protocol):
    """The client's end of the socket. All messages that have come are taken at once."""

    def __init__(self, handle: EngineProcess) -> None:
        """Prepare; the transport brings the rest."""
        self._handle = handle
        self._heard = handle.heard
        self._frames = FrameReader()
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Offer itself to the client."""
        self._transport = cast("asyncio.Transport", transport)
        if not self._handle.connected(self):
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Take what has arrived. After a lot of it the streams go first: more of theirs gathers in the socket."""
        for payload in self._frames.feed(data):
            self._heard(self._decode(payload))
        if len(data) >= BACKLOG_BYTES and self._transport is not None:
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
