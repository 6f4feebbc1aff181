"""The picture of `dovetail top`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dovetail_server.terminal.load import HISTOGRAMS, Load

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
