"""Whatever a package's code raises, and however long it takes, costs its own request and nothing else."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import replace as replace_route
from typing import Any

import pytest
from harness import Harness
from package_apis import ONE, WHO, Odd, Strange
from pydantic import BaseModel, field_validator

from dovetail.contracts.errors import PluginError
from dovetail_server.apis.guarded import Guarded
from dovetail_server.apis.routes import BUILT_IN
from dovetail_server.apis.watch import WATCH


@pytest.mark.parametrize(
    "error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, StopIteration, StopAsyncIteration, GeneratorExit]
)
def test_what_would_end_more_than_a_request_is_told(error: type[BaseException], strange_server: Harness) -> None:
    """An exception for processes, tasks and loops ends none of them, and no request is left without an answer."""

    def ends() -> bytes:
        raise error

    Odd.odd["whole"] = ends
    reply = strange_server.post("/loose/say", {})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "plugin_failed")
    text = f"{WHO}: /loose/say: Odd.whole() raised {error.__name__}; possible: RequestError for what is not served"
    assert reply.json()["error"]["message"] == text


class Mean(BaseException):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("error", [Mean(), ValueError("x"), PluginError("x"), TimeoutError(), MemoryError()])
@pytest.mark.parametrize("place", ["read", "whole"])
def test_whatever_is_raised_is_told_by_name(
    place: str, error: BaseException, strange: Strange, strange_server: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """Of any class, with any text: the client reads whose call it was, and the log has the traceback."""

    def fails() -> Any:
        raise error

    if place == "read":
        strange.made = fails
    else:
        Odd.odd["whole"] = fails
    with caplog.at_level(logging.ERROR, "dovetail.server"):
        told = strange_server.post("/loose/say", {}).json()["error"]
    assert told["code"] == "plugin_failed"
    assert f"{place}() raised {type(error).__name__}; possible" in told["message"]
    assert told["message"].startswith(WHO)
    assert "in fails" in caplog.text


def for_ever() -> Any:
    while True:
        sum(range(100))


def stubborn() -> Any:
    """Catch the first exception that ends it."""
    try:
        for_ever()
    except BaseException:
        for_ever()


@pytest.mark.parametrize(
    ("name", "is_stream"), [("read", False), ("step", True), ("whole", False), ("stubborn", False)]
)
def test_what_does_not_end_is_ended(
    name: str,
    is_stream: bool,
    strange: Strange,
    strange_server: Harness,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A reader or a writer that loops costs its own request; the log says which, and where it stood."""
    monkeypatch.setattr(WATCH, "limit_s", 1.0)
    if name in ("read", "stubborn"):
        strange.made = for_ever if name == "read" else stubborn
    else:
        Odd.odd[name] = for_ever
    with caplog.at_level(logging.ERROR, "dovetail.server"):
        reply = strange_server.post("/loose/say", {"stream": is_stream})
    assert reply.status_code == 500
    assert "did not end within 1 s and is ended; it stood at" in caplog.text
    assert "in for_ever" in caplog.text
    assert WHO in caplog.text
    strange.made = ONE
    Odd.odd.clear()
    assert strange_server.post("/loose/say", {}).status_code == 200


class Picky(BaseModel):
    """A body whose check does what the test says."""

    ask: str = ""

    @field_validator("ask")
    @classmethod
    def check(cls, value: str) -> str:
        doings: dict[str, Callable[[], Any]] = {"loop": for_ever, "key": {}.__getitem__, "exit": sys.exit, "no": fails}
        if value:
            doings[value](*(("x",) if value == "key" else ()))
        return value


def fails() -> None:
    raise ValueError("no such thing")


def test_the_check_of_a_body_is_watched(make_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's own validators are a package's code, too: one that loops held all others up for ever."""
    monkeypatch.setattr(WATCH, "limit_s", 1.0)
    api = Strange()
    route = replace_route(api.routes()[0], body=Picky, read=lambda body: ONE)
    served = make_harness(apis=(*BUILT_IN, Guarded(api, WHO, [route])))
    for ask, status, said in (
        ("", 200, ""),
        ("no", 400, "ask no such thing"),
        ("key", 500, f"{WHO}: /loose/say: Picky.model_validate() raised KeyError; possible: "),
        ("exit", 500, f"{WHO}: /loose/say: Picky.model_validate() raised SystemExit; possible: "),
        ("loop", 500, f"{WHO}: /loose/say: Picky.model_validate() did not end within 1 s and was ended"),
    ):
        reply = served.post("/loose/say", {"ask": ask})
        assert reply.status_code == status, reply.text
        assert said in reply.text
