"""What a user sees while the server starts: a timed table of phases, then where to send requests."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dovetail.base import log
from dovetail.contracts.errors import DovetailError
from dovetail.messages import EngineInfo

logger = logging.getLogger("dovetail.server")
CHECKS, ENGINE = "checks", "engine"
"""Names of phases."""


class StartupTimer:
    """Measures named phases, which may overlap."""

    def __init__(self) -> None:
        """Start the clock."""
        self.began = time.perf_counter()
        self.rows: list[tuple[str, float, str]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[list[str]]:
        """Time a block; what is appended to the list it yields is shown beside the time.

        What it raises gets a note that says so, but for the checks, before which nothing was started, and the engine,
        whose process names its own phase.
        """
        began = time.perf_counter()
        notes: list[str] = []
        try:
            yield notes
        except DovetailError as error:
            if name not in (CHECKS, ENGINE):
                error.add_note(f"in the start's phase {name!r}")
            raise
        self.rows.append((name, time.perf_counter() - began, ", ".join(notes)))

    def show(self) -> None:
        """Print the table to standard error; as a line for each phase where lines are objects."""
        if log.is_json():
            for name, seconds, notes in self.rows:
                logger.info("Phase %s: %.2f s. %s", name, seconds, notes, extra={"phase": name, "seconds": seconds})
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("phase")
        table.add_column("seconds", justify="right")
        table.add_column("")
        for name, seconds, notes in self.rows:
            table.add_row(name, f"{seconds:.2f}", notes)
        table.add_row("total", f"{time.perf_counter() - self.began:.2f}", "phases overlap", style="bold")
        width = None if sys.stderr.isatty() else 120
        Console(stderr=True, width=width, highlight=False).print(table)


def engine_notes(info: EngineInfo) -> list[str]:
    """Say in short phrases what the engine became."""
    return [
        f"{info.architecture} {info.dtype} on {info.device}",
        f"weights {info.weight_bytes / 2**20:,.0f} MiB in {info.load_s:.2f} s",
        f"KV cache {info.max_total_tokens:,} tokens ({info.kv_bytes / 2**20:,.0f} MiB)"
        if info.max_total_tokens
        else "no KV cache",
        f"attention {info.attention_backend}" + (" (measured)" if info.attention_measured else ""),
        f"context {info.context_len:,}",
    ]
