"""Bad input: one clear error each, never a 5xx, and the server keeps serving."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from exchanges import error_of
from harness import Harness

from dovetail.contracts.errors import MAX_CHARS
from dovetail.contracts.output import Event
from dovetail.messages import TokenDelta
from dovetail.text.parsing.stream import OutputStream

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def refuse(harness: Harness, status: int = 400, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": USER, **fields}
    reply = harness.post(CHAT, data=json.dumps(body), headers=JSON)
    assert reply.status_code == status, reply.text
    assert not harness.engine.submits
    return error_of(reply)


def raw(harness: Harness, body: bytes | str, path: str = CHAT) -> dict[str, Any]:
    reply = harness.post(path, data=body, headers=JSON)
    assert reply.status_code == 400, reply.text
    assert harness.get("/health").status_code == 200
    return error_of(reply)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate", "/tokenize", "/detokenize", "/abort_request"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"null",
        b'{"model": "tiny"} x',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "a\\u0000b"}]}',
        b'{"model": "tiny", "prompt": "a\\u0000b"}',
        b'{"model": "tiny", "messages": "\xff"}',
        b"[" * 1000 + b"]" * 1000,
        b'{"a":' * 1000 + b"1" + b"}" * 1000,
        b'{"model": "tiny", "temperature": NaN}',
        b'{"model": "tiny", "temperature": Infinity}',
    ],
)
def test_what_is_no_proper_json_is_a_400(harness: Harness, path: str, body: bytes) -> None:
    """Malformed, deep or non-Unicode JSON is refused on every route, and the server is still well."""
    assert raw(harness, body, path)["type"] == "invalid_request_error"
    assert not harness.engine.submits


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"top_p": 1.5}, "top_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 10**9}, "n", "invalid_value"),
        ({"n": "2"}, "n", "invalid_type"),
        ({"max_tokens": -5}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", None),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value"),
        ({"seed": 1 << 70}, "seed", None),
        ({"stop": ["x"] * 33}, "stop", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": [""]}, "stop[0]", "invalid_value"),
        ({"stop_token_ids": [999]}, "stop_token_ids", "invalid_token_id"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_token_id"),
        ({"logit_bias": {"²": 1}}, "logit_bias", "invalid_token_id"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "invalid_token_id"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            None,
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"response_format": {"type": "poem"}}, "response_format", "invalid_value"),
        ({"response_format": {"type": []}}, "response_format", "invalid_value"),
        ({"regex": "a+"}, "regex", "unsupported_parameter"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", None),
        ({"verbosity": "loud"}, "verbosity", "invalid_value"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
        ({"moderation": {"model": "m"}}, "moderation", "unsupported_parameter"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"rid": "has space"}, "rid", "invalid_value"),
        ({"metadata": {"k": 1}}, "metadata.k", "invalid_type"),
    ],
)
def test_a_bad_field_is_named(harness: Harness, fields: dict[str, Any], param: str, code: str | None) -> None:
    """The error names the field as the client wrote it, and has a stable code."""
    error = refuse(harness, **fields)
    assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "x" * 30_000}}, {"structured_outputs": {"x" * 30_000: "a"}}]
)
def test_a_long_value_makes_no_long_error(harness: Harness, fields: dict[str, Any]) -> None:
    """A refusal that repeats what the client wrote leaves the middle out, in the field's name too."""
    error = refuse(harness, **fields)
    assert len(error["message"]) < 1.1 * MAX_CHARS
    assert len(error["param"]) < 1.1 * MAX_CHARS
    assert "characters …]" in error["message"]


def test_missing_and_unknown_model(harness: Harness) -> None:
    """A missing model and `default` are the one that is served; an unknown one is a 404 that lists the names."""
    for names in ({}, {"model": None}, {"model": "default"}):
        assert harness.post(CHAT, {"messages": USER, **names}).json()["model"] == "tiny"
    harness.reset()
    assert error_of(harness.post(CHAT, {"messages": USER, "model": ""}))["code"] == "model_not_found"
    error = refuse(harness, 404, model="other-9")
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "tiny, tiny-too" in error["message"]
    assert harness.post(CHAT, {"model": "tiny-too", "messages": USER}).json()["model"] == "tiny-too"


def test_an_unknown_field_gets_the_nearest_name(harness: Harness) -> None:
    """A misspelt field is never ignored."""
    assert "did you mean 'temperature'?" in refuse(harness, temprature=0)["message"]


def test_an_unknown_field_without_a_nearest_name_says_where_the_fields_are(harness: Harness) -> None:
    """Who is far off learns where the names stand."""
    assert "unknown field 'zzz'; GET /openapi.json lists the fields" in refuse(harness, zzz=0)["message"]


def test_a_misspelt_required_field_is_recognised(harness: Harness) -> None:
    """What is missing is told together with the field that was probably meant to be it."""
    error = raw(harness, json.dumps({"model": "tiny", "message": USER}))
    assert error["message"] == "messages is required; did you mean it by 'message'?"
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")
    assert raw(harness, '{"model": "tiny", "zzz": 1}')["message"] == "messages is required"


@pytest.mark.parametrize(
    ("field", "where"), [("prompt", "/generate takes text or input_ids"), ("messages", "goes to /v1/chat/completions")]
)
def test_the_input_of_another_route_says_which(harness: Harness, field: str, where: str) -> None:
    """Who sends `/generate` what other routes take learns where it goes."""
    error = raw(harness, json.dumps({field: "hi"}), "/generate")
    assert error["param"] == field
    assert where in error["message"]


def test_a_missing_content_type_is_said_to_be_missing(harness: Harness) -> None:
    """A client that sends no media type is told so, and which one to send."""
    reply = harness.post(CHAT, data=b"{}", headers={})
    assert reply.status_code == 415
    assert error_of(reply)["message"].startswith("content-type is missing: the body must be JSON; send the header")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/chatcompletions", "did you mean /v1/chat/completions?"),
        ("/v1/generate", "did you mean /generate?"),
        ("/v1/ping", "did you mean /ping?"),
        ("/wp-login.php", "GET /openapi.json lists the routes"),
        ("/v1/chat/completions" + "x" * 4000, "GET /openapi.json lists the routes"),
    ],
)
def test_an_unknown_path_gets_the_nearest_route(harness: Harness, path: str, hint: str) -> None:
    """A slip is named; a long path is shortened and not compared."""
    reply = harness.post(path, {})
    assert reply.status_code == 404
    message = error_of(reply)["message"]
    assert message.startswith(f"no route POST {path[:128]}")
    assert message.endswith(f"; {hint}")
    assert len(message) < 256


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/tags"])
def test_ollamas_own_routes_say_what_to_use(harness: Harness, path: str) -> None:
    """Who comes from Ollama learns the route that both servers have."""
    error = error_of(harness.post(path, {}))
    assert error["code"] == "unsupported_route"
    assert "/v1/" in error["message"]


def test_unknown_nulls_are_no_mistake(harness: Harness) -> None:
    """Clients that send every optional field, null where unused, are served."""
    body = {"model": "tiny", "messages": USER, "lora_path": None, "temperature": None}
    assert harness.post(CHAT, body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_context_overflow(harness: Harness, stream: bool) -> None:
    """Too long a prompt, alone or with its output, is one sentence that both peers' clients recognise."""
    long = [{"role": "user", "content": "x" * 600}]
    refused = {"max_tokens": 500, "context_length_exceeded_behavior": "error"}
    for fields in ({"messages": long}, refused, {"messages": [{"role": "user", "content": "x" * 10**6}]}):
        error = refuse(harness, **fields, stream=stream)
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 512" in error["message"]
        assert "is longer than the model's context length" in error["message"]


def test_routes_methods_and_content_types(harness: Harness) -> None:
    """An unknown route, a wrong method and another content type have their own status."""
    reply = harness.get("/v2/nothing")
    assert (reply.status_code, error_of(reply)["code"]) == (404, "not_found")
    reply = harness.get("/v1/completions")
    assert (reply.status_code, error_of(reply)["code"]) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    reply = harness.post(
        CHAT, data=json.dumps({"model": "tiny", "messages": USER}), headers={"content-type": "text/plain"}
    )
    assert (reply.status_code, error_of(reply)["code"]) == (415, "unsupported_media_type")
    assert "content-type: application/json" in error_of(reply)["message"]


def test_body_limit(make_harness: Any) -> None:
    """A body over the limit is refused by its declared length, or while it arrives."""
    harness = make_harness(max_body_bytes=2000)
    big = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 3000}]}).encode()
    reply = harness.post(CHAT, data=big, headers=JSON)
    assert (reply.status_code, error_of(reply)["code"]) == (413, "body_too_large")
    reply = harness.post(CHAT, data=iter([big[:1500], big[1500:]]), headers=JSON)
    assert (reply.status_code, error_of(reply)["code"]) == (413, "body_too_large")
    assert harness.post(CHAT, {"model": "tiny", "messages": USER}).status_code == 200


def test_an_unexpected_exception_is_a_500_with_an_id(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """The client gets an id, the log gets the traceback under it."""

    def broken(submit: object) -> list[int]:
        raise ZeroDivisionError("a secret detail")

    harness.engine.script = broken
    with caplog.at_level(logging.ERROR, logger="dovetail"):
        logging.getLogger("dovetail").propagate = True
        reply = harness.post(CHAT, {"model": "tiny", "messages": USER})
    error = error_of(reply)
    assert (reply.status_code, error["code"]) == (500, "internal_error")
    assert "secret" not in reply.text
    incident = error["message"].split()[2].rstrip(";")
    assert incident in caplog.text
    assert "a secret detail" in caplog.text
    harness.reset()
    assert harness.post(CHAT, {"model": "tiny", "messages": USER}).status_code == 200
    assert harness.state.num_live == 0


def test_a_parser_that_raises_fails_its_request_only(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request ends with an error, its engine request is aborted, and the next one is served."""
    feed = OutputStream.feed

    def broken(self: OutputStream, delta: TokenDelta) -> list[Event]:
        if self.num_tokens + len(delta.ids) > 3:
            raise IndexError("a parser's mistake")
        return feed(self, delta)

    monkeypatch.setattr(OutputStream, "feed", broken)
    harness.text = "x" * 200
    assert harness.post(CHAT, {"model": "tiny", "messages": USER}).status_code == 500
    reply = harness.post(CHAT, {"model": "tiny", "messages": USER, "stream": True})
    assert reply.status_code == 200
    assert "event: error" in reply.text
    assert "mistake" not in reply.text
    assert reply.text.endswith("data: [DONE]\n\n")
    monkeypatch.undo()
    assert len(harness.engine.aborted) == 2
    assert harness.state.num_live == 0
    assert harness.post(CHAT, {"model": "tiny", "messages": USER}).status_code == 200


@pytest.mark.parametrize("choice", ["auto", "none", "x", {"name": "f"}, {}])
def test_function_call_needs_functions(harness: Harness, choice: Any) -> None:
    """Without them it chooses nothing, whatever it says, and beside tools it would be ignored."""
    tool = {"type": "function", "function": {"name": "f"}}
    for more in ({}, {"tools": [tool]}):
        error = refuse(harness, function_call=choice, **more)
        assert error["param"] == "function_call"
        assert "only allowed when functions are specified" in error["message"]


def test_functions_have_no_tool_choice(harness: Harness) -> None:
    """It would be ignored beside them."""
    for choice in ("auto", "none", {"type": "function", "function": {"name": "f"}}):
        assert refuse(harness, functions=[{"name": "f"}], tool_choice=choice)["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("name", "value"), [("tools", []), ("chat_template_kwargs", {"a": 1}), ("add_generation_prompt", True)]
)
def test_a_text_to_tokenize_has_no_template(harness: Harness, name: str, value: Any) -> None:
    """What only a conversation has is refused beside a text, where it would change nothing."""
    reply = harness.post("/tokenize", {"model": "tiny", "prompt": "a", name: value})
    assert reply.status_code == 400
    assert error_of(reply)["param"] == name


def test_generate_has_its_own_fields_for_prompt_logprobs(harness: Harness) -> None:
    """The other API's name would be ignored."""
    reply = harness.post("/generate", {"text": "a", "sampling_params": {"prompt_logprobs": 1}})
    assert reply.status_code == 400
    assert "return_logprob" in error_of(reply)["message"]
