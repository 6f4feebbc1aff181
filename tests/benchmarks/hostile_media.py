"""10,000 hostile images, `data:` URLs and addresses through a real server.

    python tests/benchmarks/hostile_media.py [--images 4500] [--urls 1000] [--addresses 4500] [--seed 1] [--clients 4]

The server allows every host. Its processes resolve names by the system. Listeners on loopback addresses count who comes
to ports 80 and 443, where this user may listen there. Exit code 1 where a request gets no 200 or 400, where an error
has more than a line or names no part, where anybody came, or where a file is left.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import selectors
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))  # the server in a thread

import requests
from hostile_images import addresses, costly, data_urls, images
from seeing_server import SeeingHarness, write_seeing_model

from dovetail_server.media.folder import KEPT

SHOWN = 8


class Trap:
    """Listens where nobody may come, and counts who does."""

    def __init__(self) -> None:
        self.num_listeners = 0
        self.visits: list[str] = []
        self._selector = selectors.DefaultSelector()
        for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
            for port in (80, 443):
                with contextlib.suppress(OSError):
                    listener = socket.create_server((host, port), family=family)
                    listener.setblocking(False)
                    self._selector.register(listener, selectors.EVENT_READ, f"{host} port {port}")
                    self.num_listeners += 1
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            for key, _ in self._selector.select(1.0):
                with contextlib.suppress(OSError):
                    key.fileobj.accept()[0].close()  # type: ignore[union-attr]
                    self.visits.append(key.data)


def bodies(num_images: int, num_urls: int, num_addresses: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield image URLs as parts: files as `data:`, odd `data:` URLs, and addresses."""
    for data in islice(chain(costly(), images(seed)), num_images):
        yield {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}
    for url in islice(data_urls(seed), num_urls):
        yield {"url": url}
    for url in islice(addresses(seed), num_addresses):
        yield {"url": url}


def wrong_with(reply: requests.Response) -> str | None:
    """Say what is wrong with an answer, or None."""
    if reply.status_code not in (200, 400):
        return f"status {reply.status_code}: {reply.text[:200]}"
    if reply.status_code == 200:
        return None
    error = json.loads(reply.text)["error"]
    message = error["message"]
    if "\n" in message or len(message) > 600:
        return f"more than a line: {message[:200]!r}"
    # Of a process that the system ended within a decoder, nobody knows which of the images it was.
    if "messages[0].content[0]" not in (error["param"] or message) and "images of this request" not in message:
        return f"names no part: {error}"
    return None


def run(
    server: SeeingHarness, parts: Iterable[dict[str, Any]], clients: int
) -> tuple[Counter[str], list[str], list[float]]:
    """Send each part in a chat of its own; return outcomes, what was wrong, and seconds."""
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    took: list[float] = []
    local = threading.local()

    def one(part: dict[str, Any]) -> None:
        session = getattr(local, "session", None) or requests.Session()
        local.session = session
        body = {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": part}]}]}
        began = time.perf_counter()
        reply = session.post(f"{server.base}/v1/chat/completions", json=body, timeout=120)
        took.append(time.perf_counter() - began)
        fault = wrong_with(reply)
        if fault is not None:
            wrong.append(f"{part['url'][:80]!r}: {fault}")
        outcomes[str(reply.status_code) if reply.status_code == 200 else str(reply.json()["error"]["code"])] += 1
        server.engine.submits.clear()

    with ThreadPoolExecutor(clients) as pool:
        for _ in pool.map(one, parts):
            pass
    return outcomes, wrong, took


def main() -> int:
    """Run, and print what came."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4500)
    parser.add_argument("--urls", type=int, default=1000)
    parser.add_argument("--addresses", type=int, default=4500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4)
    args = parser.parse_args()
    trap = Trap()
    with tempfile.TemporaryDirectory() as folder:
        model = write_seeing_model(Path(folder) / "model")
        server = SeeingHarness(model, allowed_media_domains=["*"], context_len=4096, body_cpu_limit=10.0)
        try:
            outcomes, wrong, took = run(server, bodies(args.images, args.urls, args.addresses, args.seed), args.clients)
            assert server.state.media is not None
            left = [path.name for path in server.state.media.path.iterdir() if path.name not in ("lock", KEPT)]
        finally:
            server.close()
    for name, num in outcomes.most_common():
        print(f"{num:7,} {name}")
    print(f"p50 {statistics.median(took) * 1000:.0f} ms, most {max(took) * 1000:.0f} ms a request")
    print(f"{len(trap.visits)} connections to {trap.num_listeners} listeners of this machine; {len(left)} files left")
    for fault in wrong[:SHOWN]:
        print(fault)
    print(f"{len(wrong)} of {sum(outcomes.values()):,} wrong")
    return 1 if wrong or trap.visits or left else 0


if __name__ == "__main__":
    sys.exit(main())
