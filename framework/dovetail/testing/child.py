"""A fresh process that lists and loads a plugin and says what happened: `python -m dovetail.testing.child`.

The job comes as JSON on standard input; the report is the last line of standard output.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.plugins.kinds import KINDS
from dovetail.plugins.plan import PlannedPlugin, PluginPlan

HEAVY = ("torch", "transformers", "pydantic", "fastapi", "numpy", "tokenizers")
"""Nothing of these may be imported by listing what is installed."""
TIMEOUT_S = 120.0
CORE_LIGHT = ("dovetail.contracts", "dovetail.plugins.manager", "dovetail.plugins.loader", "dovetail.plugins.registry")
"""Core modules whose attributes are watched while a plugin is loaded, besides those of its kind and what it imports."""


@dataclass(slots=True)
class ChildReport:
    """What the child found.

    Attributes:
        heavy_at_start: Heavy modules that were imported before anything was asked.
        listed: Whether the scan lists the plugin.
        imported_by_listing: Modules that the scan imported: the plugin's own package, heavy ones.
        heavy_after_load: Heavy modules that are imported once the plugin is loaded.
        changed: Core attributes that loading it changed.
        left: What loading it left behind in the process.
        error: Why loading failed.
        second_error: Why loading it again failed.
    """

    heavy_at_start: list[str] = field(default_factory=list)
    listed: bool = False
    imported_by_listing: list[str] = field(default_factory=list)
    heavy_after_load: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    error: str | None = None
    second_error: str | None = None


def run_child(plan: PluginPlan, role: str) -> ChildReport:
    """List and load the plan's first plugin in a fresh process."""
    job = {"plan": base64.b64encode(plan.encode()).decode(), "role": role}
    output = run_module("dovetail.testing.child", json.dumps(job))
    return ChildReport(**output) if "crash" not in output else ChildReport(listed=True, error=str(output["crash"]))


def run_module(module: str, job: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Run a module of the kit in a fresh process that sees the same `sys.path`.

    Returns:
        The JSON object that it prints last; `crash` says what happened if it printed none.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(
            command, input=job, capture_output=True, text=True, check=False, env=environment, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return {"crash": f"it did not end within {timeout_s:g} s"}
    try:
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = " ".join(done.stderr.split()[-40:])
        return {"crash": f"the process ended with exit code {done.returncode}: {last}"}
    return report


def main() -> None:
    """Do the job."""
    gc.disable()  # it imports, says what it saw, and ends
    report = ChildReport(heavy_at_start=[name for name in HEAVY if name in sys.modules])
    job = json.load(sys.stdin)
    plan = PluginPlan.decode(base64.b64decode(job["plan"]))
    (planned,) = plan.plugins
    try:
        _list(planned, report)
        _load(plan, planned, job["role"], report)
    except Exception as error:  # whatever a stranger's code raises is the finding
        report.error = f"{type(error).__name__}: {error}"
    print("\n" + json.dumps(asdict(report)), flush=True)


def _list(planned: PlannedPlugin, report: ChildReport) -> None:
    from dovetail.plugins import Registry

    before = set(sys.modules)
    registry = Registry.scan()
    report.listed = any(r.name == planned.name and r.target == planned.target for r in registry.of_kind(planned.kind))
    new = set(sys.modules) - before
    module = planned.target.partition(":")[0]
    top = module.partition(".")[0]
    report.imported_by_listing = sorted(
        name for name in new if name == module or name.partition(".")[0] in (*HEAVY, *_foreign(top))
    )
    report.imported_by_listing = sorted({n if n == module else n.partition(".")[0] for n in report.imported_by_listing})


def _foreign(top: str) -> tuple[str, ...]:
    """The plugin's own package, unless it is Dovetail's, part of which is always imported."""
    return () if top in ("dovetail", "dovetail_server") else (top,)


def _load(plan: PluginPlan, planned: PlannedPlugin, role: str, report: ChildReport) -> None:
    from importlib import import_module

    from dovetail.plugins import load
    from dovetail.plugins.loader import import_planned
    from dovetail.plugins.monkeypatches import detect_monkeypatches, snapshot

    heavy_before = [name for name in HEAVY if name in sys.modules]
    core = (*CORE_LIGHT, *KINDS[planned.kind].watched)
    modules = [import_module(name) for name in core]
    for module in modules:
        for name in getattr(module, "__all__", ()):
            getattr(module, name)
    heavy_core = {name for name in HEAVY if name in sys.modules} - set(heavy_before)
    before, state = snapshot(), ProcessState.now()
    first = load(plan, role).get(planned.kind, planned.qualified)
    _make(planned, first)
    report.changed = detect_monkeypatches(before)
    report.left = state.differences(ProcessState.now())
    report.heavy_after_load = [name for name in HEAVY if name in sys.modules and name not in heavy_core]
    try:
        load(plan, role).get(planned.kind, planned.qualified)
        _make(planned, import_planned(planned))
    except Exception as error:  # whatever a stranger's code raises is the finding
        report.second_error = f"{type(error).__name__}: {error}"
    report.changed = detect_monkeypatches(before)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What all code of a process shares and a plugin must leave as it is when it is loaded."""

    threads: frozenset[str]
    children: frozenset[int]
    signals: dict[str, str]
    torch: dict[str, str]

    @classmethod
    def now(cls) -> ProcessState:
        """Look at this process."""
        children = {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
        handlers = {name.name: repr(signal.getsignal(name)) for name in signal.valid_signals() if hasattr(name, "name")}
        return cls(frozenset(thread.name for thread in threading.enumerate()), frozenset(children), handlers, _torch())

    def differences(self, later: ProcessState) -> list[str]:
        """Say what is there that was not."""
        found = [f"the thread {name!r}" for name in sorted(later.threads - self.threads)]
        found += [f"the process {pid}" for pid in sorted(later.children - self.children)]
        found += [f"a handler of {name}" for name, handler in later.signals.items() if handler != self.signals[name]]
        return found + [f"torch's {what} {v}" for what, v in later.torch.items() if v != (self.torch or TORCH)[what]]


TORCH = {"default dtype": "torch.float32", "default device": "cpu", "grad mode": "True"}
"""How torch begins."""


def _torch() -> dict[str, str]:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return {}
    values = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    return dict(zip(TORCH, map(str, values), strict=True))


def _make(planned: PlannedPlugin, loaded: Any) -> None:
    """Make what a server makes of a plugin at start."""
    if planned.kind in ("reasoning_parser", "tool_parser"):
        loaded()
    elif planned.kind == "hooks":
        from dovetail.plugins import HookManager, Registry
        from dovetail.plugins.manager import REGISTRATION_HOOKS

        manager, registry = HookManager([(planned, loaded)]), Registry()
        for kind, hook in REGISTRATION_HOOKS.items():
            given = registry.for_kind(kind, planned.distribution)
            manager.collect(hook, partial(_given, given))


def _given(registry: Any, planned: PlannedPlugin) -> dict[str, Any]:
    return {"registry": registry}


if __name__ == "__main__":
    main()
