"""Background work: what dies is told, counted and restarted, and nothing keeps the process from ending."""

from __future__ import annotations

import ast
import asyncio
import logging
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_starts import CODE

import dovetail
import dovetail_offline
import dovetail_server
import dovetail_testing
from dovetail_server.supervision import supervisor
from dovetail_server.supervision.supervisor import Supervisor

STARTERS = ("create_task", "ensure_future", "Thread", "Timer", "run_in_executor", "start_new_thread")
ALLOWED = {
    # The supervisor itself.
    "dovetail_server/supervision/supervisor.py": {"create_task": 1, "Timer": 1},
    # They are awaited by the request that starts them, and end with it.
    "dovetail_server/serving/generation.py": {"create_task": 1},
    "dovetail_server/serving/sse.py": {"ensure_future": 5},
    # A stranger's observer runs beside the event loop; what it raises is logged and counted, and its queue is bounded.
    "dovetail_server/observe/observers.py": {"Thread": 1},
    # The engine's own thread and processes are watched by their client.
    "dovetail_server/supervision/wire.py": {"Thread": 2},
    "dovetail/client/inprocess.py": {"Thread": 1},
    # It imports what grammars need while the model loads; whoever wants it afterwards imports it again.
    "dovetail/client/launch.py": {"Thread": 1},
    # It reads a tokenizer while the model loads; what it raises is raised for whoever asks for the vocabulary.
    "dovetail/grammar/compile/early.py": {"Thread": 1},
    # It waits for the end of the process that a further rank belongs to, and ends it.
    "dovetail/executor/rank_main.py": {"Thread": 1},
    # It waits for the end of the terminal that a conversation's server belongs to, and ends the server.
    "dovetail_server/cli/parent_bound.py": {"Thread": 1},
    # One waits for the end of the gateway that smg belongs to, and ends smg. The other closes its
    # port of metrics for connections, and ends with that.
    "dovetail_server/gateway/smg_process.py": {"Thread": 2},
    # It only looks at the engine's own thread, and ends with it.
    "dovetail_server/supervision/stall_logger.py": {"Thread": 1},
    # Of the engine, which closes them with its grammars; what they compile reports its own errors.
    "dovetail/grammar/compile/memory.py": {"Timer": 1},
    "dovetail/grammar/compile/jobs.py": {"Thread": 1},
    # Whoever wants the process waits for what this one makes, or for why it could not.
    "dovetail/base/forks.py": {"Thread": 1},
    # `LLM` is a library: its event loop lives in a thread of the caller's process. A call awaits the tasks it starts.
    "dovetail_offline/llm.py": {"Thread": 1, "create_task": 1},
    # Ends a process in which a plugin's code hangs; nothing in the process can watch it.
    "dovetail/plugins/time_limit.py": {"Thread": 1},
    # Calls what a package's API shows, which may never end; who asked waits for a time only.
    "dovetail_server/routes/generating.py": {"Thread": 1},
    # It interrupts a call of a package's API that does not end, and ends the process where that does not help.
    "dovetail_server/apis/watch.py": {"Thread": 1},
    # A WebSocket's turn and its reader end with the connection, whose handler awaits them.
    "dovetail_server/routes/response_socket.py": {"create_task": 1, "ensure_future": 2},
    # Benchmarks and test helpers are programs of their own.
    "dovetail_testing/conformance/compile_child.py": {"Thread": 1},
    "dovetail_server/testing.py": {"Thread": 1},
    "dovetail_server/bench/drive.py": {"create_task": 1},
    "dovetail_server/bench/grammar_load.py": {"create_task": 1},
    "dovetail_server/bench/worker.py": {"create_task": 1},
}
"""Who starts tasks or threads outside the supervisor, and how many times."""


def starts(path: Path) -> Iterator[str]:
    text = path.read_text("utf-8")
    for node in ast.walk(ast.parse(text)) if any(name in text for name in STARTERS) else ():
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in STARTERS:
                yield name


def test_no_task_is_started_outside_the_supervisor() -> None:
    """A task or thread that nobody watches does not exist; exceptions are listed with their reason."""
    found = {}
    for package in (dovetail, dovetail_offline, dovetail_server, dovetail_testing):
        root = Path(str(package.__file__)).parent
        for path in root.rglob("*.py"):
            if count := Counter(starts(path)):
                found[str(path.relative_to(root.parent))] = dict(count)
    assert found == ALLOWED


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(supervisor, "MAX_DELAY_S", 0.01)
    monkeypatch.setattr(supervisor, "STABLE_S", 0.05)
    monkeypatch.setattr(logging.getLogger("dovetail"), "propagate", True)
    return Supervisor()


async def until(condition: object) -> None:
    deadline = time.monotonic() + 120
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def test_what_dies_is_restarted_counted_and_logged_once_per_cause(
    quick: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    """Four deaths of two causes: two tracebacks, four counted, and the work goes on."""
    lives: list[int] = []

    async def work() -> None:
        lives.append(len(lives))
        if len(lives) <= 3:
            raise ValueError("one cause")
        if len(lives) == 4:
            raise KeyError("another")
        await asyncio.Event().wait()

    async def main() -> None:
        quick.keep("worker", work)
        await until(lambda: len(lives) == 5)
        assert quick.problem is None
        assert await quick.close() == []

    asyncio.run(main())
    assert quick.crashes == {"worker": 4}
    assert len([record for record in caplog.records if record.exc_info]) == 2
    assert len([record for record in caplog.records if "died" in record.getMessage()]) == 4


def test_what_cannot_be_restarted_makes_the_process_unready_until_it_can(quick: Supervisor) -> None:
    """Five deaths in a row are a problem that names the task; it is tried on, and the problem ends with the fault."""
    is_broken = True

    async def work() -> None:
        if is_broken:
            raise OSError("no disk")
        await asyncio.Event().wait()

    async def main() -> None:
        nonlocal is_broken
        quick.keep("worker", work)
        await until(lambda: quick.problem is not None)
        assert quick.problem == "background task 'worker' died 5 times within 60 s: OSError: no disk"
        is_broken = False
        await until(lambda: quick.problem is None)
        await quick.close()

    asyncio.run(main())


def test_a_cancellation_of_something_else_is_a_death(quick: Supervisor) -> None:
    """A service that waits for a cancelled future goes on; one that is stopped ends."""
    lives = 0

    async def work() -> None:
        nonlocal lives
        lives += 1
        future = asyncio.get_running_loop().create_future()
        if lives == 1:
            future.cancel()
        await future

    async def main() -> None:
        service = quick.keep("worker", work)
        await until(lambda: lives == 2)
        await service.stop()
        assert quick.crashes == {"worker": 1}
        assert not quick._tasks

    asyncio.run(main())


def test_a_single_run_is_counted_only_where_nobody_awaits_it(quick: Supervisor) -> None:
    """An awaited task's error is its caller's."""

    async def fail() -> None:
        raise ValueError("x")

    async def main() -> None:
        with pytest.raises(ValueError, match="x"):
            await quick.start("awaited", fail(), is_awaited=True)
        quick.start("alone", fail())
        await until(lambda: quick.crashes)
        assert quick.crashes == {"alone": 1}

    asyncio.run(main())


def test_the_group_ends_within_its_limit_whatever_its_tasks_do(quick: Supervisor) -> None:
    """Who swallows one cancellation gets another; who swallows all is named and left."""
    released = asyncio.Event()

    async def stubborn() -> None:
        while not released.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        quick.keep("good", asyncio.Event().wait)  # type: ignore[arg-type]
        task = quick.start("stubborn", stubborn())
        await asyncio.sleep(0)
        assert await quick.close(0.2) == ["stubborn"]
        assert set(quick._tasks.values()) == {"stubborn"}
        released.set()
        await task

    asyncio.run(main())


HANGING = """
import asyncio, sys, threading, time
from dovetail_server.supervision.supervisor import Supervisor
how = sys.argv[1]
async def swallow():
    while True:
        try: await asyncio.sleep(60)
        except asyncio.CancelledError: pass
async def main(tasks):
    if how == "task": tasks.start("swallower", swallow()); await asyncio.sleep(0)
    if how == "thread": asyncio.get_running_loop().run_in_executor(None, time.sleep, 600); await asyncio.sleep(0.1)
    if how == "plain thread": threading.Thread(target=time.sleep, args=(600,)).start()
    tasks.exit_after(600)
    tasks.exit_after(1.0)
    if how == "loop": time.sleep(600)
    await tasks.close(0.1)
tasks = Supervisor()
with tasks.cancelling_exit(), asyncio.Runner() as runner:
    runner.run(main(tasks))
"""


@pytest.mark.parametrize(("how", "code"), [("task", 1), ("thread", 1), ("plain thread", 1), ("loop", 1), ("none", 0)])
def test_nothing_keeps_the_process_from_ending(how: str, code: int) -> None:
    """A task that swallows its end, a thread that hangs, a blocked loop: the process ends, and says what still ran."""
    done = subprocess.run([sys.executable, "-c", HANGING, how], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert ("did not end in time" in done.stderr) == bool(code)
    assert ("swallower" in done.stderr) == (how == "task")


SERVED = """
import asyncio, sys, time
from dovetail_server.supervision import supervisor
from dovetail_server.start import lifecycle
from dovetail_server.start import run
from dovetail_server.cli import main
sys.path.insert(0, sys.argv.pop(1))
from fake_engine import FakeEngine
supervisor.END_S = 0.2
run.LAST_RESORT_S = lifecycle.LAST_RESORT_S = 2.0
run.make_engine = lambda settings, plan: FakeEngine(lambda submit: [1], eos=257, vocab_size=262)
async def swallow():
    while True:
        try: await asyncio.sleep(60)
        except asyncio.CancelledError: pass
keep = run.keep_running
run.keep_running = lambda server: (keep(server), server.state.tasks.start("swallower", swallow()))
sys.exit(main(sys.argv[1:]))
"""


def test_sigterm_ends_a_server_whose_task_does_not(tmp_path: Path) -> None:
    """`serve` ends by itself and names the task."""
    helpers = Path(__file__).parent / "server"
    sys.path.insert(0, str(helpers))
    from server_tiny import NO_TENSORS, write_model

    folder = write_model(tmp_path / "model", architectures=["Cohere2ForCausalLM"])  # its plugin alone knows its facts
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    flags = ["serve", str(folder), "--port", "0", "--drain-timeout", "0"]
    command = [sys.executable, CODE, SERVED, str(helpers), *flags, "--file-storage-path", str(tmp_path / "storage")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if "ready to roll" in line:
                process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 1, seen
    assert any("did not end in time" in line and "swallower" in line for line in seen), seen
