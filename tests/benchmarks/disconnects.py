"""Clients that leave: many requests to the demo model whose clients go away at random stages, and what is held then.

    python tests/benchmarks/disconnects.py --requests 10000

Each client sends a request to a random endpoint, streaming or not, with one to four choices, and closes its connection:
in the middle of the body, right after it, after a while, or after some of the reply; half of them with a reset. In the
end nothing may run, wait or hold pages. It then says how long after the last client the last page was free. Exit code 1
if anything is held, or if the server answers differently than before.
"""

from __future__ import annotations

import argparse
import json
import random
import selectors
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import requests
from batches import Server

PATHS = ("/v1/chat/completions", "/v1/completions", "/generate")
RESET = struct.pack("ii", 1, 0)
HELD = ("num_running", "num_queued", "num_used_tokens")


class Client:
    """One client that will leave; with `rid` its request has that identifier."""

    def __init__(self, port: int, chance: random.Random, rid: str | None = None) -> None:
        path, n = chance.choice(PATHS), chance.choice([1, 1, 1, 2, 4])
        prompt = " ".join(str(chance.randrange(100)) for _ in range(chance.choice([3, 30, 150])))
        body: dict[str, Any] = {"stream": chance.random() < 0.6}
        if path == "/generate":
            body |= {"text": prompt, "sampling_params": {"n": n, "max_new_tokens": 64, "ignore_eos": True}}
        else:
            body |= {"model": "dovetail-demo", "n": n, "max_tokens": 64, "ignore_eos": True}
            body |= {"prompt": prompt} if "chat" not in path else {"messages": [{"role": "user", "content": prompt}]}
        if rid is not None:
            body["rid"] = rid
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        self.stage = chance.choice(["body", "at once", "later", "reply"])
        self.socket = socket.create_connection(("127.0.0.1", port))
        if chance.random() < 0.5:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        whole = head.encode() + data
        self.socket.sendall(whole[: chance.randrange(len(whole))] if self.stage == "body" else whole)
        self.socket.setblocking(False)
        self.leaves_at = time.monotonic() + (chance.random() * 0.2 if self.stage == "later" else 0)
        self.bytes_left = chance.randrange(1, 1500) if self.stage == "reply" else 1 << 30

    def read(self) -> bool:
        """Read; False when it is time to leave, or the reply is over."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            return False
        self.bytes_left -= len(data)
        return bool(data) and self.bytes_left > 0


def leave_all(port: int, count: int, at_once: int, chance: random.Random) -> Counter[str]:
    """Run the clients, so many at once."""
    selector = selectors.DefaultSelector()
    here: set[Client] = set()
    stages: Counter[str] = Counter()
    while count or here:
        while count and len(here) < at_once:
            client = Client(port, chance)
            here.add(client)
            selector.register(client.socket, selectors.EVENT_READ, client)
            count -= 1
        gone = {key.data for key, _ in selector.select(0.005) if not key.data.read()}
        gone |= {client for client in here if client.stage != "reply" and client.leaves_at <= time.monotonic()}
        for client in gone:
            selector.unregister(client.socket)
            client.socket.close()
            stages[client.stage] += 1
        here -= gone
    return stages


def held(base: str) -> dict[str, int]:
    """Return what the engine still holds."""
    load = requests.get(base + "/get_server_info", timeout=30).json()["internal_states"][0]
    return {name: load[name] for name in HELD}


def answer(base: str) -> str:
    """Return the reply to a fixed question."""
    body = {"model": "dovetail-demo", "messages": [{"role": "user", "content": "What is 2 plus 3?"}], "temperature": 0}
    return str(requests.post(base + PATHS[0], json=body, timeout=60).json()["choices"][0]["message"])


def main() -> int:
    """Parse flags, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=30991)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        server = Server(Path(scratch) / "files", arguments.port, "--max-queued-requests", "4096")
        server.wait()
        try:
            before, began = answer(server.base), time.monotonic()
            stages = leave_all(arguments.port, arguments.requests, arguments.at_once, random.Random(arguments.seed))
            left = time.monotonic()
            rest = held(server.base)
            while any(rest.values()) and time.monotonic() < left + 30:
                rest = held(server.base)
            print(f"{arguments.requests} clients left in {left - began:.0f} s: {dict(stages)}")
            print(f"held: {rest}, {1000 * (time.monotonic() - left):.0f} ms after the last client")
            same = answer(server.base) == before
            print("the server answers as before" if same else "THE SERVER ANSWERS DIFFERENTLY")
        finally:
            server.stop()
    return 1 if any(rest.values()) or not same else 0


if __name__ == "__main__":
    sys.exit(main())
