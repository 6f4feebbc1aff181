"""Fresh processes that list and load a plugin and say what happened.

They are forked from processes of `python -m dovetail_testing.child`, of which one has imported nothing heavy and others
what a server has when it loads plugins of a kind. A class of the kit asks for two; importing torch alone takes seconds.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import sys
import tempfile
import time
from functools import partial
from importlib import import_module, invalidate_caches
from typing import Any

import msgspec
from msgspec.structs import replace

from dovetail.base.forks import ForkServer, ForkStartError, GoneError, control_of, receive, send, serve_forks
from dovetail.plugins import load
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.loader import import_planned
from dovetail.plugins.monkeypatches import detect_monkeypatches, watching
from dovetail.plugins.plan import PlannedPlugin, PluginPlan
from dovetail.plugins.process_state import ProcessState, registrations

HEAVY = ("torch", "transformers", "pydantic", "fastapi", "numpy", "tokenizers", "dovetail_server")
"""Nothing of these may be imported by listing what is installed."""
TIMEOUT_S = 120.0
CORE_LIGHT = ("dovetail.contracts", "dovetail.plugins.manager", "dovetail.plugins.loader", "dovetail.plugins.registry")
"""Core modules whose attributes are watched while a plugin is loaded, besides those of its kind and what it imports."""


class ChildReport(msgspec.Struct):
    """What the child found.

    Attributes:
        heavy_at_start: Heavy modules that were imported before anything was asked.
        listed: Whether the scan lists the plugin.
        imported_by_listing: Modules that the scan imported: the plugin's own package, heavy ones.
        heavy_alone: Heavy modules that importing it imports where none of the core has, if an HTTP server loads it.
        heavy_after_load: Heavy modules that are imported once the plugin is loaded, beside what the core brings.
        changed: Core attributes that loading it changed.
        left: What loading it left behind in the process.
        error: Why loading failed.
        ended: Whether loading ends the process.
        second_error: Why loading it again failed.
    """

    heavy_at_start: list[str] = []
    listed: bool = False
    imported_by_listing: list[str] = []
    heavy_alone: list[str] = []
    heavy_after_load: list[str] = []
    changed: list[str] = []
    left: list[str] = []
    error: str | None = None
    ended: bool = False
    second_error: str | None = None


def run_child(plan: PluginPlan, role: str) -> ChildReport:
    """List and load the plan's first plugin in fresh processes."""
    (planned,) = plan.plugins
    job = ForkTask(plan.encode(), role, dict(os.environ))
    report = _ask((), job, ChildReport())
    if report.error is None:
        report = _ask(_core_of(planned.kind), job, report)
    return report


class ForkStart(msgspec.Struct, frozen=True):
    """What a process that is forked for jobs gets first.

    Attributes:
        path: Its `sys.path`.
        modules: What it imports; with none, jobs are about listing.
    """

    path: list[str]
    modules: tuple[str, ...]


class ForkTask(msgspec.Struct, frozen=True):
    """What one fork does: with the encoded plan and the process's role, in this environment."""

    plan: bytes
    role: str
    environment: dict[str, str]
    report: ChildReport = msgspec.field(default_factory=ChildReport)


def _core_of(kind: str) -> tuple[str, ...]:
    """Return what is imported before a plugin is loaded. Kinds that bring torch share it: that takes two seconds."""
    kinds = [KINDS[kind]]
    if "worker" in kinds[0].roles:
        kinds = [one for one in KINDS.values() if "worker" in one.roles]
    return (*CORE_LIGHT, *dict.fromkeys(name for one in kinds for name in one.watched))


_servers: dict[tuple[str, ...], tuple[list[str], ForkServer]] = {}
"""By imported modules: the `sys.path` that a process began with, and the process."""


def _server(modules: tuple[str, ...]) -> ForkServer:
    path = [entry for entry in sys.path if entry]
    began, server = _servers.get(modules, (None, None))
    if server is None or began != path:
        if server is not None:
            server.kill()
        server = ForkServer(__name__, {"PYTHONPATH": os.pathsep.join(path)})
        server.load(ForkStart(path, modules))
        _servers[modules] = path, server
    return server


@atexit.register
def _end_servers() -> None:
    while _servers:
        _servers.popitem()[1][1].kill()


def _ask(modules: tuple[str, ...], job: ForkTask, report: ChildReport) -> ChildReport:
    """Have a fork of a process with these modules do the job; what it adds to the report."""
    try:
        with _server(modules).fork() as channel:
            channel.settimeout(TIMEOUT_S + 10)
            send(channel, replace(job, report=report))
            return msgspec.msgpack.decode(receive(channel), type=ChildReport)
    except (GoneError, ForkStartError, TimeoutError) as error:
        if modules in _servers:
            _servers.pop(modules)[1].kill()
        return replace(report, listed=True, error=f"the process is gone: {error}")


def main() -> int:
    """Import what was asked for, then fork for every job."""
    heavy = [name for name in HEAVY if name in sys.modules]
    gc.disable()  # a fork imports, says what it saw, and ends
    control = control_of(sys.argv[1:])
    start = msgspec.msgpack.decode(receive(control), type=ForkStart)
    sys.path[:] = start.path
    before = {name for name in HEAVY if name in sys.modules}
    for name in start.modules:
        module = import_module(name)
        for attribute in getattr(module, "__all__", ()):
            getattr(module, attribute)
    core = [name for name in HEAVY if name in sys.modules and name not in before]
    return serve_forks(control, partial(_watch, heavy, core if start.modules else None))


def _watch(heavy: list[str], core: list[str] | None, channel: socket.socket) -> None:
    """Do one job in a fork of this fork, and tell how that one ended."""
    job = msgspec.msgpack.decode(receive(channel), type=ForkTask)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with tempfile.TemporaryFile() as written, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        if (pid := os.fork()) == 0:
            channel.close()
            _begin(job, output.fileno(), errors.fileno())
            written.write(msgspec.msgpack.encode(_work(job, heavy, core)))
            written.flush()
            os._exit(0)
        crash = _wait(pid)
        written.seek(0)
        if crash is None and (found := written.read()):
            report = msgspec.msgpack.decode(found, type=ChildReport)
        else:
            words = [word for file in (output, errors) for word in _text_from(file.fileno(), 0).split()]
            last, crash = " ".join(words[-40:]), crash or "the process ended with exit code 0"
            report = replace(job.report, listed=True, error=f"{crash}: {last}".removesuffix(": "), ended=True)
    send(channel, report)


def _text_from(descriptor: int, start: int) -> str:
    """Return what a file holds behind its first bytes."""
    return os.pread(descriptor, os.fstat(descriptor).st_size - start, start).decode(errors="replace")


def _begin(job: ForkTask, output: int, errors: int) -> None:
    """Be as a process that has just started in the asker's environment."""
    os.dup2(output, 1)
    os.dup2(errors, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(job.environment)
    invalidate_caches()


def _wait(pid: int) -> str | None:
    """Wait for a process; how it ended, unless it did as it should."""
    deadline = time.monotonic() + TIMEOUT_S
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"it did not end within {TIMEOUT_S:g} s"
        time.sleep(0.002)
    code = os.waitstatus_to_exitcode(found[1])
    return None if code == 0 else f"the process ended with exit code {code}"


def _work(job: ForkTask, heavy: list[str], core: list[str] | None) -> ChildReport:
    report = job.report
    plan = PluginPlan.decode(job.plan)
    (planned,) = plan.plugins
    try:
        if core is None:
            report.heavy_at_start = heavy
            _list(planned, report)
            _load_alone(planned, report)
        else:
            _load(plan, planned, job.role, core, report)
    except BaseException as error:  # whatever a stranger's code raises is the finding
        report.error = f"{type(error).__name__}: {error}"
    return report


def _load_alone(planned: PlannedPlugin, report: ChildReport) -> None:
    """Import what an HTTP server loads before anything of the core, which may bring what the plugin must not."""
    if "api" in KINDS[planned.kind].roles:
        before = set(sys.modules)
        try:
            import_planned(planned)
        finally:
            report.heavy_alone = [name for name in HEAVY if name in sys.modules and name not in before]


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
    return () if top in ("dovetail", "dovetail_offline", "dovetail_server") else (top,)


def _load(plan: PluginPlan, planned: PlannedPlugin, role: str, core: list[str], report: ChildReport) -> None:
    gc.enable()
    state, output = ProcessState.now(), os.dup(1)
    with watching() as before, registrations(planned.target) as registered:
        first = load(plan, role).get(planned.kind, planned.qualified)
        _make(planned, first)
    report.changed = detect_monkeypatches(before)
    report.left = state.differences(ProcessState.now()) + registered
    if not getattr(sys.stdout, "closed", True):
        sys.stdout.flush()
    if text := _text_from(output, 0):
        report.left.append(f"{text[:60]!r} on standard output, which belongs to the command that runs")
    report.heavy_after_load = [name for name in HEAVY if name in sys.modules and name not in core]
    try:
        load(plan, role).get(planned.kind, planned.qualified)
        _make(planned, import_planned(planned))
    except Exception as error:  # whatever a stranger's code raises is the finding
        report.second_error = f"{type(error).__name__}: {error}"
    report.changed = detect_monkeypatches(before)


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
    sys.exit(main())
