"""`/v1/messages` over a real HTTP server whose model says what it is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import requests
from exchanges import send_raw
from harness import Harness
from replies import message_events, strict

from dovetail.messages import Finish
from dovetail_server.apis.messages.errors import error_body
from dovetail_server.errors.body import ErrorDetail

USER = [{"role": "user", "content": "hi"}]
TEXTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
TOOL = {"name": "get_weather", "description": "Weather", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ALL = f"<think>\nWhere is it?\n</think>\n\nLet me look.\n{CALL}\n{CALL.replace('Paris', 'Rome')}"
THINK = {"type": "enabled", "budget_tokens": 50}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
RESULT = {"type": "tool_result", "tool_use_id": "c1"}


USES, THOUGHTS = {"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015"}


def post(harness: Harness, messages: Any = USER, **fields: Any) -> requests.Response:
    body = {"model": "tiny", "max_tokens": 200, "messages": messages, **fields}
    return harness.post("/v1/messages", {k: v for k, v in body.items() if v is not None})


def ask(harness: Harness, messages: Any = USER, **fields: Any) -> dict[str, Any]:
    from anthropic.types import Message

    reply = post(harness, messages, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    body: dict[str, Any] = reply.json()
    strict(Message, body)
    keys = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert set(body) == keys | {"stop_details", "container"}
    return body


def error_of(reply: requests.Response, status: int = 400) -> dict[str, Any]:
    from anthropic.types.shared import ErrorResponse

    assert reply.status_code == status, reply.text
    body = reply.json()
    if status != 413:  # the API's documentation knows the type of this one, its client does not
        strict(ErrorResponse, body)
    assert body["request_id"] == reply.headers["request-id"]
    error: dict[str, Any] = body["error"]
    return error


def prompt_of(harness: Harness) -> str:
    return harness.tokenizer.decode(harness.engine.submits[-1].prompt_ids, skip_special_tokens=False)


def test_a_plain_answer(harness: Harness) -> None:
    """Text comes as one block, and usage tells fresh and cached prompt tokens apart."""
    found = ask(harness, system="Be brief.", metadata={"user_id": "u"}, service_tier="auto")
    assert found["content"] == [{"type": "text", "text": "Hello, world", "citations": []}]
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
    usage = found["usage"]
    assert usage["cache_read_input_tokens"] == 3
    assert usage["input_tokens"] + 3 == len(harness.engine.submits[-1].prompt_ids)
    assert usage["output_tokens"] == 13
    assert prompt_of(harness).startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_thinking_text_and_calls_are_blocks_in_order(thinking: Harness) -> None:
    """A stream tells the blocks of the whole reply, and its deltas add up to them."""
    thinking.text = ALL
    found = ask(thinking, tools=[TOOL], thinking=THINK)
    assert [block["type"] for block in found["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert found["content"][0]["thinking"] == "Where is it?"
    assert [block["input"] for block in found["content"][2:]] == [{"city": "Paris"}, {"city": "Rome"}]
    assert found["stop_reason"] == "tool_use"
    assert found["usage"]["output_tokens_details"] == {"thinking_tokens": 14}
    events = message_events(post(thinking, tools=[TOOL], thinking=THINK, stream=True))
    blocks = fold(events)
    for block in [*blocks[2:], *found["content"][2:]]:
        assert block.pop("id").startswith("call_")
    assert blocks == found["content"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    ended = events[-2]["usage"]
    assert ended == {name: found["usage"][name] for name in ended}
    assert {"input_tokens", "output_tokens", "cache_read_input_tokens"} <= set(ended)


def fold(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the blocks of a stream together; one is open at a time, and nothing comes outside of one."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    is_open = False
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            texts.append("")
            is_open = True
        elif event["type"] == "content_block_delta":
            assert is_open
            change = event["delta"]
            if change["type"] == "signature_delta":
                blocks[-1]["signature"] = change["signature"]
            else:
                names = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
                texts[-1] += change[names[change["type"]]]
        else:
            assert event["type"] == "content_block_stop"
            is_open = False
    assert not is_open
    for block, text in zip(blocks, texts, strict=True):
        name = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        block[name] = json.loads(text) if name == "input" else text
    return blocks


def test_a_reply_can_be_sent_back(thinking: Harness) -> None:
    """Blocks of a reply and the results of its calls become the history that the template reads."""
    thinking.text = ALL
    content = ask(thinking, tools=[TOOL], thinking=THINK)["content"]
    results = [
        {"type": "tool_result", "tool_use_id": content[2]["id"], "content": [{"type": "text", "text": "sunny"}]},
        {"type": "tool_result", "tool_use_id": content[3]["id"], "content": "no such city", "is_error": True},
        {"type": "text", "text": "and now?"},
    ]
    messages = [*USER, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    ask(thinking, messages, tools=[TOOL])
    prompt = prompt_of(thinking)
    assert "<|im_start|>assistant\nLet me look.<|im_end|>" in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt
    assert "<|im_start|>tool\nError: no such city<|im_end|>" in prompt
    assert "<|im_start|>user\nand now?<|im_end|>" in prompt


def test_turns_of_one_role_are_one(harness: Harness) -> None:
    """Messages in a row are joined, and text blocks stay in order."""
    blocks = [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "c"}]
    ask(harness, [{"role": "user", "content": "a"}, {"role": "user", "content": blocks}])
    assert prompt_of(harness).count("<|im_start|>user") == 1
    assert "a\nb\nc" in prompt_of(harness)


DOCUMENT = {"type": "document", "title": "Rules", "context": "of 2026", "citations": {"enabled": False}}
FOUND = {"type": "search_result", "title": "A page", "source": "https://a.example", "content": TEXTS}
READABLE: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"type": "text", "text": "one"}, "one"),
    "plain": (
        {**DOCUMENT, "source": {"type": "text", "media_type": "text/plain", "data": "Be kind."}},
        "Rules\nof 2026\nBe kind.",
    ),
    "content": ({**DOCUMENT, "source": {"type": "content", "content": "Be kind."}}, "Rules\nof 2026\nBe kind."),
    "parts": ({"type": "document", "source": {"type": "content", "content": TEXTS}}, "one\ntwo"),
    "found": (FOUND, "A page\nhttps://a.example\none\ntwo"),
}


@pytest.mark.parametrize("kind", READABLE)
def test_blocks_with_text_are_read_where_a_user_may_have_them(thinking: Harness, kind: str) -> None:
    """A turn's own and those within a result; counted as they are generated from."""
    block, text = READABLE[kind]
    call = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block, block]}
    messages = [
        {"role": "user", "content": [block]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    ask(thinking, messages, tools=[TOOL])
    prompt = prompt_of(thinking)
    assert f"<|im_start|>user\n{text}<|im_end|>" in prompt
    assert f"<|im_start|>tool\n{text}\n{text}<|im_end|>" in prompt
    counted = thinking.post("/v1/messages/count_tokens", {"model": "tiny", "messages": messages, "tools": [TOOL]})
    assert counted.json() == {"input_tokens": len(thinking.engine.submits[-1].prompt_ids)}


def test_redacted_thinking_of_another_server_is_left_out(harness: Harness) -> None:
    """A conversation that began elsewhere goes on: nobody here can read what that server has encrypted."""
    hidden = {"type": "redacted_thinking", "data": "EmwKAhgB"}
    answer = {"role": "assistant", "content": [hidden, {"type": "text", "text": "Four."}]}
    ask(harness, [*USER, answer, *USER])
    assert "<|im_start|>assistant\nFour.<|im_end|>" in prompt_of(harness)
    assert "EmwK" not in prompt_of(harness)


def test_the_beginning_of_an_answer_is_continued(harness: Harness) -> None:
    """A last message of the assistant is the beginning of the reply."""
    found = ask(harness, [*USER, {"role": "assistant", "content": "Once upon"}])
    assert prompt_of(harness).endswith("assistant\nOnce upon")
    assert found["content"][0]["text"] == "Hello, world"
    reply = post(harness, [*USER, {"role": "assistant", "content": "Once"}], thinking=THINK)
    assert "cannot think first" in error_of(reply)["message"]


def test_stop_reasons(thinking: Harness) -> None:
    """Each way of ending has its word; a limit beyond the context is the context."""
    assert ask(thinking, stop_sequences=[", w", "x"])["stop_reason"] == "stop_sequence"
    assert ask(thinking, stop_sequences=[", w", "x"])["stop_sequence"] == ", w"
    assert ask(thinking, max_tokens=3)["stop_reason"] == "max_tokens"
    thinking.text = "long " * 200
    assert ask(thinking, max_tokens=32_000)["stop_reason"] == "model_context_window_exceeded"
    too_long = [{"role": "user", "content": "x" * 600}]
    assert "maximum context length" in error_of(post(thinking, too_long))["message"]


def test_thinking_is_switched_bounded_and_left_out(thinking: Harness) -> None:
    """`enabled` sets template and budget, `disabled` ends thinking at once, `omitted` hides it in the signature."""
    ask(thinking, thinking=THINK)
    submit = thinking.engine.submits[-1]
    assert submit.thinking is not None
    assert submit.thinking.budget == 50
    assert prompt_of(thinking).endswith("assistant\n")
    ask(thinking, thinking={"type": "disabled"})
    assert prompt_of(thinking).endswith("<think>\n\n</think>\n\n")
    ask(thinking, thinking={"type": "disabled"}, chat_template_kwargs={"enable_thinking": True})
    submit = thinking.engine.submits[-1]
    assert submit.thinking is not None
    assert submit.thinking.budget == 0
    ask(thinking, thinking={"type": "adaptive"}, output_config={"effort": "high"})
    assert thinking.engine.submits[-1].thinking is None
    thinking.text = "<think>\nsecret\n</think>\n\nyes"
    block = ask(thinking, thinking={**THINK, "display": "omitted"})["content"][0]
    assert block["thinking"] == ""
    events = message_events(post(thinking, thinking={**THINK, "display": "omitted"}, stream=True))
    assert fold(events)[0] == block


def test_omitted_thinking_comes_back(thinking: Harness) -> None:
    """A block whose thinking stands in its signature gives the model its thoughts again."""
    from dovetail_server.apis.messages.schema import MessagesRequest
    from dovetail_server.apis.messages.turns import chat_messages

    thinking.text = "<think>\nsecret\n</think>\n\nyes"
    content = ask(thinking, thinking={**THINK, "display": "omitted"})["content"]
    request = {"model": "m", "max_tokens": 1, "messages": [*USER, {"role": "assistant", "content": content[:1]}]}
    (_, turn) = chat_messages(MessagesRequest.model_validate(request))
    assert turn["reasoning_content"] == "secret"


def test_tool_choice(thinking: Harness) -> None:
    """`none` hides the tools, one call at a time can be asked for, and what cannot be enforced is refused."""
    thinking.text = ALL
    assert "get_weather" not in prompt_of_none(thinking)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(thinking, tools=[TOOL], tool_choice=choice)["content"]) == 3
    for name in ("any", "tool"):
        named = {"type": name, **({"name": "get_weather"} if name == "tool" else {})}
        assert "grammar backend" in error_of(post(thinking, tools=[TOOL], tool_choice=named))["message"]


def prompt_of_none(harness: Harness) -> str:
    ask(harness, tools=[TOOL], tool_choice={"type": "none"})
    return prompt_of(harness)


def test_a_call_that_was_cut_off_keeps_what_is_there(thinking: Harness) -> None:
    """The input of an unfinished call is the object so far."""
    thinking.text = CALL
    found = ask(thinking, tools=[TOOL], max_tokens=52)
    assert found["stop_reason"] == "max_tokens"
    assert found["content"][-1]["input"] == {"city": "Par"}


def test_sampling_fields_reach_the_engine(harness: Harness) -> None:
    """Fields mean what they mean in chat requests."""
    ask(harness, temperature=0.3, top_p=0.9, top_k=7, min_p=0.1, seed=5, priority=2, cache_salt="s", rid="mine")
    submit = harness.engine.submits[-1]
    params = submit.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.3, 0.9, 7, 0.1, 5)
    assert (submit.priority, submit.cache_salt, submit.rid, params.max_tokens) == (2, "s", "mine", 200)
    ask(harness)
    assert harness.engine.submits[-1].rid.startswith("msg_")


def test_count_tokens(thinking: Harness) -> None:
    """The count is that of the prompt that a message would have, also beyond the context; `max_tokens` is unknown."""
    fields: dict[str, Any] = {"system": "S", "tools": [TOOL], "thinking": {"type": "disabled"}}
    ask(thinking, **fields)
    body = {"model": "tiny", "messages": USER, **fields}
    assert thinking.post("/v1/messages/count_tokens", body).json() == {
        "input_tokens": len(thinking.engine.submits[-1].prompt_ids)
    }
    long = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 600}]}
    assert thinking.post("/v1/messages/count_tokens", long).json()["input_tokens"] > 600
    refused = thinking.post("/v1/messages/count_tokens", {**body, "max_tokens": 5})
    assert "max_tokens" in error_of(refused)["message"]


def test_errors_are_anthropics(harness: Harness) -> None:
    """Whatever answers on these routes, the body has Anthropic's form and its type."""
    error = error_of(post(harness, model="nope"), 404)
    assert (error["type"], "served: tiny" in error["message"]) == ("not_found_error", True)
    assert error_of(harness.get("/v1/messages"), 405)["type"] == "invalid_request_error"
    assert error_of(harness.get("/v1/messages/nothing"), 404)["type"] == "not_found_error"
    huge = harness.post("/v1/messages", {"x": "y" * harness.settings.max_body_bytes})
    assert error_of(huge, 413)["type"] == "request_too_large"
    assert error_of(harness.post("/v1/messages", data=b"{", headers={"content-type": "application/json"}))["message"]
    harness.engine.give_up = Finish("abort", None, "broken")
    assert error_of(post(harness), 500)["type"] == "api_error"


def test_keys(make_harness: Callable[..., Harness]) -> None:
    """The key may come in Anthropic's header; without it the 401 has Anthropic's form."""
    server = make_harness(api_key=["sk-one-5c1d"])
    assert error_of(post(server), 401)["type"] == "authentication_error"
    body = {"model": "tiny", "max_tokens": 20, "messages": USER}
    assert server.post("/v1/messages", body, headers={"x-api-key": "sk-one-5c1d"}).status_code == 200


def test_a_server_that_goes_down_is_overloaded(harness: Harness) -> None:
    """Its clients are told to wait; a full queue is the same, which `test_limits` shows on every route."""
    harness.state.is_draining = True
    try:
        reply = post(harness)
        assert error_of(reply, 529)["type"] == "overloaded_error"
        assert int(reply.headers["retry-after"]) >= 1
    finally:
        harness.state.is_draining = False


def test_an_error_after_a_long_wait_is_an_event(make_harness: Callable[..., Harness]) -> None:
    """Once the headers had to go, an error before the first event has Anthropic's form, too."""
    server = make_harness(stream_keep_alive=0.1)
    server.engine.hold.clear()
    body = {"model": "tiny", "max_tokens": 9, "messages": USER, "stream": True, "rid": "x"}
    with requests.post(server.base + "/v1/messages", json=body, stream=True, timeout=60) as reply:
        lines = reply.iter_lines(decode_unicode=True)
        assert next(lines).startswith(":")
        assert server.post("/abort_request", {"rid": "x"}).json() == {"aborted": 1}
        rest = [line for line in lines if line and not line.startswith(":")]
    assert rest[0] == "event: error"
    assert json.loads(rest[1][6:])["error"]["type"] == "invalid_request_error"
    assert json.loads(rest[1][6:])["request_id"] == reply.headers["request-id"]
    assert len(rest) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(harness: Harness, stream: bool) -> None:
    """Nothing runs after the connection was closed, streaming or not."""
    harness.engine.delay_s = 0.01
    harness.text = "x" * 10_000
    body = {"model": "tiny", "max_tokens": 400, "messages": USER, "stream": stream}
    client = send_raw(harness, "/v1/messages", body)
    harness.eventually(lambda: harness.engine.step > 3)
    client.close()
    harness.eventually(lambda: not harness.engine.live and harness.state.num_live == 0)
    assert len(harness.engine.aborted) == 1


def test_an_error_in_a_stream_is_an_event(harness: Harness) -> None:
    """After the first event an error is told by `error`, and the stream ends."""
    harness.engine.die_after = 3
    events = message_events(post(harness, stream=True))
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "overloaded_error"
    assert events[-1]["request_id"]


def turn(role: str, block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "content[0].source must be of",
        ),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]: an image cannot be read"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "this model is served for text only"),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [TEXTS[0], IMAGE]}]}]},
            "messages[0].content[0].content[1]: an image cannot",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "tool_result",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
                ]
            },
            "send its tool_result",
        ),
        ({"messages": [{"role": "user", "content": [{**DOCUMENT, "source": {"type": "base64"}}]}]}, "send their text"),
        ({"messages": [{"role": "user", "content": [{**FOUND, "citations": {"enabled": True}}]}]}, "enabled"),
        ({"messages": [{"role": "assistant", "content": [FOUND]}]}, "is a search_result, which only a user"),
        ({"tools": [{"type": "bash_20990101", "name": "bash"}]}, "bash_20990101"),
        ({"tools": [{"type": "bash_20250124", "name": "sh"}]}, "is 'bash'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash", "input_schema": {}}]}, "leave it out"),
        ({"tools": [{**TOOL, "max_characters": 5}]}, "tools[0].max_characters"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "input_schema": {"type": 3}}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 200}}, "max_tokens"),
        ({"thinking": {"type": "between_tools"}}, "between_tools"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "output_config.format"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type"),
        ({"context_management": {"edits": [USES, THOUGHTS]}}, "context_management.edits[1]"),
        ({"context_management": {"edits": [THOUGHTS, THOUGHTS]}}, "context_management.edits[1]"),
        ({"context_management": {"edits": [{**THOUGHTS, "keep": {"type": "turns"}}]}}, "context_management.edits[0]"),
        ({"context_management": {"edits": [{**THOUGHTS, "keep": {"type": "all", "value": 3}}]}}, "keep.value"),
        ({"context_management": {"edits": [{**THOUGHTS, "keep": {"type": "thinking_turns"}}]}}, "keep.value"),
        ({"context_management": {"edits": [{**USES, "trigger": 5}]}}, "context_management.edits[0]"),
        ({"context_management": {"edits": [{"type": "clear_all"}]}}, "context_management.edits[0]"),
        ({"inference_geo": "us"}, "inference_geo"),
        ({"diagnostics": {}}, "diagnostics"),
        ({"speed": "fast"}, "speed"),
        ({"temperature": -1}, "temperature"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"max_token": 1}, "max_tokens"),
        ({"stop": ["a"]}, "on this route stop_sequences says it"),
        ({"reasoning_effort": "low"}, "on this route output_config.effort says it"),
        ({"response_format": {"type": "json_object"}}, "on this route output_config.format says it"),
    ],
)
def test_what_cannot_be_done_is_refused(thinking: Harness, fields: dict[str, Any], name: str) -> None:
    """Each field that is wrong or not supported is a 400 that names it as the client wrote it."""
    error = error_of(post(thinking, **fields))
    assert error["type"] == "invalid_request_error"
    assert name in error["message"]
    assert "function" not in error["message"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(409, "invalid_request_error"), (500, "api_error"), (502, "api_error"), (529, "overloaded_error")],
)
def test_errors_of_the_server_are_no_faults_of_the_request(status: int, kind: str) -> None:
    """By the type clients choose whether to send the request again as it is."""
    assert error_body(status, ErrorDetail(message="x", type="y"), None).error.type == kind


@pytest.mark.parametrize(
    ("message", "shown"),
    [("a[0]: no image", "a[0]: no image"), ("no audio", "a[0].type: no audio"), ("a[0].type is x", "a[0].type is x")],
)
def test_an_error_names_the_field_once(message: str, shown: str) -> None:
    """A message that names the part is not put behind the name of the part's type."""
    detail = ErrorDetail(message=message, type="y", param="a[0].type")
    assert error_body(400, detail, None).error.message == shown


@pytest.mark.parametrize("edits", [{}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}])
def test_edits_that_clear_nothing_are_accepted(thinking: Harness, edits: dict[str, Any]) -> None:
    """Clients send them beside thinking: a refusal would end every conversation."""
    assert post(thinking, context_management=edits).status_code == 200


def test_thinking_needs_a_parser(harness: Harness) -> None:
    """Without a reasoning parser a budget cannot be kept, which is said in the client's words."""
    assert "thinking.budget_tokens needs a model that thinks" in error_of(post(harness, thinking=THINK))["message"]
    assert ask(harness, thinking={"type": "disabled"})["content"][0]["type"] == "text"


def test_random_blocks_never_break_the_server(thinking: Harness) -> None:
    """Bodies of odd shapes are refused by the client's fault, never by the server's."""
    odd: list[Any] = [None, 3, [], {}, "", "\ud800", [{}], [{"type": None}], [{"type": "text"}], {"type": "text"}]
    for value in odd:
        for name in ("messages", "system", "tools", "tool_choice", "thinking", "metadata", "output_config"):
            body = {"model": "tiny", "max_tokens": 5, "messages": USER, name: value}
            reply = thinking.post("/v1/messages", body)
            assert reply.status_code in (200, 400), (name, value, reply.text)
        for role in ("user", "assistant", "system"):
            reply = post(thinking, [{"role": role, "content": value}])
            assert reply.status_code in (200, 400), (role, value, reply.text)
