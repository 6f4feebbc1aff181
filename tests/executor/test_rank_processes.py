"""Ranks as processes: one that ends, stops, hangs or runs other code is found and named; streams go on behind it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rank_engines import PROMPTS, SMALL, make_core
from restarting import Reading, make_engine, mixed
from warm_starts import CODE

from dovetail.base.settings import EngineSettings
from dovetail.client import launch
from dovetail.contracts.errors import ConfigError
from dovetail.engine.core import EngineCore
from dovetail.executor.followers import ProcessFollower, RankError
from dovetail.executor.group import GroupExecutor, about, check_same
from dovetail.messages import SamplerParams, Submit
from dovetail.plugins import Registry, load, make_plan
from dovetail.runtime.memory.plan import DeviceBytes
from dovetail_server.supervision.engine_process import Restarts
from dovetail_testing.models import make_model

FULL = pytest.mark.full
LIMIT_S = 3.0
BODY = """
import sys, time
from dovetail.executor import rank_main
{}
sys.exit(rank_main.main(sys.argv[1:]))
"""
HANGS = """
from dovetail.executor.local import LocalExecutor
LocalExecutor.launch = lambda self, step: time.sleep(600)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return make_model(tmp_path_factory.mktemp("llama") / "model", "LlamaForCausalLM")


def follower(code: str, rank: int = 1) -> Any:
    """Start ranks in processes, one of which runs something else first."""
    started = [0]

    class Changed(ProcessFollower):
        program = (CODE, BODY.format(code))

    def start(pipe: Connection) -> ProcessFollower:
        started[0] += 1
        return (Changed if code and started[0] == rank else ProcessFollower)(pipe)

    return start


@contextlib.contextmanager
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str = "", num: int = 2) -> Iterator[EngineCore]:
    """An engine of ranks that are processes, which may keep it waiting for a moment only."""
    start = follower(code)
    monkeypatch.setattr(launch, "GroupExecutor", lambda *args, **_: GroupExecutor(*args, start, LIMIT_S))
    core = make_core(folder, "LlamaForCausalLM", tensor_parallel_size=num)
    pids = [one.pid for one in core.executor.followers]  # type: ignore[attr-defined]
    try:
        yield core
    finally:
        core.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def ask(core: EngineCore) -> None:
    """Give an engine something to do."""
    params = SamplerParams(max_tokens=4, temperature=0.0)
    core.handle(Submit(rid="", handle=core._arrivals + 1, prompt_ids=PROMPTS[1], params=params))


def until_blamed(work: Callable[[], object]) -> str:
    """Do something again and again, until a rank is to blame."""
    for _ in range(1000):
        try:
            work()
        except RankError as error:
            return str(error)
        time.sleep(0.01)
    pytest.fail("no rank is to blame")


@pytest.mark.parametrize("num", [2, pytest.param(4, marks=FULL)])
def test_a_stopped_rank_is_named(num: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a step, within the limit; the others are not accused, and none is left behind."""
    with engine(folder, monkeypatch, num=num) as core:
        ask(core)
        core.step()
        os.kill(core.executor.followers[-1].pid, signal.SIGSTOP)  # type: ignore[attr-defined]
        began = time.monotonic()
        assert until_blamed(core.step) == f"rank {num - 1} is stopped (SIGSTOP)"
        assert time.monotonic() - began < 10 * LIMIT_S


@pytest.mark.full
def test_a_hung_rank_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does something else for ever."""
    with engine(folder, monkeypatch, HANGS) as core:
        ask(core)
        assert until_blamed(core.step) == "rank 1 does not answer"


def test_ranks_without_work_are_looked_after(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stops, or is killed, while nobody asks anything is found all the same."""
    with engine(folder, monkeypatch) as core:
        monkeypatch.setattr("dovetail.executor.followers.PING_S", 0.0)
        [rank] = core.executor.followers  # type: ignore[attr-defined]
        for _ in range(20):
            core.executor.check()
            time.sleep(0.01)
        ask(core)
        while core.has_work:
            core.step()
        os.kill(rank.pid, signal.SIGSTOP)
        assert until_blamed(core.executor.check) == "rank 1 is stopped (SIGSTOP): it has not answered for 3 s"
        os.kill(rank.pid, signal.SIGKILL)
        while "SIGKILL" not in rank.trouble:
            time.sleep(0.01)
        assert until_blamed(core.executor.check) == "rank 1 was ended by SIGKILL"


OTHERS = {
    "from dovetail.executor import group; group.version = lambda name: '9.9'": "rank 1 runs dovetail 9.9, rank 0 ",
    "from dovetail.plugins import loader; loader.installed_version = lambda _: '9.9'": "version 9.9 is installed now",
    "from dovetail.plugins.loader import LoadedPlugins as L; s = L.states; L.states = lambda self: s(self)[1:]": (
        "rank 0 has 0."
    ),
}


@pytest.mark.parametrize("code", [pytest.param(code, marks=FULL) if "loader" in code else code for code in OTHERS])
def test_a_rank_of_other_code_is_refused(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of Dovetail, of a plugin, or another set of plugins: in one line, before weights are read."""
    monkeypatch.setattr("dovetail.runtime.checkpoint.weights.load_weights", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ConfigError) as caught, engine(folder, monkeypatch, code):
        pass
    assert OTHERS[code] in str(caught.value)
    assert "restart the server" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_candidates_that_the_first_rank_alone_has_tried_are_no_difference() -> None:
    """It measures several attention backends; the others load what it has chosen."""
    plan = make_plan(
        Registry.scan(), model="LlamaForCausalLM", attention_backend="auto", schedule_policy="fcfs", device="cuda"
    )
    first, other = load(plan, "engine"), load(plan, "worker")
    assert len(list(first.candidates("attention_backend"))) > 1
    next(other.candidates("attention_backend"))
    device = DeviceBytes(kind="cuda", name="a device", total=1, free=1)
    check_same(about(first, device), about(other, device), 1)
    first.get("model", "LlamaForCausalLM")
    kept = [row for row in about(other, device).plugins if row[0] != "model"]
    with pytest.raises(ConfigError, match=r"^model "):
        check_same(about(first, device), msgspec.structs.replace(about(other, device), plugins=tuple(kept)), 1)


def test_a_rank_that_dies_at_its_start_is_named(folder: Path) -> None:
    """And nobody waits for the rest of it."""
    plan = make_plan(
        Registry.scan(), model="LlamaForCausalLM", attention_backend="auto", schedule_policy="fcfs", device="cpu"
    )
    settings = EngineSettings(model_path=str(folder), tensor_parallel_size=2, **SMALL)
    with pytest.raises(RankError, match=r"^rank 1 has ended with code 7\nin the start's phase 'load'$"):
        GroupExecutor(settings, load(plan, "engine"), follower("sys.exit(7)"))


@pytest.mark.full
def test_a_rank_that_cannot_be_started_is_named(folder: Path) -> None:
    """With the system's reason; those that were started are ended."""
    plan = make_plan(
        Registry.scan(), model="LlamaForCausalLM", attention_backend="auto", schedule_policy="fcfs", device="cpu"
    )
    settings = EngineSettings(model_path=str(folder), tensor_parallel_size=4, **SMALL)
    started: list[ProcessFollower] = []

    def start(pipe: Connection) -> ProcessFollower:
        if len(started) == 1:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(ProcessFollower(pipe))
        return started[-1]

    said = r"^rank 2 could not be started: .* temporarily unavailable\nin the start's phase 'load'$"
    with pytest.raises(RankError, match=said):
        GroupExecutor(settings, load(plan, "engine"), start)
    assert started[0].trouble


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in file.read_text().split()]
    return found


def is_rank(pid: int) -> bool:
    """Whether a process is a further rank."""
    return b"rank_main" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("sent", ["SIGKILL", pytest.param("SIGSTOP", marks=FULL)])
def test_streams_go_on_behind_a_rank_that_is_gone(sent: str) -> None:
    """Killed or stopped in the middle of a step: the engine is started again with all its ranks, and every stream
    has the tokens that it would have had."""

    async def main() -> int:
        settings = {"tensor_parallel_size": 2, "dtype": "float32", "max_running_requests": 8}
        client = make_engine(Restarts(hang_s=8.0), disable_radix_cache=True, **settings)
        await client.start()
        try:
            expected = await Reading(client, mixed(7, 40)).end()
            assert client.num_restarts == 0
            reading = Reading(client, mixed(7, 40))
            await reading.reach(60)
            assert client.pid is not None
            [rank] = [pid for pid in children(client.pid) if is_rank(pid)]
            os.kill(rank, getattr(signal, sent))
            assert await reading.end() == expected
            assert client.num_restarts == 1
            return rank
        finally:
            await client.close()

    rank = asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)
