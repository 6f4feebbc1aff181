"""An engine that stands still says in whose code, before it is ended."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path

import pytest
from restarting import Reading, plain

from dovetail.base.settings import EngineSettings
from dovetail.demo import MODEL_DIR
from dovetail.plugins import PluginPlan, Registry, make_plan
from dovetail.plugins.files import add_file
from dovetail_server.supervision.engine_process import ProcessClient, Restarts
from dovetail_server.supervision.stall_logger import StallLogger

SLOW = """
import pathlib, time
from dovetail.contracts.scheduling import SchedulePolicy

class Slow(SchedulePolicy):
    def order(self, waiting, cache):
        mark = pathlib.Path({mark!r})
        while waiting and not mark.exists():
            mark.write_text("once")
            while True:
                time.sleep(0.01)
        return waiting
"""


def test_a_policy_that_never_returns_is_named_and_its_requests_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The log has the plugin, the file and the line; the next engine answers."""
    file, mark = tmp_path / "slow_policy.py", tmp_path / "mark"
    file.write_text(SLOW.format(mark=str(mark)))
    registry = Registry.scan()
    add_file(registry, file)
    plan = make_plan(registry, model="Qwen3ForCausalLM", attention_backend="auto", schedule_policy="slow", device="cpu")
    settings = EngineSettings(model_path=str(MODEL_DIR), device="cpu", max_total_tokens=8192, num_threads=1)

    async def main() -> None:
        client = ProcessClient(settings, plan, log_level="error", restarts=Restarts(hang_s=8))
        await client.start()
        try:
            ended = await Reading(client, plain(2, max_tokens=8)).end()
            assert len(ended) == 2
            assert client.num_restarts >= 1
        finally:
            await client.close()

    asyncio.run(main())
    said = capfd.readouterr().err
    assert "No engine progress for" in said
    assert "schedule_policy 'slow' of slow_policy.py" in said
    assert f"Slow.order ({file}, line 1" in said


@pytest.mark.parametrize("is_busy", [True, False])
def test_it_is_said_once_for_a_place_and_not_of_an_idle_engine(is_busy: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Where nobody's plugin is being called, the function stands there; the client is told of no progress."""
    as_times: list[str] = []
    with (
        caplog.at_level(logging.ERROR, "dovetail.engine"),
        StallLogger(PluginPlan(), 0.05, lambda: (7, 7), lambda: is_busy, lambda: as_times.append(""), lambda: " As."),
    ):
        deadline = time.monotonic() + (30 if is_busy else 0.5)
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
    assert [("test_stall_logger.py" in r.getMessage()) for r in caplog.records] == ([True] if is_busy else [])
    assert all(record.getMessage().endswith(". As.") for record in caplog.records)
    assert not as_times
    assert "dovetail-standstill" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(("steps", "is_told"), [(0, True), (1, False)])
def test_progress_within_a_step_is_told_that_of_steps_tells_itself(steps: int, is_told: bool) -> None:
    """A step is a message anyhow; layers of a busy engine are one at each look at most."""
    looks, as_times = iter(range(1 << 30)), []

    def progress() -> tuple[int, int]:
        at = next(looks)
        return steps * at, at

    with StallLogger(PluginPlan(), 1.0, progress, lambda: True, lambda: as_times.append("")):
        time.sleep(0.5)
    num = next(looks)
    assert num > 3
    assert bool(as_times) is is_told
    assert len(as_times) < num
