"""What a small chat costs the server's process, of this checkout and of another, taking turns.

    python tests/benchmarks/small_chats.py ../older [--rounds 60] [--chats 60]

Both servers run at once over a scripted engine (`serving.py`), and get the same chats: whole and as a stream of two
tokens one after the other, and as 64 such streams at once. Shown is the processor time of each chat, and the ratio of
neighbouring rounds: its median, and the middle half of all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import requests
from serving import PATH, server
from serving_client import Stream, cpu_s, read_all

AT_ONCE = 64
SHORT = [{"role": "user", "content": "What is the capital of France?"}]
LONGER = [
    {"role": "system", "content": "You are a helpful assistant. " * 4},
    *SHORT,
    {"role": "assistant", "content": "Paris is the capital of France."},
    {"role": "user", "content": "And how many people live there? " * 4},
]
BODY = {"model": "dovetail-demo", "ignore_eos": True}


def whole(messages: list[dict[str, Any]]) -> Callable[[int, int, requests.Session], int]:
    """Return what sends chats one after the other, given port and number, and returns how many it sent."""

    def send(port: int, chats: int, session: requests.Session) -> int:
        body = {**BODY, "messages": messages, "max_tokens": 1}
        for _ in range(chats):
            assert session.post(f"http://127.0.0.1:{port}{PATH}", json=body, timeout=60).status_code == 200
        return chats

    return send


def streamed(at_once: int) -> Callable[[int, int, requests.Session], int]:
    """As `whole`, of streams, so many at once."""

    def send(port: int, chats: int, session: requests.Session) -> int:
        body = {**BODY, "messages": SHORT, "max_tokens": 2, "stream": True}
        waves = max(1, chats // at_once)
        for _ in range(waves):
            read_all([Stream(port, PATH, body) for _ in range(at_once)], 60, lambda: None)
        return waves * at_once

    return send


CHATS = {
    "one message": whole(SHORT),
    "four messages": whole(LONGER),
    "one message, streamed": streamed(1),
    f"one message, {AT_ONCE} streams at once": streamed(AT_ONCE),
}


def main() -> int:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--chats", type=int, default=60)
    given = parser.parse_args()
    with ExitStack() as stack:
        both = [stack.enter_context(server(1e-4, tree)) for tree in (given.older, Path(__file__).parents[2])]
        session = stack.enter_context(requests.Session())

        def cost_us(port: int, pid: int, send: Callable[[int, int, requests.Session], int]) -> float:
            before = cpu_s(pid)
            num = send(port, given.chats, session)
            return (cpu_s(pid) - before) / num * 1e6

        for name, send in CHATS.items():
            rows = []
            for at in range(given.rounds + 1):
                found = [cost_us(*each, send) for each in (both if at % 2 else both[::-1])]
                rows.append(found if at % 2 else found[::-1])
            del rows[0]
            older, this = (statistics.median(column) for column in zip(*rows, strict=True))
            low, middle, high = statistics.quantiles([mine / theirs for theirs, mine in rows], n=4)
            print(f"{name}: {older:.0f} us older, {this:.0f} us this; ratio {middle:.3f} ({low:.3f} to {high:.3f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
