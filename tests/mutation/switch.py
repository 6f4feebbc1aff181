"""Turns the mutants of an instrumented tree on, one at a time, and notes which test reaches which of them.

All product files of such a tree import `active`; pytest loads this module as a plugin, see `guard.py`.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

FOLDER, PLAN = os.environ.get("MUTATION_FOLDER", ""), os.environ.get("MUTATION_PLAN", "")
TEST, ACTIVE = "MUTATION_TEST", "MUTATION_ACTIVE"
"""Variables with the running test and the mutant that is on; the processes that tests start inherit them."""
MAX_KILLERS = 4
_seen: set[tuple[str, str]] = set()


def active(number: str) -> bool:
    """Return whether a mutant is on; note that the running test reaches it."""
    if not PLAN and (number, test := os.environ.get(TEST, "")) not in _seen:
        _seen.add((number, test))
        note("hits", number, test)
    return os.environ.get(ACTIVE) == number


def note(name: str, *words: str) -> None:
    """Append a line. The file is opened each time: forked processes close the descriptors that they inherit."""
    with open(f"{FOLDER}/{name}", "ab", buffering=0) as file:
        file.write("\t".join(words).encode() + b"\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    os.environ[TEST] = f"setup\t{item.nodeid}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    os.environ[TEST] = f"call\t{item.nodeid}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ and not PLAN:
        note("times", report.nodeid, report.when, f"{report.duration:.4f}", report.outcome)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Follow the plan, mutants with lists of tests, in forks of this process, which has everything imported."""
    if not PLAN or os.environ.get(ACTIVE):
        return None
    plan = json.loads(Path(PLAN).read_text())
    gc.freeze()
    jobs = [pid for job in range(plan["jobs"]) if (pid := _job(session, plan["runs"][job :: plan["jobs"]]))]
    for pid in jobs:
        os.waitpid(pid, 0)
    return True


def _job(session: pytest.Session, runs: list[tuple[str, list[list[str]]]]) -> int:
    """Work on a part of the plan in a process of its own; return its id."""
    if pid := os.fork():
        return pid
    items = {item.nodeid: item for item in session.items}
    try:
        for number, stages in runs:
            failed: list[str] = []
            for tests in stages:
                failed = failed or failing(session, number, chosen(items, tests))
            # A test that fails without the mutant, too, has killed nothing.
            broken = failing(session, "none", [items[test] for test in failed])
            note("killers", number, *(test for test in failed if test not in broken))
    finally:
        os._exit(0)


def chosen(items: dict[str, pytest.Item], tests: list[str]) -> list[pytest.Item]:
    """Return tests by their names; all of a function of which no case has the name any more, since cases moved."""
    found: dict[str, pytest.Item] = {}
    for test in tests:
        cases = [name for name in items if name.partition("[")[0] == test.partition("[")[0]]
        found |= {name: items[name] for name in ([test] if test in items else cases)}
    return list(found.values())


def failing(session: pytest.Session, number: str, items: list[pytest.Item], limit_s: float = 240) -> list[str]:
    """Run tests in a fork with a mutant on; return those that fail, or the one that crashes or takes too long."""
    if not items:
        return []
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.setsid()
        os.environ[ACTIVE], session.items, session.config.option.maxfail = number, items, MAX_KILLERS
        session.config.pluginmanager.register(_Reports(writer))
        with suppress(session.Failed, session.Interrupted):
            session.config.hook.pytest_runtestloop(session=session)
        os.write(writer, b"end \n")
        os._exit(0)
    os.close(writer)
    deadline, said, is_running = time.monotonic() + limit_s, b"", True
    while is_running and time.monotonic() < deadline:
        time.sleep(0.05)
        is_running = os.waitpid(pid, os.WNOHANG) == (0, 0)
        while select.select([reader], [], [], 0)[0] and (part := os.read(reader, 1 << 16)):
            said += part
    os.close(reader)
    if is_running:
        for process in reversed(descendants(pid)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        os.waitpid(pid, 0)
    words = [line.split(" ", 1) for line in said.decode().splitlines()]
    failed = [test for word, test in words if word == "failed"]
    if words and words[-1][0] != "end" and not failed:
        failed = [test for word, test in words if word == "start"][-1:]
    return list(dict.fromkeys(failed))


class _Reports:
    """Writes what the fork runs into a pipe."""

    def __init__(self, writer: int) -> None:
        self._writer = writer

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.write(self._writer, f"start {nodeid}\n".encode())

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self._writer, f"failed {report.nodeid}\n".encode())


def descendants(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *(found for child in children for found in descendants(int(child)))]
    return [pid]
