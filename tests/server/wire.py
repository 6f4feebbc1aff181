"""A bare connection to a server, for requests that no HTTP library would send."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from harness import Harness

HOST = b"host: localhost\r\n"
JSON_TYPE = b"content-type: application/json\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"


def request(line: bytes = b"GET /livez HTTP/1.1", headers: bytes = b"", body: bytes = b"") -> bytes:
    """Write a request with a right `Host`."""
    return line + b"\r\n" + HOST + headers + b"\r\n" + body


def post(path: bytes, body: Any, headers: bytes = b"") -> bytes:
    """Write a POST of JSON."""
    data = json.dumps(body).encode()
    length = b"content-length: %d\r\n" % len(data)
    return request(b"POST %b HTTP/1.1" % path, JSON_TYPE + length + headers, data)


@dataclass
class Reply:
    """A reply as it was read."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str | None:
        """The `code` of an error."""
        found = json.loads(self.body)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found["code"]  # type: ignore[no-any-return]


@dataclass
class Wire:
    """One connection."""

    socket: socket.socket
    rest: bytes = b""
    sent: int = 0
    log: list[Reply] = field(default_factory=list)

    @classmethod
    def to(cls, harness: Harness, address: str = "127.0.0.1") -> Wire:
        """Connect; `address` is where from."""
        return cls(socket.create_connection(("127.0.0.1", harness.port), timeout=60, source_address=(address, 0)))

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """Send; false where the server has ended the connection."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        self.sent += len(data)
        return True

    def reply(self) -> Reply | None:
        """Read one reply, or None where the connection ends before one."""
        while b"\r\n\r\n" not in self.rest:
            if not self._more():
                assert not self.rest, self.rest
                return None
        head, _, self.rest = self.rest.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        length = int(headers["content-length"])
        while len(self.rest) < length:
            assert self._more(), "the connection ended within a body"
        body, self.rest = self.rest[:length], self.rest[length:]
        reply = Reply(int(lines[0].split()[1]), headers, body)
        self.log.append(reply)
        return reply

    def is_closed(self) -> bool:
        """Wait for the end of the connection; false if there is something else to read, or it stays open for 5 s."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            self.socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                data = self.socket.recv(1 << 16)
            except TimeoutError:
                return False
            except ConnectionResetError:
                return True
            finally:
                self.socket.settimeout(60)
            if not data:
                return not self.rest
            self.rest += data
        return False

    def is_open(self) -> bool:
        """Tell whether another request is answered."""
        return self.send(request()) and (reply := self.reply()) is not None and reply.status == 200

    def _more(self) -> bool:
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            return False
        self.rest += data
        return bool(data)


def still_answers(harness: Harness) -> bool:
    """Tell whether the server serves somebody else."""
    with Wire.to(harness) as other:
        return other.is_open()
