"""Requests with a page-sized image each, at once: what the event loop of their server does meanwhile.

    python tests/benchmarks/image_requests.py [--requests 64] [--body-processes 2] [--kind PNG] [--same]

The engine is scripted, so this measures the server alone: bodies, decoding, and handing over. Shown are the longest
callbacks by processor time, and how long requests took. Exit code 1 where a callback took more than 20 ms of it.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import heapq
import io
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))  # the server in a thread

import requests
from PIL import Image, ImageDraw
from seeing_server import SeeingHarness, write_seeing_model

PAGE = (1786, 2526)
MOST_S = 0.02
SHOWN = 5


class Callbacks:
    """The longest callbacks of every event loop in this process, by processor time of their thread."""

    def __init__(self) -> None:
        self.longest: list[tuple[float, str]] = []
        plain = asyncio.Handle._run

        def run(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            plain(handle)
            took = time.thread_time() - began
            if len(self.longest) < SHOWN or took > self.longest[0][0]:
                heapq.heappush(self.longest, (took, repr(handle)[:160]))
                if len(self.longest) > SHOWN:
                    heapq.heappop(self.longest)

        asyncio.Handle._run = run  # type: ignore[method-assign]


def page(number: int, kind: str) -> str:
    """Return a page of text as a `data:` URL."""
    image = Image.new("RGB", PAGE, (255, 255, 255))
    draw = ImageDraw.Draw(image)
    for line in range(80):
        draw.text(
            (60, 60 + 30 * line), f"{number}.{line} " + "The quick brown fox jumps over the lazy dog. " * 5, (0, 0, 0)
        )
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--body-processes", type=int, default=2)
    parser.add_argument("--same", action="store_true", help="all send one image")
    parser.add_argument("--image-cache-bytes", type=int, default=512 << 20)
    parser.add_argument("--kind", choices=("PNG", "JPEG", "WEBP"), default="PNG")
    args = parser.parse_args()
    first, *rest = (page(number, args.kind) for number in range(2 if args.same else args.requests + 1))
    pages = rest * args.requests if args.same else rest
    callbacks = Callbacks()
    with tempfile.TemporaryDirectory() as folder:
        model = write_seeing_model(Path(folder) / "model")
        kept = args.image_cache_bytes
        server = SeeingHarness(model, body_processes=args.body_processes, context_len=4096, image_cache_bytes=kept)

        def ask(url: str) -> float:
            content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}}]
            body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
            began = time.perf_counter()
            reply = requests.post(f"{server.base}/v1/chat/completions", json=body, timeout=600)
            if reply.status_code != 200:
                raise RuntimeError(reply.text)
            return time.perf_counter() - began

        try:
            ask(first)
            callbacks.longest.clear()
            began = time.perf_counter()
            with ThreadPoolExecutor(args.requests) as pool:
                took = list(pool.map(ask, pages))
            whole = time.perf_counter() - began
        finally:
            server.close()
    print(f"{args.requests} images of {PAGE[0]} x {PAGE[1]} ({args.kind}, {len(pages[0]) >> 10} KiB of base64)")
    print(
        f"{args.requests / whole:.2f} a second; a request p50 {statistics.median(took):.2f} s, most {max(took):.2f} s"
    )
    for took_s, what in sorted(callbacks.longest, reverse=True):
        print(f"{took_s * 1000:7.2f} ms  {what}")
    return 1 if max(callbacks.longest)[0] > MOST_S else 0


if __name__ == "__main__":
    sys.exit(main())
