"""The options to enforce calls are found once for tools that come again."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import Vocabulary
from dovetail.grammar import pipeline
from dovetail.grammar.pipeline import StructuredOutputs
from dovetail.grammar.spec.tool_route import ToolRouter
from dovetail.plugins import Registry, load, make_plan

PLUGINS = load(make_plan(Registry.scan(), tool_parser="hermes", grammar_backend="auto"), "api")
PARSER = PLUGINS.get("tool_parser", "hermes")()


def tool(name: str, **more: Any) -> dict[str, Any]:
    """Return a tool with one argument."""
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.fixture
def front() -> StructuredOutputs:
    """Every backend, and nothing routed yet."""
    nothing = Vocabulary(tokens=(), size=256, eos_ids=frozenset(), special_ids=frozenset(), fingerprint="")
    return StructuredOutputs({p.name: make(nothing) for p, make in PLUGINS.candidates("grammar_backend")})


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the tools that were routed, one for each time."""
    found: list[str] = []

    class Counting(ToolRouter):
        def route(self) -> Any:
            found.append(self.tools[0]["function"]["name"])
            return super().route()

    monkeypatch.setattr(pipeline, "ToolRouter", Counting)
    return found


def ask(front: StructuredOutputs, tools: Any, choice: Any = "required", *, parallel: bool = True) -> Any:
    """Route tools."""
    return front.tools(PARSER, "hermes", tools, choice, parallel=parallel, param="tools")


def test_equal_tools_are_routed_once(front: StructuredOutputs, routed: list[str]) -> None:
    """Whatever differs in a request is routed by itself."""
    first = ask(front, [tool("f")])
    assert ask(front, [tool("f")]) is first
    assert routed == ["f"]
    named = {"type": "function", "function": {"name": "f"}}
    others = [ask(front, [tool("g")]), ask(front, [tool("f", strict=True)]), ask(front, [tool("f")], "auto")]
    others += [ask(front, [tool("f")], named), ask(front, [tool("f")], parallel=False)]
    assert len(routed) == 6
    assert "g" in others[0].options[0].grammar.source
    assert all(other is not first for other in others)


def test_few_are_kept(front: StructuredOutputs, routed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All go when there is no room."""
    monkeypatch.setattr(pipeline, "MAX_ROUTES", 2)
    for name in ("a", "b", "a", "c", "c", "a"):
        ask(front, [tool(name)])
    assert routed == ["a", "b", "c", "a"]


def test_a_refusal_is_not_kept(front: StructuredOutputs, routed: list[str]) -> None:
    """It is found again, with its own words."""
    wrong = tool("f", parameters={"type": 5})
    for _ in range(2):
        with pytest.raises(RequestError):
            ask(front, [wrong])
    assert routed == ["f", "f"]


def test_tools_that_are_no_json_are_routed_each_time(front: StructuredOutputs, routed: list[str]) -> None:
    """A program may pass what no body can hold."""
    odd = {**tool("f"), "note": {1, 2}}
    assert ask(front, [odd]).options == ask(front, [odd]).options
    assert routed == ["f", "f"]
