"""Compiles grammars in a process that can be killed: `python -m dovetail_testing.conformance.compile_child`.

The job comes as JSON on standard input. Each compilation is announced on standard output before it begins, so that the
parent can say which one hangs.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from dovetail.contracts.errors import DovetailError
from dovetail.contracts.grammar import GrammarLimits, GrammarSpec, Kind
from dovetail.plugins.plan import PlannedPlugin, PluginPlan

_START_S = 30.0


def compile_times(
    planned: PlannedPlugin, file: str | None, specs: Sequence[GrammarSpec], timeout_s: float, patience_s: float
) -> list[dict[str, Any]]:
    """Compile each grammar in turn in one child.

    Args:
        planned: The backend.
        file: Where its module is, if it is not installed.
        specs: The grammars.
        timeout_s: As given to `compile`.
        patience_s: When the child is killed for a single compilation.

    Returns:
        For each grammar up to the one that hangs: `kind` (`object`, `bytes`, `error` or `hang`), `seconds`, `message`.
    """
    job = {
        "plan": base64.b64encode(PluginPlan(plugins=(planned,)).encode()).decode(),
        "file": file,
        "specs": [[spec.kind.value, spec.source] for spec in specs],
        "timeout_s": timeout_s,
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", __name__]
    limit = _START_S + patience_s * len(specs)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        reader = _Reader(child)
        reader.write(json.dumps(job))
        found = reader.results(len(specs), patience_s, limit)
        child.kill()
    return found


class _Reader:
    """Reads a child's lines with a time limit for each."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        import queue
        import threading

        self._child = child
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._empty = queue.Empty
        threading.Thread(target=self._pump, daemon=True).start()

    def _pump(self) -> None:
        for line in self._child.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def write(self, text: str) -> None:
        if self._child.stdin is not None:
            self._child.stdin.write(text)
            self._child.stdin.close()

    def results(self, count: int, patience_s: float, limit_s: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        patience = _START_S
        deadline = time.monotonic() + limit_s
        while len(found) < count and time.monotonic() < deadline:
            try:
                line = self._lines.get(timeout=patience)
            except self._empty:
                return [*found, {"kind": "hang", "seconds": patience, "message": f"no end after {patience:g} s"}]
            if line is None:
                error = self._child.stderr.read() if self._child.stderr is not None else ""
                return [*found, {"kind": "error", "seconds": 0.0, "message": " ".join(error.split()[-40:])}]
            patience = patience_s
            if line.startswith("{"):
                found.append(json.loads(line))
        return found


def load_target(planned: PlannedPlugin, file: str | None) -> Any:
    """Import a plugin as the plan says, or its module from a file where it is not installed."""
    if file is None:
        from dovetail.plugins.loader import import_planned

        return import_planned(planned)
    name, _, path = planned.target.partition(":")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    loaded: Any = module
    for attr in path.split("."):
        loaded = getattr(loaded, attr)
    return loaded


def main() -> None:
    """Do the job."""
    from dovetail_testing.conformance.grammar_samples import small_vocabulary

    job = json.load(sys.stdin)
    (planned,) = PluginPlan.decode(base64.b64decode(job["plan"])).plugins
    backend = load_target(planned, job["file"])(small_vocabulary(with_encode=False))
    limits = GrammarLimits(timeout_s=job["timeout_s"])
    for kind, source in job["specs"]:
        print("begin", flush=True)
        begin = time.perf_counter()
        try:
            compiled = backend.compile(GrammarSpec(kind=Kind(kind), source=source), limits)
            what, message = ("bytes" if isinstance(compiled, bytes) else "object"), ""
        except Exception as error:  # whatever a stranger's code raises is the finding
            what, message = "error", f"{type(error).__name__}: {error}"
            if not isinstance(error, DovetailError):
                message = f"untyped {message}"
        print(json.dumps({"kind": what, "seconds": time.perf_counter() - begin, "message": message}), flush=True)


if __name__ == "__main__":
    main()
