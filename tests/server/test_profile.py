"""`/start_profile` and `/stop_profile`: what is refused, and what is written by whom."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from harness import Harness

from dovetail.messages import ProfileSpec
from dovetail.utils import launch_server_cmd, terminate_process, wait_for_server

pytestmark = pytest.mark.usefixtures("light_servers")

START, STOP = "/start_profile", "/stop_profile"


def test_without_a_folder_there_are_none(harness: Harness) -> None:
    """Both say which flag is missing."""
    for path in (START, STOP):
        reply = harness.post(path)
        assert (reply.status_code, "--profile-dir" in reply.text) == (404, True)


class Kept:
    """What an engine was asked to record."""

    def __init__(self) -> None:
        self.specs: list[ProfileSpec] = []
        self.answer: dict[str, Any] = {"step": 3}

    async def __call__(self, op: str, profile: ProfileSpec | None = None) -> dict[str, Any]:
        if profile is not None:
            self.specs.append(profile)
        return self.answer


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def profiled(make_harness: Callable[..., Harness], tmp_path: Path, kept: Kept) -> Harness:
    harness = make_harness(profile_dir=tmp_path / "profiles")
    harness.engine.control = kept  # type: ignore[method-assign]
    return harness


def test_what_is_asked_for_reaches_the_engine(profiled: Harness, kept: Kept, tmp_path: Path) -> None:
    """SGLang's fields; without a body, all of it is left to the engine. Two profiles never have one name."""
    assert profiled.post(START).status_code == 200
    body = {
        **{"output_dir": "a/b", "num_steps": 5, "start_step": 7, "activities": ["CPU", "GPU"], "with_stack": True},
        **{"record_shapes": True, "profile_prefix": "mine", "profile_by_stage": False, "merge_profiles": None},
    }
    reply = profiled.post(START, body)
    assert (reply.status_code, reply.json()["step"]) == (200, 3)
    plain, full = kept.specs
    folder = (tmp_path / "profiles").resolve()
    assert (plain.folder, plain.num_steps, plain.activities) == (str(folder), None, ())
    assert (full.folder, full.num_steps, full.start_step) == (str(folder / "a/b"), 5, 7)
    assert (full.activities, full.with_stack, full.record_shapes) == (("CPU", "GPU"), True, True)
    assert full.name.startswith("mine-")
    assert plain.name != full.name
    assert (folder / "a/b").is_dir()
    inside = profiled.post(START, {"output_dir": str(folder / "c")})
    assert inside.json()["output_dir"] == str(folder / "c")
    kept.answer = {"error": "a profile is being recorded"}
    reply = profiled.post(STOP)
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "profile_failed")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("output_dir", value)
            for value in ("/etc", "..", "a/../../b", "link", "link/x", "a\0b", "x" * 2000, "file", 3)
        ),
        *(("num_steps", value) for value in (0, -1, 10**9, "5", True)),
        *(("activities", value) for value in ([], ["MEM"], ["CPU"] * 3, "CPU", [None])),
        *(("profile_prefix", value) for value in ("", "../x", "a/b", "a b", "x" * 65)),
        *(("start_step", -1), ("profile_by_stage", True), ("merge_profiles", True), ("with_stack", "yes"), ("else", 1)),
    ],
)
def test_what_makes_no_sense_is_refused(
    profiled: Harness, kept: Kept, tmp_path: Path, field: str, value: object
) -> None:
    """The field is named; the engine hears nothing, and nothing is made outside of the folder."""
    base = tmp_path / "profiles"
    base.mkdir()
    (base / "link").symlink_to(tmp_path)
    (base / "file").write_text("")
    reply = profiled.post(START, {field: value})
    assert (reply.status_code, field in reply.text) == (400, True), reply.text
    assert not kept.specs
    assert {path.name for path in tmp_path.iterdir()} <= {"profiles", "storage"}


def events(path: str) -> list[dict[str, Any]]:
    """Read a trace as a viewer does."""
    found: list[dict[str, Any]] = json.loads(Path(path).read_text())["traceEvents"]
    assert all("ph" in event and "name" in event for event in found)
    return found


def chat(base: str, num_tokens: int = 4) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": num_tokens, "ignore_eos": True}
    assert requests.post(f"{base}/v1/chat/completions", json=body, timeout=60).status_code == 200


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.full
def test_each_rank_writes_what_it_computed(tmp_path: Path, light: None) -> None:
    """Until it is ended, or for so many steps; an engine that dies has none, and the next one may again."""
    flags = f"--tensor-parallel-size 2 --num-threads 1 --log-level warning --profile-dir {tmp_path}"
    process, port = launch_server_cmd(f"dovetail serve {flags}")
    base = f"http://127.0.0.1:{port}"
    try:
        wait_for_server(base, timeout=120)
        assert requests.post(base + START, timeout=60).status_code == 200
        assert requests.post(base + START, timeout=60).status_code == 409
        chat(base)
        reply = requests.post(base + STOP, timeout=60)
        assert reply.status_code == 200, reply.text
        files = sorted(reply.json()["files"])
        assert [file.rpartition("-TP-")[2] for file in files] == ["0.trace.json", "1.trace.json"]
        for file in files:
            names = {event["name"] for event in events(file) if event["ph"] == "X"}
            assert any("mm" in name or "linear" in name for name in names), names
        body = {"num_steps": 2, "profile_prefix": "two"}
        assert requests.post(base + START, json=body, timeout=60).status_code == 200
        chat(base, 6)
        assert len(requests.post(base + STOP, timeout=60).json()["files"]) == 2
        assert requests.post(base + START, json={"activities": ["GPU"]}, timeout=60).status_code == 409
        assert requests.post(base + START, timeout=60).status_code == 200
        (engine,) = [
            pid for pid in children_of(process.pid) if b"engine_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(engine, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while requests.get(f"{base}/health", timeout=60).status_code != 503 and time.monotonic() < deadline:
            time.sleep(0.02)
        reply = requests.post(base + STOP, timeout=60)  # answered by the engine that comes next
        assert (reply.status_code, "started again" in reply.text) == (409, True)
        assert requests.post(base + START, timeout=60).status_code == 200
        chat(base)
        assert len(requests.post(base + STOP, timeout=60).json()["files"]) == 2
    finally:
        terminate_process(process)
    assert len(list(tmp_path.iterdir())) == 6, list(tmp_path.iterdir())
