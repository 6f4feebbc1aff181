"""How much memory the host can give: of the machine, of this process's container, and by its own limit. No torch here.

Sources: `proc_meminfo(5)`; Linux' `Documentation/admin-guide/cgroup-v2.rst` and `cgroup-v1/memory.rst`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dovetail.runtime.memory.checks import gib
from dovetail.runtime.memory.plan import DeviceBytes, MemoryPlan

logger = logging.getLogger(__name__)

MEMINFO = Path("/proc/meminfo")
STATM = Path("/proc/self/statm")
CGROUP = Path("/sys/fs/cgroup")
MAPPED_LATER = 640 << 20
"""Address space that an engine takes beside its pool once it serves, for arenas of threads, code that is made, and
grammars: 586 MiB with the demo model on two cores, of which little is ever used."""


class ControlGroupFiles(NamedTuple):
    """Files of a control group: its limit, what it uses, and which entry of its statistics is cache that can go."""

    limit: str
    used: str
    stat: str
    cache: str


V2 = ControlGroupFiles("memory.max", "memory.current", "memory.stat", "inactive_file")
V1 = ControlGroupFiles(
    "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"
)


def host_bytes() -> DeviceBytes:
    """Measure the host: what there is, and what it can give to this process without swapping, killing or refusing it.

    A limit of address space (`ulimit -v`, systemd's `LimitAS`) counts what is mapped, used or not.
    """
    found = _machine()
    most, mapped = resource.getrlimit(resource.RLIMIT_AS)[0], _own_bytes(0)
    if most == resource.RLIM_INFINITY or mapped is None:
        return found
    free = max(0, min(found.free, most - mapped - MAPPED_LATER))
    name = found.name if free == found.free else "cpu within ulimit -v"
    return dataclasses.replace(found, name=name, total=min(found.total, most), free=free)


def _machine() -> DeviceBytes:
    """Measure the machine, or the container."""
    found = _numbers(MEMINFO, scale=1024)
    total, free = found.get("MemTotal", 4 << 30), found.get("MemAvailable", 2 << 30)
    if not found:
        logger.debug("no %s; assuming 4 GiB of memory, 2 GiB of it free", MEMINFO)
    for names in (V2, V1):
        limit = _number(CGROUP / names.limit)
        if limit is not None and limit < total:
            cache = _numbers(CGROUP / names.stat).get(names.cache, 0)
            used = (_number(CGROUP / names.used) or 0) - cache
            return DeviceBytes(kind="cpu", name="cpu", total=limit, free=max(0, min(free, limit - used)))
    return DeviceBytes(kind="cpu", name="cpu", total=total, free=free)


def resident_bytes() -> int | None:
    """Return what this process holds in memory; None where the system does not tell."""
    return _own_bytes(1)


def _own_bytes(index: int) -> int | None:
    """Return a size of this process by its place in `statm`."""
    try:
        return int(STATM.read_text(encoding="ascii").split()[index]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _number(path: Path) -> int | None:
    """Read a file with one number; None if it is not there or says `max`."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _numbers(path: Path, scale: int = 1) -> dict[str, int]:
    """Read lines of a name and a number."""
    try:
        lines = [line.replace(":", " ").split() for line in path.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) * scale for line in lines if len(line) > 1 and line[1].isdigit()}


# Shows a memory plan as a table. Does not import torch.


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
    if plan.image_bytes:
        yield "images", gib(plan.image_bytes), f"estimated for images of up to {plan.image_patches:,} patches"
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
