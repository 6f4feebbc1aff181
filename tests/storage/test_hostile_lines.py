"""Lines of a batch that are made to hurt: each costs itself, whoever sends it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail_server.reading.wire import LARGE

from .conftest import CHAT, Api, line

PAD = "x" * (2 * LARGE)
HOSTILE: dict[str, Any] = {
    "faults": line("faults", messages=[{}] * 50_000),
    "dense": line("dense", stop=[[]] * 200_000),
    "unknown": line("unknown", **{f"k{i}": i for i in range(20_000)}),
    "long": line("long", messages=[{"role": "user", "content": PAD}]),
    "nested": line("nested", chat_template_kwargs={"a": json.loads("[" * 150 + "]" * 150), "b": PAD}),
    "beside": line("beside", chat_template_kwargs={"a": "x" * (5 << 20)}),
    "deadly": line("deadly", messages=[{"role": "user", "content": "deadly " * (1 << 18)}]),
}


@pytest.fixture
def harness(make_harness: Callable[..., Any], tmp_path: Path) -> Any:
    """A server that tokenizes prompts of megabytes, which takes long enough to be killed at it."""
    folder = tmp_path / "storage"
    return make_harness(file_storage_path=folder, min_free_disk_bytes=0, max_prompt_bytes=1 << 24)


@pytest.fixture
def deadly(harness: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes that read a "deadly" line are killed, as by the system when memory is short."""
    killed: list[int] = []
    bodies = harness.state.bodies

    async def attempt(job: Any, raw: bytes, *others: Any, attempt: Any = bodies._attempt) -> Any:
        work = asyncio.ensure_future(attempt(job, raw, *others))
        while b"deadly" in raw and not work.done():
            for pid in bodies.pids - set(killed):  # one line at a time is read
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            await asyncio.sleep(0)
        return await work

    monkeypatch.setattr(bodies, "_attempt", attempt)
    return killed


def test_hostile_lines_cost_themselves(api: Api, deadly: list[int]) -> None:
    """Each gets its own error, the one that kills its process after a few tries; others are answered."""
    batch = api.run(*HOSTILE.values(), *(line(f"good{i}") for i in range(5)))
    assert batch["status"] == "completed"
    outputs, errors = api.results(batch)
    assert {each["custom_id"] for each in outputs} >= {f"good{i}" for i in range(5)}
    found = {each["custom_id"]: each["response"]["body"]["error"]["code"] for each in errors}
    nested = {each["custom_id"] for each in outputs} - {f"good{i}" for i in range(5)}
    assert nested == {"nested"}
    assert found == {
        "faults": "missing_required_parameter",
        "dense": "body_too_dense",
        "unknown": "unknown_parameter",
        "long": "context_length_exceeded",
        "beside": "body_too_large",
        "deadly": "body_process_died",
    }
    assert 1 < len(deadly) < 6


def test_others_are_served_beside_hostile_lines(
    make_harness: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many lines wait to be read, and however long each takes, a client's large body has its place."""
    harness = make_harness(file_storage_path=tmp_path / "storage", min_free_disk_bytes=0, context_len=1 << 20)
    body = {"model": "tiny", "messages": [{"role": "user", "content": PAD}]}
    assert harness.post(CHAT, body).status_code == 200
    bodies, started = harness.state.bodies, []

    async def attempt(job: Any, raw: bytes, *others: Any, run: Any = bodies._attempt) -> Any:
        started.append(job)
        while job.is_line and not harness.engine.is_closed:
            await asyncio.sleep(0.01)
        return await run(job, raw, *others)

    monkeypatch.setattr(bodies, "_attempt", attempt)
    api = Api(harness)
    batch = api.start(*(line(str(i), messages=body["messages"]) for i in range(20)))
    harness.eventually(lambda: bool(started))
    assert harness.post(CHAT, body).status_code == 200
    assert [job.is_line for job in started] == [True, False]
    harness.post(f"/v1/batches/{batch}/cancel")
    harness.engine.is_closed = True
    api.wait(batch)
