"""A cheap reader of many streams, so that the server is what is measured: sockets, epoll and nothing else."""

from __future__ import annotations

import json
import resource
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

END = b"data: [DONE]\n\n"
SAMPLE_S = 0.05


class Stream:
    """One request and all that came back."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(head.encode() + data)
        self.socket.setblocking(False)
        self.received: list[tuple[float, bytes]] = []

    def read(self) -> bool:
        """Take what is there; False when the stream is complete or cut."""
        data = self.socket.recv(1 << 18)
        self.received.append((time.monotonic(), data))
        return bool(data) and END not in data[-32:]

    def body(self) -> bytes:
        """Return the body without the chunks' frames."""
        raw = b"".join(data for _, data in self.received)
        head, _, rest = raw.partition(b"\r\n\r\n")
        if b" 200 " not in head[:20]:
            raise RuntimeError(f"not a 200: {raw[:300]!r}")
        parts = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            parts.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        return b"".join(parts)

    def events(self) -> list[dict[str, Any]]:
        """Return the events, without the closing one."""
        lines = self.body().decode().split("\n\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def read_all(streams: list[Stream], timeout_s: float, sample: Callable[[], None]) -> None:
    """Read every stream to its end, calling `sample` at the start, at the end and every 50 ms."""
    selector = selectors.DefaultSelector()
    for stream in streams:
        selector.register(stream.socket, selectors.EVENT_READ, stream)
    deadline = time.monotonic() + timeout_s
    left = len(streams)
    due = 0.0
    while left:
        now = time.monotonic()
        if now > due:
            sample()
            due = now + SAMPLE_S
        if now > deadline:
            raise RuntimeError(f"{left} streams did not end in {timeout_s:g} s")
        for key, _ in selector.select(1.0):
            if not key.data.read():
                selector.unregister(key.fileobj)
                key.data.socket.close()
                left -= 1
    sample()


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)
