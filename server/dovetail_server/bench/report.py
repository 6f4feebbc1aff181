"""Tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dovetail.contracts.errors import ConfigError
from dovetail_server.bench.results import WorkloadResult

WIDTH = 180
DASH = "-"


def console() -> Console:
    """Return a console that is wide enough where there is no terminal to measure."""
    found = Console()
    return found if found.is_terminal else Console(width=WIDTH)


def number(value: float | None, digits: int = 0) -> str:
    """Write a number, a dash for none."""
    return DASH if value is None else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    """Write a share in percent."""
    return DASH if value is None else f"{value:.1%}" if value < 0.1 else f"{value:.0%}"


def points(values: Mapping[str, float] | None, *names: str) -> str:
    """Write percentiles, with more digits where they are small."""
    if not values:
        return DASH
    return " / ".join(
        number(values[name], 2 if values[name] < 10 else 1 if values[name] < 100 else 0) for name in names
    )


Column = tuple[str, Callable[[WorkloadResult], str]]
COLUMNS: tuple[Column, ...] = (
    ("workload", lambda f: f.workload.name),
    ("ok", lambda f: str(f.num_ok) if not f.num_failed else f"{f.num_ok}, {f.num_failed} failed"),
    ("output\ntok/s", lambda f: number(f.output_tok_s)),
    ("of\nfloor", lambda f: share(f.of_floor)),
    ("total\ntok/s", lambda f: number(f.total_tok_s)),
    ("req/s", lambda f: number(f.requests_s, 1)),
    ("first token ms\np50 / p90 / p99", lambda f: points(f.ttft_ms, "p50", "p90", "p99")),
    ("inter-token ms\np50 / p99", lambda f: points(f.itl_ms, "p50", "p99")),
    ("per stream\ntok/s", lambda f: number(f.decode_tok_s)),
    ("of\nfloor", lambda f: share(f.decode_of_floor)),
    ("end to end ms\np50 / p99", lambda f: points(f.e2e_ms, "p50", "p99")),
    ("prompt\ntok/s", lambda f: number(f.prompt_tok_s)),
    ("tok/\nevent", lambda f: number(f.tokens_per_event, 2)),
    ("cached", lambda f: share(f.cached_tokens / f.prompt_tokens) if f.prompt_tokens else DASH),
)
"""The compact table, a row per workload."""

HALF = 7
"""How many of them the first of two tables has, where one is too wide for the terminal."""

LINES: tuple[Column, ...] = (
    ("requests answered", lambda f: f"{f.num_ok:,}"),
    ("requests failed", lambda f: f"{f.num_failed:,}"),
    ("duration (s)", lambda f: number(f.duration_s, 2)),
    ("requests in flight, mean", lambda f: number(f.concurrency, 1)),
    ("prompt tokens", lambda f: f"{f.prompt_tokens:,}, of them cached {f.cached_tokens:,}"),
    ("output tokens", lambda f: f"{f.completion_tokens:,}"),
    ("output tok/s", lambda f: with_roofline(f.output_tok_s, f.of_floor)),
    ("total tok/s", lambda f: number(f.total_tok_s)),
    ("requests/s", lambda f: number(f.requests_s, 2)),
    ("time to first token ms, p50 / p90 / p99", lambda f: points(f.ttft_ms, "p50", "p90", "p99")),
    ("inter-token latency ms, p50 / p99", lambda f: points(f.itl_ms, "p50", "p99")),
    ("between events ms, p50 / p99", lambda f: points(f.gap_ms, "p50", "p99")),
    ("time per output token ms, p50 / p99", lambda f: points(f.tpot_ms, "p50", "p99")),
    ("end to end ms, p50 / p99", lambda f: points(f.e2e_ms, "p50", "p99")),
    ("decode tok/s per stream, p50", lambda f: with_roofline(f.decode_tok_s, f.decode_of_floor)),
    ("prompt tok/s until the first token", lambda f: number(f.prompt_tok_s)),
    ("tokens per event", lambda f: number(f.tokens_per_event, 2)),
    ("sampling", lambda f: f.sampling or DASH),
    ("client", lambda f: f"{f.client_workers} processes, the busiest at {f.client_busy:.0%} of a core"),
)
"""The table of one workload, a line per figure."""


def with_roofline(value: float | None, of_floor: float | None) -> str:
    """Write a rate with its share of the floor."""
    return number(value) if of_floor is None else f"{number(value)}  ({share(of_floor)} of the floor)"


def brief(result: WorkloadResult) -> str:
    """Say in a line how a workload went, for those who wait for the others."""
    failed = f", {result.num_failed} failed" if result.num_failed else ""
    return f"{result.workload.name}: {number(result.output_tok_s)} output tok/s, {result.num_ok} answered{failed}"


def show(out: Console, title: str, all_results: Sequence[WorkloadResult], facts: Sequence[str]) -> None:
    """Print one workload in full, several as rows; then what the floor rests on, failures and notes."""
    if len(all_results) == 1:
        written = ((name, write(all_results[0])) for name, write in LINES)
        out.print(pairs(title, ((name, text) for name, text in written if text != DASH)))
    else:
        whole = rows(title, all_results, COLUMNS)
        if out.measure(whole).maximum <= out.width:
            out.print(whole)
        else:
            out.print(rows(title, all_results, COLUMNS[:HALF]))
            out.print(rows("", all_results, (COLUMNS[0], *COLUMNS[HALF:])))
    for line in facts:
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    for result in all_results:
        for reason, count in result.failures.items():
            out.print(f"{result.workload.name}: {count} times: {reason}", style="red", markup=False, soft_wrap=True)
        for note in result.notes:
            out.print(f"{result.workload.name}: {note}", style="yellow", markup=False, soft_wrap=True)


def pairs(title: str, lines: Iterable[tuple[str, str]]) -> Table:
    """Lay out a line per figure."""
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for line in lines:
        table.add_row(*line)
    return table


def compared(all_results: Sequence[WorkloadResult]) -> list[str]:
    """Say in lines what share of another workload's rate each reaches that is compared with one."""
    rates = {result.workload.name: result.output_tok_s for result in all_results}
    return [
        f"{f.workload.name}: {f.output_tok_s / rates[f.workload.beside]:.2f} of the output tok/s of {f.workload.beside}"
        for f in all_results
        if f.workload.beside is not None and rates.get(f.workload.beside)
    ]


def rows(title: str, all_results: Sequence[WorkloadResult], columns: Sequence[Column]) -> Table:
    """Lay out a table with a row per workload."""
    table = Table(title=title)
    for name, _ in columns:
        table.add_column(name, justify="left" if name == "workload" else "right", no_wrap=True)
    for result in all_results:
        table.add_row(*(write(result) for _, write in columns))
    return table


def check_json(path: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is measured.

    Raises:
        ConfigError: Its folder is not there, or it is a folder.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"--json {str(path)!r}: cannot be written; give a file in a folder that exists")


def save(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write the report, if asked for."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
