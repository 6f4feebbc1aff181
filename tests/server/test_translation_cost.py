"""Conversations of other APIs become chat messages in time that grows with their length, whatever they are made of."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest

from dovetail.processing.tools import allowed_tools
from dovetail_server.apis.messages.schema import CountTokensRequest
from dovetail_server.apis.messages.turns import chat_messages
from dovetail_server.apis.responses.items import input_items, messages_of
from dovetail_server.apis.responses.schema import InputTokensRequest

SMALL, LARGE = 2_000, 16_000
TEXT = "a few words of somebody"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


CALL = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": TEXT}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "users in a row": [user(TEXT)],
    "users of one block": [user([{"type": "text", "text": TEXT}])],
    "assistants in a row": [assistant(TEXT)],
    "thoughts in a row": [assistant([{"type": "thinking", "thinking": TEXT}])],
    "calls in a row": [assistant([CALL])],
    "results in a row": [user([RESULT])],
    "results and texts": [user([RESULT, {"type": "text", "text": TEXT}])],
    "turns": [user(TEXT), assistant(TEXT)],
    "systems in a row": [{"role": "system", "content": TEXT}],
}
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": TEXT}]}
ITEMS: dict[str, list[dict[str, Any]]] = {
    "messages": [user(TEXT)],
    "answers": [assistant(TEXT)],
    "reasoning in a row": [REASONING],
    "calls in a row": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"}],
    "results in a row": [{"type": "function_call_output", "call_id": "a", "output": TEXT}],
}


def check_linear(work: Any, requests: Any) -> None:
    """Run work on a small and a large request: eight times as much may take thirty times, in the best of three."""
    small, large = requests(SMALL), requests(LARGE)
    for _ in range(3):
        took = processor_time(work, small), processor_time(work, large)
        if took[1] < 30 * max(took[0], 0.002):
            return
    raise AssertionError(took)


def processor_time(work: Any, request: Any) -> float:
    """Tell what work on a request takes this thread, without the garbage collector: others have left it something."""
    gc.disable()
    began = time.thread_time()
    try:
        work(request)
    finally:
        gc.enable()
    return time.thread_time() - began


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_messages_are_translated_in_linear_time(name: str) -> None:
    """Ten thousand messages of one role are one turn, put together once."""
    piece = CONVERSATIONS[name]

    def request(size: int) -> CountTokensRequest:
        messages = [user("hi"), *piece * (size // len(piece))]
        return CountTokensRequest.model_validate({"model": "m", "messages": messages})

    check_linear(chat_messages, request)


@pytest.mark.parametrize("name", ITEMS)
def test_items_become_messages_in_linear_time(name: str) -> None:
    """The same for the items of a response."""

    def request(size: int) -> InputTokensRequest:
        return InputTokensRequest.model_validate({"model": "m", "input": ITEMS[name] * size})

    check_linear(lambda body: messages_of(input_items(list(body.input), "resp_a"), None), request)


def test_ten_thousand_users_in_a_row_are_one_message() -> None:
    """Each keeps its text as a part, in order."""
    body = CountTokensRequest.model_validate(
        {"model": "m", "messages": [user(f"text {i}") for i in range(10_000)] + [assistant("so"), user("then")]}
    )
    messages = chat_messages(body)
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert [part["text"] for part in messages[0]["content"]] == [f"text {i}" for i in range(10_000)]


def test_what_is_said_in_a_row_stays_in_order() -> None:
    """Thoughts, texts and calls of an assistant's messages in a row join each in its own place."""
    thought = {"type": "thinking", "thinking": "a"}
    said = [assistant([thought, {"type": "text", "text": "b"}]), assistant([thought, CALL]), assistant("c")]
    body = CountTokensRequest.model_validate({"model": "m", "messages": [user("hi"), *said, user([RESULT])]})
    messages = chat_messages(body)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool"]
    assert (messages[1]["content"], messages[1]["reasoning_content"]) == ("bc", "aa")
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["a"]
    items = InputTokensRequest.model_validate({"model": "m", "input": [REASONING] * 3 + [assistant("x")]}).input
    [turn] = messages_of(input_items(list(items), "resp_a"), None)
    assert (turn["reasoning_content"], turn["content"]) == (TEXT * 3, "x")


def test_allowed_tools_are_looked_up() -> None:
    """A thousand tools and a list of ten thousand names are not a thousand times ten thousand comparisons."""

    def choice(size: int) -> Any:
        names = [{"type": "function", "name": f"f{i % 1024}"} for i in range(1024)] + [{"name": []}] * size
        tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1024)]
        return tools, {"type": "allowed_tools", "mode": "auto", "tools": names}

    def work(given: Any) -> None:
        with pytest.raises(Exception, match="not in tools"):
            allowed_tools(*given)

    check_linear(work, choice)
