"""What a small chat costs the server's process, of this checkout and of another, taking turns.

    python tests/benchmarks/small_chats.py ../older [--rounds 15] [--chats 200]

Both servers run at once over a scripted engine (`serving.py`), and get the same chats, one after the other. Shown is
the processor time of each chat, and the ratio of neighbouring rounds: its median, and the middle half of all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import requests
from serving import PATH, server
from serving_client import cpu_s

CHATS: dict[str, list[dict[str, Any]]] = {
    "one message": [{"role": "user", "content": "What is the capital of France?"}],
    "four messages": [
        {"role": "system", "content": "You are a helpful assistant. " * 4},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris is the capital of France."},
        {"role": "user", "content": "And how many people live there? " * 4},
    ],
}


def cost_us(port: int, pid: int, messages: list[dict[str, Any]], chats: int, session: requests.Session) -> float:
    """Send chats, and return the server's processor time for each, in microseconds."""
    body = {"model": "dovetail-demo", "messages": messages, "max_tokens": 1, "ignore_eos": True}
    before = cpu_s(pid)
    for _ in range(chats):
        assert session.post(f"http://127.0.0.1:{port}{PATH}", json=body, timeout=60).status_code == 200
    return (cpu_s(pid) - before) / chats * 1e6


def main() -> int:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--chats", type=int, default=200)
    given = parser.parse_args()
    with ExitStack() as stack:
        both = [stack.enter_context(server(1e-4, tree)) for tree in (given.older, Path(__file__).parents[2])]
        session = stack.enter_context(requests.Session())
        for name, messages in CHATS.items():
            rows = [[cost_us(*each, messages, given.chats, session) for each in both] for _ in range(given.rounds + 1)][
                1:
            ]
            older, this = (statistics.median(column) for column in zip(*rows, strict=True))
            low, middle, high = statistics.quantiles([mine / theirs for theirs, mine in rows], n=4)
            print(f"{name}: {older:.0f} us older, {this:.0f} us this; ratio {middle:.3f} ({low:.3f} to {high:.3f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
