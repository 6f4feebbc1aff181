"""A token's way from the devices to the client's socket leads through each room once; nobody behind calls back."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import requests
from served import ASK, Served

import dovetail
import dovetail_server

WAY = (
    "executor/local.py",
    "runtime/stepper.py",
    "runtime/sampling/sampler.py",
    "engine/replies.py",
    "client/inprocess.py",
    "engine/streams.py",
    "serving/generation.py",
    "serving/choice.py",
    "text/parsing/stream.py",
    "sdk/formats/machine.py",
    "serving/run.py",
    "apis/chat/reply.py",
    "apis/chat/chunks.py",
    "serving/sse.py",
)
"""Rooms in the order in which a token comes to them (`docs/design/README.md`), and what stands between them."""
HOMES = [str(Path(package.__file__ or "").parent) + "/" for package in (dovetail, dovetail_server)]
PULLS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
FIRST, LAST = 3, 12
"""Of these events of the stream; more tokens follow, so neither the request nor its end is among them."""


class Calls:
    """Who calls whom among files of ours between two events of a stream, in threads that were started under it."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.entered: set[str] = set()
        self.edges: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """As `sys.setprofile` wants it. A stream that is resumed is asked for a token, not given one."""
        if event != "call" or (callee := room(frame)) is None:
            return
        self.num_sent += callee == "serving/sse.py" and frame.f_code.co_name == "_send_all"
        if not FIRST <= self.num_sent < LAST:
            return
        self.entered.add(callee)
        caller = frame.f_back
        while caller is not None and room(caller) is None:
            caller = caller.f_back
        if caller is not None and not frame.f_code.co_flags & PULLS:
            self.edges.add((str(room(caller)), callee))


def room(frame: FrameType) -> str | None:
    """Return the file below its package that a frame is of; None of others' code."""
    file = frame.f_code.co_filename
    return next((file.removeprefix(home) for home in HOMES if file.startswith(home)), None)


@pytest.fixture
def calls() -> Iterator[Calls]:
    """Watches threads that start from now on; it is theirs alone, so nothing stays when they have ended."""
    before = threading.getprofile()
    found = Calls()
    threading.setprofile(found)
    yield found
    threading.setprofile(before)  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.skipif(sys.getprofile() is not None, reason="another profiler is at work")
def test_nobody_behind_calls_back(calls: Calls) -> None:
    """In the middle of a stream every room is entered, and no call leads from a later one to an earlier one."""
    server = Served()
    try:
        body = {"model": "dovetail-demo", "messages": ASK, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        reply = requests.post(server.base + "/v1/chat/completions", json={**body, "stream": True}, timeout=120)
    finally:
        server.close()
    assert reply.content.endswith(b"data: [DONE]\n\n")
    assert calls.num_sent > LAST
    assert [name for name in WAY if name not in calls.entered] == []
    assert ("serving/choice.py", "text/parsing/stream.py") in calls.edges
    place = {name: at for at, name in enumerate(WAY)}
    assert [(a, b) for a, b in sorted(calls.edges) if a in place and b in place and place[b] < place[a]] == []
