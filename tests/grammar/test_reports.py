"""Every route reports alike what is enforced of a grammar, and refuses a strict one alike: by route and kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from served import ASK, Served

FULL = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
LIST = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 2, "contains": {"const": 1}}
WEAK = {**FULL, "properties": {"a": LIST}}
LOST = "properties/a/contains"
TAG = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": WEAK}, "end": "</a>"}
TAGS = {"type": "structural_tag", "format": TAG}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 120, "seed": 1}
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def schema(route: str, given: Any, *, strict: bool = False) -> dict[str, Any]:
    """A body that asks for a text of a schema, as a route writes it."""
    form = {"name": "x", "schema": given, "strict": strict}
    if route == CHAT:
        return {"messages": ASK, **QUIET, "response_format": {"type": "json_schema", "json_schema": form}}
    if route == TEXT:
        limits = {"max_tokens": 120, "seed": 1}
        return {"prompt": "x", **limits, "response_format": {"type": "json_schema", "json_schema": form}}
    if route == NATIVE:
        params = {"response_format": {"type": "json_schema", "json_schema": form}, "max_new_tokens": 120}
        return {"text": "x", "sampling_params": params}
    if route == MESSAGES:
        output = {"format": {"type": "json_schema", "schema": given}}
        return {"messages": ASK, "max_tokens": 120, "output_config": output}
    return {"input": "Go on.", "store": False, "text": {"format": {"type": "json_schema", **form}}}


def tool(route: str, given: Any, *, strict: bool = False) -> dict[str, Any]:
    """A body that asks for a call."""
    function = {"name": "f", "description": "f", "parameters": given, "strict": strict}
    if route == CHAT:
        tools = [{"type": "function", "function": function}]
        return {"messages": ASK, **QUIET, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    if route == MESSAGES:
        tools = [{"name": "f", "description": "f", "input_schema": given, "strict": strict}]
        choice = {"type": "any", "disable_parallel_tool_use": True}
        return {"messages": ASK, "max_tokens": 200, "tools": tools, "tool_choice": choice}
    tools = [{"type": "function", **function}]
    choice = {"tool_choice": "required", "parallel_tool_calls": False}
    return {"input": "Go on.", "store": False, "tools": tools, **choice}


def tag(route: str) -> dict[str, Any]:
    """A body that asks for a structural tag."""
    if route == NATIVE:
        return {"text": "x", "sampling_params": {"structural_tag": TAGS, "max_new_tokens": 120}}
    return {"structural_tag": TAGS} | ({"prompt": "x"} if route == TEXT else {"messages": ASK, **QUIET})


PLACES = {MESSAGES: "/tools/0/input_schema", RESPONSES: "/tools/0/parameters"}
"""Where the schema of a tool stands in a request."""


def answer(served: Served, route: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Ask, and return the status with what the reply says of its grammar, or with the error."""
    reply = served.post(route, **body)
    return reply.status_code, said(route, reply.json()) if reply.status_code == 200 else reply.json()["error"]


def said(route: str, reply: Any) -> Any:
    if route == NATIVE:
        return reply["meta_info"]["structured_output"]
    return (reply if route in (MESSAGES, RESPONSES) else reply["choices"][0])["structured_output"]


ALL = (CHAT, TEXT, NATIVE, MESSAGES, RESPONSES)
CALLING = (CHAT, MESSAGES, RESPONSES)


@pytest.mark.first(2)
@pytest.mark.first(3)
@pytest.mark.parametrize("route", ALL)
def test_schemas_are_reported_alike(served: Served, route: str) -> None:
    """What is enforced in full, what is left out and named, and what nothing can enforce."""
    status, report = answer(served, route, schema(route, FULL))
    assert status == 200, report
    assert (status, report["enforcement"], report["ignored"], report["valid"]) == (200, "full", [], True)
    status, report = answer(served, route, schema(route, WEAK))
    assert (status, report["enforcement"], report["ignored"]) == (200, "approximate", [f"/{LOST}"])
    assert report["valid"] in (True, False)
    status, error = answer(served, route, schema(route, {"$ref": "http://example.com/x"}))
    assert status == 400
    assert "nothing is fetched" in error["message"]


@pytest.mark.parametrize("route", CALLING)
def test_tools_are_reported_alike(served: Served, route: str) -> None:
    """By tool, with places in the request as it was sent."""
    status, report = answer(served, route, tool(route, FULL))
    assert status == 200, report
    assert (status, report["enforcement"], report["ignored"], report["valid"]) == (200, "full", [], True)
    assert report["tools"] == [{"name": "f", "enforcement": "full", "ignored": [], "valid": True}]
    status, report = answer(served, route, tool(route, WEAK))
    place = f"{PLACES.get(route, '/tools/0/function/parameters')}/{LOST}"
    assert (status, report["enforcement"], report["ignored"]) == (200, "approximate", [place])
    assert [(each["name"], each["enforcement"], each["ignored"]) for each in report["tools"]] == [
        ("f", "approximate", [place])
    ]


@pytest.mark.parametrize("route", [CHAT, TEXT, NATIVE])
def test_tags_are_reported_alike(served: Served, route: str) -> None:
    """Places point into the tag."""
    status, report = answer(served, route, tag(route))
    place = f"/format/content/json_schema/{LOST}"
    assert (status, report["enforcement"], report["ignored"]) == (200, "approximate", [place])


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    made = Served(strict_schema=True, grammar_compile_timeout=30.0)
    yield made
    made.close()


@pytest.mark.parametrize("route", ALL)
def test_strict_schemas_are_refused_alike(strict: Served, route: str) -> None:
    """With `--strict-schema`; where a route has no `strict`, every schema is meant so."""
    status, error = answer(strict, route, schema(route, WEAK, strict=True))
    assert status == 400
    assert LOST in error["message"]


@pytest.mark.parametrize("route", CALLING)
def test_strict_tools_are_refused_alike(strict: Served, route: str) -> None:
    """The tool and the place are named."""
    status, error = answer(strict, route, tool(route, WEAK, strict=True))
    assert status == 400
    assert LOST in error["message"]
    assert "'f'" in error["message"]


def test_a_custom_tools_regular_expression_is_enforced(served: Served) -> None:
    """What a custom tool is given matches its regular expression, whatever the model would say."""
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-c]{2,4}"}
    custom = {"type": "custom", "name": "letters", "format": form}
    choice = {"type": "custom", "name": "letters"}
    reply = served.post(RESPONSES, input="Go on.", store=False, tools=[custom], tool_choice=choice).json()
    (item,) = [item for item in reply["output"] if item["type"] == "custom_tool_call"]
    assert re.fullmatch("[a-c]{2,4}", item["input"])
    assert "dovetail" not in reply
