"""What observing costs the server per token, per HTTP request and per scrape.

python tests/benchmarks/metrics.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

from dovetail.contracts.observers import HttpEnd, RequestEnd, RequestStart
from dovetail_server.metrics.exposition import Metrics
from dovetail_server.observe.observers import Observers
from dovetail_server.observe.token_timer import TokenTimer

TOKENS = 100_000


def per_item(run: Callable[[], None], items: int, rounds: int = 7) -> float:
    """Return the median cost in microseconds."""
    took = []
    for _ in range(rounds):
        began = perf_counter()
        run()
        took.append((perf_counter() - began) / items * 1e6)
    return statistics.median(took)


def main() -> None:
    for style in ("dovetail", "vllm", "sglang"):
        metrics, observers = Metrics(style, "m", {}), Observers()
        observers.add("dovetail_request_observers", "bench", metrics.tally)

        def tokens(observers: Observers = observers) -> None:
            timer = TokenTimer(observers, "r", 1, perf_counter())
            for _ in range(TOKENS):
                timer.record(0, 1)
            timer.flush()

        def requests(observers: Observers = observers) -> None:
            for _ in range(1000):
                observers.notify("request_started", RequestStart(request_id="r", num_choices=1, num_prompt_tokens=9))
                timer = TokenTimer(observers, "r", 1, perf_counter())
                timer.record(0, 1)
                observers.notify(
                    "request_ended",
                    RequestEnd(
                        request_id="r",
                        num_prompt_tokens=9,
                        num_completion_tokens=1,
                        finish_reasons=("stop",),
                        seconds=0.1,
                    ),
                )
                observers.notify(
                    "http_ended", HttpEnd(request_id="r", method="POST", route="/generate", status=200, seconds=0.1)
                )

        print(f"--metrics-style {style}: {per_item(tokens, TOKENS):.3f} µs per token,", end=" ")
        print(f"{per_item(requests, 1000):.1f} µs per request,", end=" ")
        print(f"{per_item(lambda m=metrics: m.render('') and None, 1):.0f} µs per scrape")  # type: ignore[misc]


if __name__ == "__main__":
    main()
