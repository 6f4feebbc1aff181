"""An API whose every part does what the body, or a variable of the environment, says: `HOSTILE=failed=sleep,…`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from dovetail.contracts.api import Api, Route, ServerFacts, View
from dovetail.contracts.errors import RequestError
from dovetail.contracts.output import ContentDelta
from dovetail.contracts.replies import Failure, Reply, StepView, Writer
from dovetail.contracts.requests import Chat, JsonObject, Request, Sampling
from dovetail_testing import FakeSite

HUGE = 72 << 20


def exits() -> Any:
    raise SystemExit(3)


def interrupts() -> Any:
    raise KeyboardInterrupt


def loops() -> Any:
    while True:
        sum(range(100))


DOES: dict[str, Callable[[], Any]] = {
    "sleep": lambda: time.sleep(600),
    "loop": loops,
    "raise": lambda: {}["no words"],
    "exit": exits,
    "interrupt": interrupts,
    "none": lambda: None,
    "text": lambda: "text",
    "huge": lambda: bytes(HUGE),
    "huge text": lambda: {"a": "a" * HUGE},
    "set": lambda: {"a": object()},
}


def does(wishes: JsonObject, place: str, otherwise: Any) -> Any:
    """Do what is wished for at a place."""
    return DOES[wishes[place]]() if place in wishes else otherwise


def set_wishes() -> dict[str, str]:
    """Return what the environment wishes for, at places that see no body."""
    return dict(each.split("=") for each in os.environ.get("HOSTILE", "").split(",") if each)


def read(body: JsonObject) -> Request:
    """Make a request of a body, whose `do` says what is done where."""
    wishes = body.get("do", {})
    if wishes.get("read") == "refuse":
        raise RequestError("no", param="do")
    does(wishes, "read", None)
    messages = [{"role": "user", "content": body.get("ask", "hi")}]
    return Request(
        prompts=[Chat(messages=messages)],
        stream=body.get("stream", False),
        sampling=Sampling(temperature=0),
        limit=body.get("most", 8),
        reply=wishes,
    )


class Hostile(Writer):
    """Writes events."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._wishes = reply.requests[0].reply
        does(self._wishes, "init", None)

    def open(self) -> bytes:
        made: bytes = does(self._wishes, "open", b"")
        return made

    def step(self, steps: Sequence[StepView]) -> bytes:
        text = "".join(event.text for step in steps for event in step.events if isinstance(event, ContentDelta))
        made: bytes = does(self._wishes, "step", b"data: " + msgspec.json.encode(text) + b"\n\n" if text else b"")
        return made

    def close(self) -> bytes:
        made: bytes = does(self._wishes, "close", b"data: end\n\n")
        return made

    def whole(self) -> bytes:
        made: bytes = does(self._wishes, "whole", msgspec.json.encode([choice.text for choice in self.reply.choices]))
        return made

    @classmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        made: bytes = does(set_wishes(), "ends", b"data: " + msgspec.json.encode({"sad": failure.message}) + b"\n\n")
        return made


def show(facts: ServerFacts, body: JsonObject) -> JsonObject:
    """Show what is wished for."""
    made: JsonObject = does(body, "show", {"models": facts.models})
    return made


class Misbehaving(Api):
    """Does it."""

    owns: ClassVar[tuple[str, ...]] = ("/bad",)

    def routes(self) -> Sequence[Route | View]:
        about = "Misbehave."
        return (
            Route(name="bad_say", path="/bad/say", about=about, read=read, writer=Hostile),
            Route(name="bad_any", path="/bad/any", about=about, read=read, writer=Hostile, place="any"),
            View(name="bad_show", path="/bad/show", about=about, show=show, method="POST"),
        )

    def failed(self, failure: Failure, request_id: str | None) -> tuple[int, Any]:
        made = does(set_wishes(), "failed", {"sad": failure.message, "code": failure.code})
        return failure.status, made


class Grabbing(Api):
    """Takes a path that only gateways have."""

    def routes(self) -> Sequence[View]:
        return (View(name="grab", path=os.environ["GRAB"], about="Grab.", show=show),)


def install(folder: Path) -> str:
    """Install them, and return what PYTHONPATH must have for processes to find them."""
    site = FakeSite(folder)
    for name, attr in (("hostile", "Misbehaving"), ("grabbing", "Grabbing")):
        site.add(name, entry_points={"dovetail.apis.v1": {name: f"hostile_api:{attr}"}})
    return f"{folder}:{Path(__file__).parent}"
