"""Counting: a request observer and a stat logger, as plugins bring them (`dovetail.contracts`).

Numbers are kept as plain integers and lists and become Prometheus' objects only when somebody asks: a token costs a
bisection and two additions, about a tenth of what `prometheus_client.Histogram.observe` costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock

from dovetail.contracts.observers import (
    ChoiceTimes,
    HttpEnd,
    LoadStats,
    RequestEnd,
    RequestObserver,
    RequestProgress,
    RequestStart,
    StatLogger,
)

CUT_OFF = "cut_off"
"""The reason of a choice that the client left, or that an error ended."""
HTTP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
LEFT = "none"
"""The status of an HTTP request whose client left before the reply."""


class Histogram:
    """Counts by upper bound, which belongs to its bucket; the last count is of what lies above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Count nothing yet; bounds ascend."""
        self.bounds = list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count many values."""
        bounds, counts, total = self.bounds, self.counts, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.total += total

    def cumulative(self) -> list[int]:
        """Return how many values are at most each bound, and how many there are."""
        found, so_far = [], 0
        for count in self.counts:
            so_far += count
            found.append(so_far)
        return found


class HistogramGroup:
    """Histograms of one quantity, one for each set of bounds that some name asks for."""

    __slots__ = ("by_bounds",)

    def __init__(self, bounds: Iterable[tuple[float, ...]]) -> None:
        """Make them; equal bounds share one."""
        self.by_bounds = {each: Histogram(each) for each in bounds}

    def observe(self, value: float) -> None:
        """Count one value in each."""
        for histogram in self.by_bounds.values():
            histogram.observe(value)

    def observe_all(self, values: Sequence[float]) -> None:
        """Count many values in each."""
        for histogram in self.by_bounds.values():
            histogram.observe_all(values)


class Tally(RequestObserver):
    """What has happened since the server's start. It is told in another thread than it is read in, so it has a lock."""

    def __init__(
        self, bounds: dict[str, list[tuple[float, ...]]], unknown_fields: Callable[[], Mapping[str, int]]
    ) -> None:
        """Count nothing yet.

        Args:
            bounds: The sets that each quantity is counted in.
            unknown_fields: Returns how often each was left out of a request.
        """
        self.lock = Lock()
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.num_retractions = 0
        self.finished: Counter[str] = Counter()
        """Choices by why they ended."""
        self.quantities = {name: HistogramGroup(each) for name, each in bounds.items()}
        """`first_token`, `gap`, `request` in seconds, and of each choice `queue`, `prefill`, `decode`, `inference`;
        `prompt` and `output` in tokens of a request."""
        self.unknown_fields = unknown_fields
        self.http: Counter[tuple[str, str, str]] = Counter()
        """By method, route and status."""
        self.http_s: dict[tuple[str, str], Histogram] = {}

    def request_started(self, request: RequestStart) -> None:
        """Count an admission."""
        with self.lock:
            self.num_requests += 1
            self.num_prompt_tokens += request.num_prompt_tokens

    def request_progressed(self, request: RequestProgress) -> None:
        """Count tokens."""
        with self.lock:
            self.num_generated_tokens += request.num_tokens
            if request.first_token_s is not None:
                self.quantities["first_token"].observe(request.first_token_s)
            self.quantities["gap"].observe_all(request.gaps_s)

    def request_ended(self, request: RequestEnd) -> None:
        """Count an end."""
        with self.lock:
            self.num_cached_tokens += request.num_cached_tokens
            self.num_retractions += request.num_retractions
            self.finished.update(reason or CUT_OFF for reason in request.finish_reasons)
            self.quantities["request"].observe(request.seconds)
            self.quantities["prompt"].observe(request.num_prompt_tokens)
            self.quantities["output"].observe(request.num_completion_tokens)
            for choice in request.choices:
                self._count_phases(choice)

    def _count_phases(self, choice: ChoiceTimes) -> None:
        phases = {"queue": choice.queued_s}
        if choice.prefill_s is not None:
            phases |= {"prefill": choice.prefill_s, "decode": choice.decode_s}
            phases["inference"] = choice.prefill_s + choice.decode_s
        for name in phases.keys() & self.quantities.keys():
            self.quantities[name].observe(phases[name])

    def http_ended(self, request: HttpEnd) -> None:
        """Count an HTTP request."""
        with self.lock:
            self.http[request.method, request.route, LEFT if request.status is None else str(request.status)] += 1
            key = request.method, request.route
            if key not in self.http_s:
                self.http_s[key] = Histogram(HTTP_S)
            self.http_s[key].observe(request.seconds)


class LatestLoad(StatLogger):
    """Keeps the engine's load of the last second."""

    interval_s = 1.0

    def __init__(self) -> None:
        """Know nothing yet."""
        self.stats: LoadStats | None = None

    def log(self, stats: LoadStats) -> None:
        """Keep the snapshot."""
        self.stats = stats
