"""An API as a package brings it: `/acme/say`, `/acme/tell`, `/acme/show`, with lines of JSON and errors of its own."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from dovetail.contracts.api import Api, Route, ServerFacts, View
from dovetail.contracts.errors import RequestError
from dovetail.contracts.output import ContentDelta
from dovetail.contracts.replies import Failure, Reply, StepView, Writer
from dovetail.contracts.requests import Chat, JsonObject, Names, Request, Sampling
from dovetail_testing import FakeSite

STALLS: dict[str, Callable[[], Any]] = {
    "slow": lambda: time.sleep(0.5),
    "sleep": lambda: time.sleep(600),
    "match": lambda: re.match("(a+)+$", "a" * 60 + "b"),
    "loop": lambda: sum(1 for _ in itertools.count()),
}
"""What a `read` may do with a body that it was not written for."""
NAMES = Names(prompt="ask", limit="most", renamed={"temperature": "heat"})


def read(body: JsonObject) -> Request:
    """Make a request of a body."""
    if "stall" in body:
        STALLS[body["stall"]]()
    ask = body.get("ask")
    if not isinstance(ask, str):
        raise RequestError("ask must be a text", param="ask", code="invalid_type")
    return Request(
        prompts=[Chat(messages=[{"role": "user", "content": ask}])],
        model=body.get("model"),
        stream=body.get("flow", False),
        limit=body.get("most"),
        sampling=Sampling(temperature=body.get("heat")),
        template_kwargs={"enable_thinking": False},
        names=NAMES,
    )


def flow(body: JsonObject) -> Request:
    """As `read`, for a route that streams."""
    return read(body | {"flow": True})


def line(value: Any) -> bytes:
    """Return a value as a line."""
    return msgspec.json.encode(value) + b"\n"


class Says(Writer):
    """Writes lines."""

    media_type = "application/x-ndjson"
    keep_alive = b""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)

    def step(self, steps: Sequence[StepView]) -> bytes:
        texts = [event.text for step in steps for event in step.events if isinstance(event, ContentDelta)]
        return line({"said": "".join(texts)}) if texts else b""

    def close(self) -> bytes:
        return line(self._ended() | {"over": True})

    def whole(self) -> bytes:
        return msgspec.json.encode(self._ended() | {"said": self.reply.choices[0].text})

    def _ended(self) -> JsonObject:
        tokens = self.reply.tokens
        return {"why": self.reply.choices[0].finish_reason, "read": tokens.prompt, "wrote": tokens.completion}

    @classmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        return line({"oops": failure.message})


class Acme(Api):
    """Acme's API."""

    owns: ClassVar[tuple[str, ...]] = ("/acme",)

    def routes(self) -> Sequence[Route | View]:
        about = "Say something."
        return (
            Route(name="acme_say", path="/acme/say", about=about, read=read, writer=Says),
            Route(name="acme_tell", path="/acme/tell", about=about, read=read, writer=Says, place="any"),
            Route(name="acme_flow", path="/acme/flow", about=about, read=flow, writer=Says, only_streams=True),
            Route(name="acme_pour", path="/acme/pour", about=about, read=flow, writer=Says),
            View(name="acme_show", path="/acme/show", about="Show the models.", show=show),
            View(name="acme_ask", path="/acme/ask", about="Show the models.", show=show, method="POST"),
        )

    def failed(self, failure: Failure, request_id: str | None) -> tuple[int, Any]:
        return failure.status, {"oops": failure.message, "at": failure.param, "code": failure.code, "id": request_id}


def show(facts: ServerFacts, body: JsonObject) -> JsonObject:
    """Show the names."""
    if "stall" in body:
        STALLS[body["stall"]]()
    return {"models": list(facts.models)}


class Rival(Acme):
    """Another package's, with a route of the same path."""


def install(folder: Path) -> str:
    """Install it, and its rival, and return what PYTHONPATH must have for processes to find them."""
    site = FakeSite(folder)
    site.add("acme", entry_points={"dovetail.apis.v1": {"acme": "acme_api:Acme"}})
    site.add("rival", entry_points={"dovetail.apis.v1": {"rival": "acme_api:Rival"}})
    return f"{folder}:{Path(__file__).parent}"
