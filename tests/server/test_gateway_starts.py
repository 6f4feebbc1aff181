"""Processes of a gateway that cannot be started, or whose lines nobody takes: who sees it, and what goes on."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import shutil
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest
from gateway_process import Served, chat

from dovetail.contracts.errors import DovetailError
from dovetail_server.gateway import child as child_module
from dovetail_server.gateway import run as run_module
from dovetail_server.gateway import smg_process
from dovetail_server.gateway.child import Child
from dovetail_server.gateway.fleet import Fleet, Worker
from dovetail_server.gateway.placement import LINE_BYTES, _last_line
from dovetail_server.gateway.relayed_log import WorkerLog
from dovetail_server.gateway.run import Gateway
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.supervision.supervisor import Supervisor


class Scripted(Child):
    """A worker whose process ends, or cannot be started, as a list says."""

    def __init__(self, ends: Sequence[int | Exception], tasks: Supervisor, has_served: bool = True) -> None:
        worker = Worker(0, "http://127.0.0.1:9", has_served=has_served)
        super().__init__(worker, ServeSettings(max_engine_restarts=3), 9, {}, tasks)
        self.ends = deque(ends)

    async def _run_once(self, log: WorkerLog) -> int:
        await asyncio.sleep(0)
        end = self.ends.popleft()
        if isinstance(end, Exception):
            raise end
        self.num_starts += 1
        return end


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(logging.getLogger("dovetail"), "propagate", True)


def full(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def run_out(ends: Sequence[int | Exception], has_served: bool = True) -> str:
    """Return why a worker is not started again."""

    async def run() -> str:
        child = Scripted(ends, Supervisor(), has_served)
        await asyncio.wait_for(child.keep_running(), 10)
        assert not child.ends
        return str(child.failure)

    return asyncio.run(run())


def test_a_start_that_fails_is_a_death(caplog: pytest.LogCaptureFixture) -> None:
    """Tried again as often as one that ended by itself, with the cause and what helps in the log and at the end."""
    ends = [full(errno.EAGAIN), full(errno.EMFILE), RuntimeError("can't start new thread"), full(errno.ENOMEM)]
    with caplog.at_level("WARNING", "dovetail.server"):
        reason = run_out(ends)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    for line, (cause, advice) in zip(
        said,
        (("unavailable", "ulimit -u"), ("open files", "ulimit -n"), ("new thread", "ulimit -u")),
        strict=True,
    ):
        assert re.fullmatch(f"Worker DP0 could not be started: .*{cause}.*; .*{advice}.*; it is started again.", line)
    assert "worker DP0 could not be started for the 4. time within 600 s (--max-engine-restarts 3): " in reason
    assert "free memory on this machine" in reason


def test_a_first_start_that_fails_ends_the_command() -> None:
    """As does a worker that ends before it has served."""
    reason = run_out([full(errno.ENOENT)], has_served=False)
    assert reason.startswith("worker DP0 could not be started: [Errno 2]")
    assert reason.endswith("mend the installation and start the server again")


def gateway_of(child: Child) -> Gateway:
    return Gateway(child.settings, Fleet([child.worker]), [child], child._tasks)


def test_what_ends_the_work_of_a_gateway_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    """A fault that nobody foresaw, too: in one line, with its traceback in the log. What ends well raises nothing."""

    async def broken() -> None:
        raise KeyError("no such thing")

    async def run() -> None:
        tasks = Supervisor()
        work = [tasks.start("worker", broken(), is_awaited=True), tasks.start("http", asyncio.sleep(0))]
        await asyncio.wait(work)
        gateway = gateway_of(Scripted([], tasks))
        gateway._raise_failure(work[1:])
        gateway._raise_failure(work)

    with pytest.raises(DovetailError, match=r"the task 'worker' died: KeyError: 'no such thing'; .* report it"):
        asyncio.run(run())
    assert any(record.exc_info for record in caplog.records)


def test_two_signals_are_two_rounds_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were they at once, all workers could be down; more that come meanwhile are one round."""
    monkeypatch.setattr(run_module, "WATCH_S", 0.001)

    async def run() -> None:
        tasks = Supervisor()
        children = [Scripted([], tasks) for _ in range(2)]
        for child in children:
            child.worker.is_ready = True
            monkeypatch.setattr(child, "restart", lambda child=child: tasks.start("restart", again(child)))
        down, rounds = 0, 0

        async def again(child: Scripted) -> None:
            nonlocal down, rounds
            down += 1
            assert down == 1
            await asyncio.sleep(0.02)
            down -= 1
            rounds += 1
            child.num_starts += 1
            child.worker.is_ready = True

        gateway = Gateway(children[0].settings, Fleet([child.worker for child in children]), children, tasks)
        for _ in range(4):
            gateway._renew()
            await asyncio.sleep(0.005)
        while gateway._is_renewing:
            await asyncio.sleep(0.01)
        assert rounds == 4
        assert not tasks.crashes
        gateway._renew()
        while gateway._is_renewing:
            await asyncio.sleep(0.01)
        assert rounds == 6

    asyncio.run(run())


def test_a_restart_that_does_not_come_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the worker's name and what it said last."""
    monkeypatch.setattr(run_module, "RENEW_S", 0.01)
    monkeypatch.setattr(run_module, "WATCH_S", 0.001)

    async def run() -> None:
        tasks = Supervisor()
        gateway = gateway_of(Scripted([], tasks))
        gateway._renew()
        while not tasks.crashes["rolling restart"]:
            await asyncio.sleep(0.01)
        assert not gateway._is_renewing

    asyncio.run(asyncio.wait_for(run(), 30))
    assert "the rolling restart ends at worker DP0, which is not ready after 0.01 s: it is restarted" in caplog.text


def test_lines_are_taken_though_none_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker stands still when nobody reads what it writes: a full disk, or a line in no form, must not do that."""

    class Full:
        def write(self, text: str) -> int:
            raise full(errno.ENOSPC)

        flush = write

    monkeypatch.setattr(sys, "stderr", Full())

    async def follow() -> bool:
        stream = asyncio.StreamReader()
        stream.feed_data(b'{"a":' * 9000 + b"\none\ntwo\n")
        stream.feed_eof()
        await WorkerLog("DP0").follow(stream)
        return stream.at_eof()

    assert asyncio.run(follow())


def test_a_port_that_nobody_is_to_use_takes_no_connection() -> None:
    """That of smg's metrics, which it serves to everybody; another one stays open."""
    with socket.create_server(("127.0.0.1", 0)) as closed, socket.create_server(("127.0.0.1", 0)) as other:
        smg_process.close(closed.getsockname()[1])
        socket.create_connection(other.getsockname(), timeout=5).close()
        with pytest.raises(TimeoutError):
            socket.create_connection(closed.getsockname(), timeout=0.1)


def test_all_of_what_smg_writes_is_taken() -> None:
    """Lines without end, too, of which the last one's end is kept."""

    async def follow(data: bytes) -> str:
        stream, said = asyncio.StreamReader(), deque[str](maxlen=1)
        stream.feed_data(data)
        stream.feed_eof()
        await _last_line(stream, said)
        assert stream.at_eof()
        return said[0]

    assert asyncio.run(follow(b"first\n\x1b[31mwhy it ends\x1b[0m\n \n")) == "why it ends"
    assert asyncio.run(follow(b"x" * 300_000 + b"\nthe end")) == "the end"
    assert len(asyncio.run(follow(b"x" * (9 * LINE_BYTES)))) == 500


@pytest.fixture
def movable(tmp_path: Path) -> Path:
    """An interpreter of this environment that can be taken away and put back."""
    home, of = tmp_path / "env", Path(sys.prefix)
    (home / "bin").mkdir(parents=True)
    if not (of / "pyvenv.cfg").exists():
        pytest.skip("needs a virtual environment")
    shutil.copy(of / "pyvenv.cfg", home)
    (home / "lib").symlink_to(of / "lib")
    python = home / "bin" / "python"
    python.symlink_to(Path(sys.executable).resolve())
    return python


def served(python: Path, folder: Path, *flags: str) -> Served:
    flags = ("--dp", "2", "--device", "cpu", "--file-storage-path", str(folder / "files"), *flags)
    return Served(folder, "serve", *flags, key=None, python=str(python)).wait()


def kill_one(running: Served) -> int:
    pid = running.pids()[1]
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.full
def test_a_worker_comes_back_where_its_start_failed_once(movable: Path, tmp_path: Path, light: None) -> None:
    """Meanwhile the gateway and the other worker serve."""
    pytest.importorskip("smg", reason="needs dovetail-llm[gateway]")
    running = served(movable, tmp_path)
    try:
        away = movable.rename(movable.with_name("away"))
        pid = kill_one(running)
        running.until(lambda: "Worker DP1 could not be started: [Errno 2]" in running.text())
        statuses = [running.post("/v1/chat/completions", chat(1, n)).status_code for n in range(4)]
        assert statuses == [200] * 4
        assert [worker["ready"] for worker in running.workers()] == [True, False]
        away.rename(movable)
        running.until(lambda: all(worker["ready"] for worker in running.workers()) and pid not in running.pids())
        assert "never retrieved" not in running.text()
    finally:
        assert running.close() == 0


@pytest.mark.full
def test_a_worker_that_cannot_come_back_ends_the_server(movable: Path, tmp_path: Path, light: None) -> None:
    """With a code that is not 0, and one line that says why and what to do."""
    pytest.importorskip("smg", reason="needs dovetail-llm[gateway]")
    running = served(movable, tmp_path, "--max-engine-restarts", "2")
    try:
        movable.rename(movable.with_name("away"))
        kill_one(running)
        assert running.process.wait(60) == 1
    finally:
        running.close()
    [line] = [line for line in running.text().splitlines() if line.startswith("dovetail serve: ")]
    assert "worker DP1 could not be started for the 3. time within 600 s (--max-engine-restarts 2): [Errno 2]" in line
    assert line.endswith("mend the installation and start the server again")
    assert "Traceback" not in running.text()
