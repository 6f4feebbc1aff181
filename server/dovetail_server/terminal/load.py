"""What a server does now, read from its `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

HISTOGRAMS = {
    "time to first token": "dovetail_time_to_first_token_seconds",
    "inter-token latency": "dovetail_inter_token_seconds",
    "end-to-end latency": "dovetail_request_seconds",
    "queue time": "dovetail_queue_seconds",
    "prefill time": "dovetail_prefill_seconds",
    "decode time": "dovetail_decode_seconds",
}


@dataclass(slots=True)
class Load:
    """One look at a server. Numbers that it does not have, yet or at all, are None.

    Attributes:
        at: When, on a monotonic clock.
        values: Sums of the series by name.
        buckets: Histograms by their label: upper bound and cumulative count, in order.
    """

    at: float
    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str, at: float) -> Load:
        """Read Prometheus' text format."""
        load = cls(at)
        labels = {f"{name}_bucket": label for label, name in HISTOGRAMS.items()}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if (label := labels.get(sample.name)) is not None:
                    load.buckets.setdefault(label, []).append((float(sample.labels["le"]), sample.value))
                else:
                    load.values[sample.name] = load.values.get(sample.name, 0.0) + sample.value
        for rows in load.buckets.values():
            rows.sort()
        return load

    def get(self, name: str) -> float | None:
        """Return a number, without the prefix of its series."""
        return self.values.get(f"dovetail_{name}")

    def rate(self, name: str, before: Load | None) -> float | None:
        """Return how much a counter grew in a second; None where it is unknown, or the engine began again."""
        now, then = self.get(name), before.get(name) if before is not None else None
        if now is None or then is None or before is None or now < then or self.at <= before.at:
            return None
        return (now - then) / (self.at - before.at)

    def quantile(self, label: str, share: float) -> float | None:
        """Return the time within which a share of a histogram lies, straight lines between its bounds."""
        rows = self.buckets.get(label, [])
        if not rows or not rows[-1][1]:
            return None
        wanted, low, below = share * rows[-1][1], 0.0, 0.0
        for bound, count in rows:
            if count >= wanted and count > below:
                return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
            low, below = bound, count
        return low
