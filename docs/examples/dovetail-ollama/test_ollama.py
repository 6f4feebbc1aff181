"""The conformance kit, and what this API promises."""

import json
from dataclasses import replace
from typing import Any

import pytest
from dovetail_ollama.reply import Ollama, show
from dovetail_ollama.request import read_chat, read_generate

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Chat, Text
from dovetail_testing import ApiConformance
from dovetail_testing.conformance.api import FACTS

ASKED = {"model": "m", "messages": [{"role": "user", "content": "Why?"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "f", "arguments": {"a": 1}}}


SAMPLES: Any = {
    "/api/chat": [
        ASKED,
        {"model": "m", "messages": []},
        {**ASKED, "tools": [TOOL], "think": True, "logprobs": True, "top_logprobs": 2},
        {
            **ASKED,
            "format": {"type": "object"},
            "options": {"num_predict": 3, "top_k": 4, "stop": ["a"], "seed": 1},
        },
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "assistant", "thinking": "t", "tool_calls": [CALL]},
                {"role": "tool", "tool_name": "f", "content": "2"},
            ],
            "keep_alive": "5m",
            "stream": False,
        },
    ],
    "/api/generate": [
        {"model": "m", "prompt": "Why?", "system": "s", "think": "low", "logprobs": True},
        {"model": "m", "prompt": "Once", "raw": True, "options": {"temperature": 0.5, "num_ctx": 64}},
        {"model": "m", "prompt": "a", "suffix": "b"},
        {"model": "m"},
    ],
}
WRONG: Any = {
    "/api/chat": [
        {},
        {**ASKED, "keep_alive": 0},
        {**ASKED, "think": "much"},
        {**ASKED, "options": {"mirostat": 1}},
    ],
    "/api/generate": [
        {"model": "m", "prompt": "a", "context": [1]},
        {"model": "m", "prompt": "a", "images": "a"},
        {"model": "m", "prompt": "a", "images": ["a"], "raw": True},
    ],
}
SHOWN: Any = {"/api/show": [{"model": "one"}, {"name": "two"}], "/api/tags": [{}], "/api/version": [{}]}


class TestOllama(ApiConformance):
    name = "ollama"
    samples = SAMPLES
    wrong = WRONG
    shown = SHOWN


def test_images_are_parts() -> None:
    """Before the text of their message, each with its place in the body."""
    message = {"role": "user", "content": "What?", "images": ["aGk=", "YQ=="]}
    [chat] = read_chat({"model": "m", "messages": [message]}).prompts
    first, second, text = chat.messages[0]["content"]
    assert first == {"type": "image_url", "image_url": "data:;base64,aGk=", "param": "messages[0].images[0]"}
    assert (second["param"], text["text"]) == ("messages[0].images[1]", "What?")
    [chat] = read_generate({"model": "m", "images": ["aGk="]}).prompts
    assert [part["param"] for part in chat.messages[0]["content"]] == ["images[0]"]


def test_a_model_that_sees_says_so() -> None:
    """Clients ask for the capability before they offer images."""
    facts = replace(FACTS, calls_tools=True, thinks=False)
    for sees, more in ((False, []), (True, ["vision"])):
        shown = show(replace(facts, sees=sees), {"model": "one"})
        assert shown["capabilities"] == ["completion", "tools", *more]


def test_results_belong_to_calls() -> None:
    """By id, by name, else in order."""
    calls = [{"id": "x", **CALL}, CALL, {"function": {"name": "g"}}]
    results: list[dict[str, Any]] = [
        {"role": "tool", "content": "3", "tool_name": "g"},
        {"role": "tool", "content": "1", "tool_call_id": "x"},
        {"role": "tool", "content": "2"},
    ]
    messages = [*ASKED["messages"], {"role": "assistant", "tool_calls": calls}, *results]
    [prompt] = read_chat({"model": "m", "messages": messages}).prompts
    assert isinstance(prompt, Chat)
    made = prompt.messages[1]["tool_calls"]
    assert [call["id"] for call in made] == ["x", "call_1_1", "call_1_2"]
    assert json.loads(made[0]["function"]["arguments"]) == {"a": 1}
    assert [(m["tool_call_id"], m["name"]) for m in prompt.messages[2:]] == [
        ("call_1_2", "g"),
        ("x", "f"),
        ("call_1_1", "f"),
    ]


def test_options_are_ollamas() -> None:
    """What has another name, a value for none, and what is off."""
    options = {
        "num_predict": -1,
        "seed": -1,
        "repeat_penalty": 1.1,
        "mirostat": 0,
        "typical_p": 1.0,
        "repeat_last_n": -1,
    }
    request = read_chat({**ASKED, "options": options})
    assert (request.limit, request.sampling.seed, request.sampling.repetition_penalty) == (None, None, 1.1)
    assert request.stream
    with pytest.raises(RequestError, match="repeat_last_n is not supported: penalties look at all tokens"):
        read_chat({**ASKED, "options": {"repeat_last_n": 64}})


def test_raw_has_no_template() -> None:
    """A text is continued; without `raw` it is a conversation."""
    raw, chat = (read_generate({"model": "m", "prompt": "a", "raw": raw}).prompts[0] for raw in (True, False))
    assert raw == Text(text="a")
    assert isinstance(chat, Chat)


def test_it_owns_its_errors() -> None:
    """An error is Ollama's on all paths of its own."""
    assert Ollama.owns == ("/api",)
