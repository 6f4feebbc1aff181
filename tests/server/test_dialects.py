"""Fields of other servers' clients: each is served, means the same as fields of ours, means nothing, or is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from dialects import ROWS
from exchanges import error_of, events
from grammar_server import WithGrammars, server  # noqa: F401
from harness import Harness

from dovetail_server.compat.dialects import OWN, SAID
from dovetail_server.compat.known import SENT

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hey"}]


@pytest.fixture
def running(server: Harness) -> Harness:  # noqa: F811
    server.reset()
    return server


def asked(harness: Harness, fields: dict[str, Any], path: str = CHAT) -> tuple[Any, Any]:
    """Return what the engine was asked, and what was replied but for what is made anew."""
    body = {"prompt": "Hey"} if path == "/v1/completions" else {"messages": USER}
    reply = harness.post(path, {**body, **fields})
    assert reply.status_code == 200, reply.text
    made = msgspec.to_builtins(harness.engine.submits[-1])
    del made["rid"]
    made.pop("handle", None)
    return made, [choice.get("message", {}).keys() for choice in reply.json()["choices"]]


def test_the_table_is_walked_whole() -> None:
    """Every field that is told has a row, every row of the facts, and as many more."""
    tried = {name for _, name, _, _ in ROWS}
    nested = {name for _, _, value, _ in ROWS if isinstance(value, dict) for name in value}
    assert set(OWN) - tried <= {"seed", "top_k"}
    alike = {name for name in SAID if SAID[name] in [SAID[other] for other in tried & SAID.keys()]}
    assert {name for name in SAID if name not in tried | nested | alike} <= {
        "guided_json_object", "guided_whitespace_pattern", "clear_thinking", "max_output_tokens", "maxTokens",
    }  # fmt: skip
    assert len(tried & SENT.keys()) > 90


@pytest.mark.parametrize("sender", sorted({row[0] for row in ROWS}))
def test_a_field_means_what_is_written(running: Harness, sender: str) -> None:
    """What the engine gets is what our own fields make; a refusal says why, and hints at nothing else."""
    for name, value, wanted in (row[1:] for row in ROWS if row[0] == sender):
        if isinstance(wanted, str):
            reply = running.post(CHAT, {"messages": USER, name: value})
            error = error_of(reply)
            assert reply.status_code == 400, (name, value)
            assert wanted in error["message"], (name, value)
            assert "did you mean" not in error["message"], (name, value)
        else:
            assert asked(running, {name: value}) == asked(running, wanted), (name, value)


def test_what_means_nothing_is_dropped_and_the_rest_refused(running: Harness) -> None:
    """Of every name: null is no wish; a value that no client sends by default is a wish, or the field has none."""
    plain = asked(running, {})
    assert asked(running, dict.fromkeys(SENT)) == plain
    odd = {"no-such": "value"}
    assert asked(running, {name: odd for name in SENT if SENT[name].at is None}) == plain
    for name in (name for name in SENT if SENT[name].at is not None):
        error = error_of(running.post(CHAT, {"messages": USER, name: odd}))
        assert (error["code"], error["param"]) == ("unsupported_parameter", name)
        assert SENT[name].why in error["message"]


def test_two_fields_that_say_one_thing(running: Harness) -> None:
    """They are one where they say the same, and refused where not; what its own server overrides is overridden."""
    same = {"repeat_penalty": 1.1, "repetition_penalty": 1.1}
    assert asked(running, same) == asked(running, {"repetition_penalty": 1.1})
    for fields, param in (
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"n_predict": 3, "num_predict": 4}, "num_predict"),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "enable_thinking"),
    ):
        error = error_of(running.post(CHAT, {"messages": USER, **fields}))
        assert (error["param"], "are one setting and differ" in error["message"]) == (param, True)
    given = {"do_sample": False, "temperature": 0.7}
    assert asked(running, given) == asked(running, {"temperature": 0})


def test_other_routes_have_the_fields_that_they_can_say(running: Harness) -> None:
    """Completions and SGLang's own API know samplers and limits; a chat's fields are refused with the way there."""
    for fields, ours in (
        ({"repeat_penalty": 1.1, "n_predict": 5}, {"repetition_penalty": 1.1, "max_tokens": 5}),
        ({"random_seed": 3, "stop_sequences": ["a"], "mirostat": 0}, {"seed": 3, "stop": ["a"]}),
    ):
        assert asked(running, fields, "/v1/completions") == asked(running, ours, "/v1/completions")
    reply = running.post("/generate", {"text": "Hey", "sampling_params": {"n_predict": 5, "xtc_probability": 0}})
    assert reply.status_code == 200, reply.text
    assert running.engine.submits[-1].params.max_tokens == 5
    for path, body in (
        ("/v1/completions", {"prompt": "Hey", "enable_thinking": True}),
        ("/v1/responses", {"input": "Hey", "guided_json": {}, "guided_regex": "a"}),
    ):
        error = error_of(running.post(path, body))
        assert "/v1/chat/completions" in error["message"]
        assert "did you mean" not in error["message"]
    error = error_of(running.post("/generate", {"text": "Hey", "sampling_params": {"repeat_penalty": "x"}}))
    assert error["param"] == "sampling_params.repeat_penalty"


def test_a_large_object_of_options_is_refused_soon(running: Harness) -> None:
    """However many unknown fields it has, one is named."""
    options = {f"option{at}": at for at in range(50_000)}
    error = error_of(running.post(CHAT, {"messages": USER, "options": options}))
    assert error["code"] == "unknown_parameter"
    nested: Any = {}
    for _ in range(100):
        nested = {"options": nested}
    assert error_of(running.post(CHAT, {"messages": USER, **nested, "n": 1}))["code"] == "unknown_parameter"


def test_a_limit_beyond_the_context_ends_with_it_and_is_said(running: Harness) -> None:
    """A chat's reply says that it ended with the context, whole and streamed; completions refuse such a limit."""
    running.text = "a" * 2000
    reply = running.post(CHAT, {"messages": USER, "max_tokens": 100_000}).json()
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["context_exceeded"]) == ("length", True)
    assert reply["usage"]["total_tokens"] == running.context_len
    last = events(running.post(CHAT, {"messages": USER, "max_tokens": 100_000, "stream": True}))[-1]
    assert last["choices"][0]["context_exceeded"] is True
    short = running.post(CHAT, {"messages": USER, "max_tokens": 5}).json()["choices"][0]
    assert short["finish_reason"] == "length"
    assert "context_exceeded" not in short
    refused = running.post("/v1/completions", {"prompt": "Hey", "max_tokens": 100_000})
    assert error_of(refused)["code"] == "context_length_exceeded"
    told = {"context_length_exceeded_behavior": "truncate"}
    choice = running.post("/v1/completions", {"prompt": "Hey", "max_tokens": 100_000, **told}).json()["choices"][0]
    assert choice["context_exceeded"] is True
    told = {"context_length_exceeded_behavior": "error"}
    refused = running.post(CHAT, {"messages": USER, "max_tokens": 100_000, **told})
    assert error_of(refused)["code"] == "context_length_exceeded"
    cut = {"truncate_prompt_tokens": -1, "messages": [{"role": "user", "content": "Hey " * 1000}]}
    running.post(CHAT, {**cut, "max_tokens": 100})
    assert len(running.engine.submits[-1].prompt_ids) == running.context_len - 100


@pytest.mark.parametrize("told", ["clamp", "refuse"])
def test_the_server_says_what_becomes_of_such_limits(make_harness: Any, told: str) -> None:
    """`--max-tokens-beyond` is for every API that has it as a default only; the request's own word goes first."""
    harness = make_harness(max_tokens_beyond=told)
    status = 200 if told == "clamp" else 400
    for path, body in (
        (CHAT, {"messages": USER, "max_tokens": 100_000}),
        ("/v1/completions", {"prompt": "Hey", "max_tokens": 100_000}),
        ("/generate", {"text": "Hey", "sampling_params": {"max_new_tokens": 100_000}}),
    ):
        assert harness.post(path, body).status_code == status
    other = "error" if told == "clamp" else "truncate"
    body = {"messages": USER, "max_tokens": 100_000, "context_length_exceeded_behavior": other}
    assert harness.post(CHAT, body).status_code == 600 - status
