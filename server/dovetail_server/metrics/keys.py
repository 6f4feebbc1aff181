"""What keys use, by the beginnings of their hashes, and whether the file of keys is in force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from dovetail_server.http.auth import Keys

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
