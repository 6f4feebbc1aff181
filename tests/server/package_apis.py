"""APIs as packages bring them, which do what a test says, and servers over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
import pytest
from harness import Harness
from msgspec.structs import replace

from dovetail.contracts.api import Api, Route, View
from dovetail.contracts.replies import Failure, StepView, Writer
from dovetail.contracts.requests import Request, Text
from dovetail.processing.apis import routes_of
from dovetail_server.apis.guarded import Guarded
from dovetail_server.apis.routes import BUILT_IN

ONE = Request(prompts=[Text(text="a")], limit=2)


class Says(Writer):
    def step(self, steps: Sequence[StepView]) -> bytes:
        return b"data: {}\n\n"

    def whole(self) -> bytes:
        return msgspec.json.encode([choice.text for choice in self.reply.choices])

    @classmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        return b"data: " + msgspec.json.encode(failure.message) + b"\n\n"


class Loose(Api):
    """Makes of any body what the test says."""

    owns: ClassVar[tuple[str, ...]] = ("/loose",)
    made: Any = ONE
    status: Any = None

    def routes(self) -> Sequence[Route | View]:
        return (
            Route(name="loose_say", path="/loose/say", about="Say it.", read=lambda body: self.made, writer=Says),
            View(name="loose_show", path="/loose/show", about="Show it.", show=lambda facts, body: {"a": 1}),
        )

    def failed(self, failure: Failure, request_id: str | None) -> tuple[int, Any]:
        if self.status is None:
            raise KeyError("no words")
        return self.status, {"loose": failure.message, "param": failure.param}


WHO = "api 'loose' of acme 1.0"


class Odd(Says):
    """Does what the test says in one of its methods."""

    odd: ClassVar[dict[str, Callable[[], Any]]] = {}

    def open(self) -> bytes:
        return self.does("open", b"")

    def close(self) -> bytes:
        return self.does("close", b"data: end\n\n")

    def step(self, steps: Sequence[StepView]) -> bytes:
        return self.does("step", super().step(steps))

    def whole(self) -> bytes:
        return self.does("whole", super().whole())

    @classmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        return cls.does("failed", super().failed(failure, request_id))

    @classmethod
    def does(cls, name: str, otherwise: bytes) -> bytes:
        made: bytes = cls.odd[name]() if name in cls.odd else otherwise
        return made


class Strange(Loose):
    """As `Loose`, with a writer of the test's; its reader calls what the test gives it."""

    owns: ClassVar[tuple[str, ...]] = ()

    def routes(self) -> Sequence[Route | View]:
        def read(body: Any) -> Request:
            made: Request = self.made() if callable(self.made) else self.made
            return replace(made, stream=body.get("stream", False))

        return (Route(name="loose_say", path="/loose/say", about="Say it.", read=read, writer=Odd),)


@pytest.fixture
def loose() -> Loose:
    return Loose()


@pytest.fixture
def loose_server(loose: Loose, make_harness: Callable[..., Harness]) -> Harness:
    """A server with this API."""
    return make_harness(apis=(*BUILT_IN, Guarded(loose, WHO, routes_of(loose))))


@pytest.fixture
def strange(monkeypatch: pytest.MonkeyPatch) -> Strange:
    monkeypatch.setattr(Odd, "odd", {})
    return Strange()


@pytest.fixture
def strange_server(strange: Strange, make_harness: Callable[..., Harness]) -> Harness:
    """A server with this API."""
    return make_harness(apis=(*BUILT_IN, Guarded(strange, WHO, routes_of(strange))))
