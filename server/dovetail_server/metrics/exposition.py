"""Writing: the tally under its names, through `prometheus_client` and a registry of this server's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import dovetail
from dovetail_server.metrics.series import OWN, STYLES, VLLM, Count, Gauge, Series, Style, bounds_of
from dovetail_server.metrics.tally import Histogram, LatestLoad, Tally

if TYPE_CHECKING:
    from dovetail_server.http.auth import Keys

# What keys use, by the beginnings of their hashes, and whether the file of keys is in force.

MAX_SHOWN = 1000
"""Keys with series of their own, those that came first; all others together are `other`."""
COUNTS = {
    "requests": "Requests that a key's owner sent to the engine.",
    "input_tokens": "Prompt tokens of these.",
    "output_tokens": "Tokens generated for these.",
}


def of_keys(keys: Keys) -> Iterator[Metric]:
    """Yield the use of each key that has sent something, and of requests without one as `none`."""
    used = [tenant for tenant in keys.tenants.values() if tenant.usage.requests or tenant.usage.rejected]
    labels = [(tenant.short or "none") if i < MAX_SHOWN else "other" for i, tenant in enumerate(used)]
    for name, text in COUNTS.items():
        sums: Counter[str] = Counter()
        for label, tenant in zip(labels, used, strict=True):
            sums[label] += getattr(tenant.usage, name)
        yield _counter(f"dovetail_key_{name}", text, ("key",), {(label,): num for label, num in sums.items()})
    rejected: Counter[tuple[str, ...]] = Counter()
    for label, tenant in zip(labels, used, strict=True):
        for limit, num in tenant.usage.rejected.items():
            rejected[label, limit] += num
    yield _counter("dovetail_key_rejected_requests", "Requests beyond a limit of a key.", ("key", "limit"), rejected)
    if keys.watch is not None:
        text = "Times that the changed --keys-file could not be used."
        yield CounterMetricFamily("dovetail_keys_file_failures", text, value=keys.watch.num_failures)
        text = "1 if the keys in force are those of --keys-file, 0 while it cannot be used."
        yield GaugeMetricFamily("dovetail_keys_file_current", text, value=int(keys.watch.is_current))


def _counter(name: str, text: str, labels: tuple[str, ...], values: dict[tuple[str, ...], int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for own, number in values.items():
        family.add_metric(own, number)
    return family


class Metrics(Collector):
    """All numbers of one server. `tally` and `load` are what observes; nothing here is global."""

    def __init__(
        self,
        style: str,
        model_name: str,
        crashes: Mapping[str, int],
        restarts: Callable[[], int] = lambda: 0,
        engine_pid: Callable[[], int | None] = lambda: None,
        keys: Keys | None = None,
        unknown_fields: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Count nothing yet.

        Args:
            style: Of `STYLES`: whose names are written beside Dovetail's own.
            model_name: The label of that name.
            crashes: How often background work died, by its name; kept up to date by its owner.
            restarts: Returns how often the engine was started again.
            engine_pid: Returns the engine's process; None while there is none, or where it is this one.
            keys: Whose use is told.
            unknown_fields: Returns how often each was left out of a request.
        """
        self.model_name = model_name
        self.crashes = crashes
        self.restarts = restarts
        self.keys = keys
        self.styles = [OWN] if STYLES[style] is OWN else [OWN, STYLES[style]]
        self.tally = Tally(bounds_of(self.styles), unknown_fields)
        self.load = LatestLoad()
        self.cache: tuple[int, int] | None = None
        """Tokens per page and in all, once the engine has started."""
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        ProcessCollector(namespace="dovetail_engine", pid=lambda: engine_pid() or "none", registry=self.registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the text that a scraper asked for by its `Accept` header, and its media type."""
        encode, media_type = choose_encoder(accept)
        with self.tally.lock:
            return encode(self.registry), media_type

    def collect(self) -> Iterator[Metric]:
        """Yield everything; called by the registry."""
        info = InfoMetricFamily("dovetail", "What is served.", labels=("model_name",))
        info.add_metric((self.model_name,), {"version": dovetail.__version__})
        yield info
        for style in self.styles:
            for series in style.series:
                yield from self._family(series, style)
        if VLLM in self.styles and self.cache is not None:
            yield self._cache_config(*self.cache)
        yield self._crashes()
        yield CounterMetricFamily(
            "dovetail_engine_restarts", "Times that the engine was started again.", value=self.restarts()
        )
        yield from self._http()
        if self.keys is not None:
            yield from of_keys(self.keys)

    def _family(self, series: Series, style: Style) -> Iterator[Metric]:
        names = ["model_name", *style.labels]
        values = [self.model_name, *style.labels.values()]
        if isinstance(series, Gauge):
            number = None if self.load.stats is None else series.read(self.load.stats)
            if number is not None:
                yield _plain(FAMILIES[series.kind], series, names, values, number)
        elif isinstance(series, Count):
            yield _plain(FAMILIES[series.kind], series, names, values, series.read(self.tally))
        else:
            family = HistogramMetricFamily(series.name, series.text, labels=names)
            _add(family, values, self.tally.quantities[series.quantity].by_bounds[series.bounds])
            yield family

    def _cache_config(self, page_size: int, num_tokens: int) -> Metric:
        """What llm-d's picker divides a prompt by, and how much a server holds."""
        names = ("model_name", *VLLM.labels)
        info = InfoMetricFamily("vllm:cache_config", "Size of the KV cache, in pages.", labels=names)
        facts = {"block_size": str(page_size), "num_gpu_blocks": str(num_tokens // page_size)}
        info.add_metric((self.model_name, *VLLM.labels.values()), facts)
        return info

    def _crashes(self) -> Metric:
        counts = CounterMetricFamily(
            "dovetail_background_task_deaths", "Times that background work died, by its name.", labels=("task",)
        )
        for name, count in self.crashes.items():
            counts.add_metric((name,), count)
        return counts

    def _http(self) -> Iterator[Metric]:
        counts = CounterMetricFamily(
            "dovetail_http_requests", "HTTP requests, by route and status.", labels=("method", "route", "status")
        )
        for labels, count in self.tally.http.items():
            counts.add_metric(labels, count)
        times = HistogramMetricFamily(
            "dovetail_http_request_seconds", "From the headers to the reply's end.", labels=("method", "route")
        )
        for labels_of, histogram in self.tally.http_s.items():
            _add(times, labels_of, histogram)
        yield counts
        yield times


FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


def _plain(kind: Any, series: Gauge | Count, names: Sequence[str], values: Sequence[str], found: Any) -> Metric:
    more = series.labels if isinstance(series, Count) else ()
    family: Metric = kind(series.name, series.text, labels=[*names, *more])
    each: Iterable[tuple[tuple[str, ...], float]] = found.items() if more else [((), found)]
    for own, number in each:
        family.add_metric([*values, *own], number)  # type: ignore[attr-defined]  # every kind has it
    return family


def _add(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, histogram.cumulative(), strict=True)), histogram.total)
