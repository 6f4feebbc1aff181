"""Shows a memory plan as a table. Does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from dovetail.runtime.memory.checks import gib
from dovetail.runtime.memory.plan import MemoryPlan


def rows_of(plan: MemoryPlan) -> Iterator[tuple[str, str, str]]:
    """Yield the lines of the table: what, how much, and what to know about it."""
    has_graphs = plan.device.kind != "cpu"
    if plan.process_bytes is not None:
        yield "process", gib(plan.process_bytes), "Python, torch, plugins and what they import"
    yield "weights", gib(plan.weight_bytes), "; ".join((plan.dtype, *plan.weight_notes))
    if plan.groups:
        per_token = plan.page_bytes / plan.page_size / 1024
        tokens = f"{plan.num_tokens:,} tokens, {per_token:,.1f} KiB each, pages of {plan.page_size}"
        yield "KV cache", gib(plan.kv_bytes), tokens
    else:
        yield "KV cache", "none", "prompts are computed whole, and nothing of them is kept"
    for group in plan.groups if len(plan.groups) > 1 else ():
        seen = "" if group.seen_pages is None else f", at most {group.seen_pages} of a decoding request"
        what = f"{group.num_pages:,} pages of {plan.page_size} tokens{seen}"
        if group.num_rows:
            rows, copies = (gib(num * group.page_bytes) for num in (group.num_rows, group.num_pages + 1))
            what = f"states of {group.num_rows} rows, {rows}, and {group.num_pages:,} copies for the prefix cache, "
            what += f"{copies}; {gib(group.page_bytes)} each"
        yield f"  {group.name}", gib(group.num_bytes), what
    yield "activations", gib(plan.activation_bytes), f"estimated for steps of {plan.step_tokens:,} tokens"
    if has_graphs:
        measured = "" if plan.measured_bytes is None else f", {gib(plan.measured_bytes)} taken until ready"
        yield "CUDA graphs", gib(plan.graph_bytes), f"estimated{measured}" if plan.graph_bytes else "none"
    shown = f"of {gib(plan.device.total)}, {gib(plan.device.free)} free at the start"
    yield "free", gib(plan.free_bytes), shown
    full = f"of the full context, {plan.context_len:,} tokens"
    short = f"; {plan.num_requests(4096):,} of 4,096" if plan.context_len > 4096 else ""
    yield (
        "requests",
        f"{plan.num_requests(plan.context_len):,}",
        f"{full}{short}; {plan.max_running_requests} run at once",
    )


def print_table(plan: MemoryPlan, *, to_stderr: bool) -> None:
    """Print the plan as a table, and its notes."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    stream = sys.stderr if to_stderr else sys.stdout
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"memory of {plan.device.name}")
    table.add_column("size", justify="right")
    table.add_column("")
    for row in rows_of(plan):
        table.add_row(*row)
    console = Console(file=stream, width=None if stream.isatty() else 120, highlight=False)
    console.print(table)
