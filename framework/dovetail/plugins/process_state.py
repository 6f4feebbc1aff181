"""What all code of a process shares and a plugin must leave as it is: the kit refuses changes, a start names them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What all code of a process shares and a plugin must leave as it is when it is loaded."""

    threads: frozenset[str]
    children: frozenset[int]
    signals: dict[str, str]
    torch: dict[str, str]
    python: dict[str, object]

    @classmethod
    def now(cls) -> ProcessState:
        """Look at this process."""
        children = {pid for path in Path("/proc/self/task").glob("*/children") for pid in _pids(path)}
        handlers = {name.name: repr(signal.getsignal(name)) for name in signal.valid_signals() if hasattr(name, "name")}
        threads = frozenset(thread.name for thread in threading.enumerate())
        return cls(threads, frozenset(children), handlers, _torch(), _python())

    def differences(self, later: ProcessState) -> list[str]:
        """Say what is there that was not."""
        found = [f"the thread {name!r}" for name in sorted(later.threads - self.threads)]
        found += [f"the process {pid}" for pid in sorted(later.children - self.children)]
        return found + self.shared_differences(later)

    def shared_differences(self, later: ProcessState) -> list[str]:
        """Say the same but for threads and processes, which others may have started meanwhile."""
        found = [f"a handler of {name}" for name, handler in later.signals.items() if handler != self.signals[name]]
        found += [f"another {what}" for what, value in later.python.items() if value != self.python[what]]
        return found + self.torch_differences(later)

    def torch_differences(self, later: ProcessState) -> list[str]:
        """Say which of torch's defaults are others: requests fail of them, and nothing says why."""
        return [
            f"torch's {what} {value}" for what, value in later.torch.items() if value != (self.torch or TORCH)[what]
        ]


TORCH = {"default dtype": "torch.float32", "default device": "cpu", "grad mode": "True"}
"""How torch begins."""


def _pids(path: Path) -> list[int]:
    """Return the processes that a file lists; none if the thread whose it is has just ended."""
    try:
        return [int(pid) for pid in path.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _python() -> dict[str, object]:
    """What all code of Python's goes through."""
    streams = {"standard output": sys.stdout, "standard error": sys.stderr, "hook for exceptions": sys.excepthook}
    return {"recursion limit": sys.getrecursionlimit(), "working directory": os.getcwd(), **streams}


def _torch() -> dict[str, str]:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return {}
    values = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    return dict(zip(TORCH, map(str, values), strict=True))


BEGINNING = ProcessState(frozenset(), frozenset(), {}, {}, {})
"""A process of which nothing is known but how torch begins."""
