"""The picture of `dovetail top`."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# What a server does now, read from its `/metrics`.

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


WIDTH = 30


def picture(url: str, load: Load | None, before: Load | None, problem: str) -> RenderableType:
    """Draw the last look at a server, and what is wrong with it now."""
    parts: list[RenderableType] = [Text.assemble(("dovetail ", "bold"), url)]
    if problem:
        parts.append(Text(problem, style="red"))
    if load is not None:
        parts += [Text(), numbers(load, before), Text(), times(load)]
    return Group(*parts)


def numbers(load: Load, before: Load | None) -> Table:
    """Requests, throughput and cache."""
    table = Table.grid(padding=(0, 2))
    running, queued = shown(load.get("requests_running")), shown(load.get("requests_queued"))
    table.add_row("requests", f"{running} running, {queued} queued")
    rate = load.get("generation_tokens_per_second")
    table.add_row("tokens/s", shown(rate, 1))
    table.add_row("steps/s", shown(load.rate("engine_step", before), 1))
    table.add_row("KV cache", bar(load.get("kv_usage_ratio")))
    prompt, cached = load.get("prompt_tokens_total"), load.get("cached_prompt_tokens_total")
    table.add_row("prefix cache hit rate", bar(cached / prompt if prompt and cached is not None else None))
    total = f"{shown(load.get('requests_total'))} requests, {shown(load.get('generation_tokens_total'))} tokens"
    table.add_row("since the start", total)
    if restarts := load.get("engine_restarts_total"):
        table.add_row("engine restarts", Text(shown(restarts), style="red"))
    return table


def times(load: Load) -> Table:
    """Latencies since the start."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("seconds", "p50", "p90", "p99"):
        table.add_column(name, justify="left" if name == "seconds" else "right")
    for label in HISTOGRAMS:
        found = [load.quantile(label, share) for share in (0.5, 0.9, 0.99)]
        table.add_row(label, *(shown(one, 4) for one in found))
    return table


def shown(value: float | None, digits: int = 0) -> str:
    """A number for people; a dash where it is unknown."""
    return "-" if value is None else f"{value:,.{digits}f}"


def bar(share: float | None) -> RenderableType:
    """A share as a bar and a number."""
    if share is None:
        return Text("-")
    grid = Table.grid(padding=(0, 1))
    grid.add_row(ProgressBar(total=1.0, completed=share, width=WIDTH), f"{share * 100:.0f} %")
    return grid
