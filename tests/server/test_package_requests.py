"""What a package's `read` makes of a body is held against what a request may be."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from harness import Harness
from msgspec.structs import replace
from package_apis import ONE, WHO, Loose, Strange

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Chat, Cut, Ids, Names, Request, Sampling, Text, Tools
from dovetail.processing.checked import OF_REQUEST, checked
from dovetail_server.apis.chat.schema import ChatRequest
from dovetail_server.apis.completions.schema import CompletionRequest

NAMES = Names(limit="options.most", prompt="input", renamed={"temperature": "options.temperature"})


def chat(*messages: Any, **fields: Any) -> list[Any]:
    return [Chat(messages=list(messages), **fields)]


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": Sampling(**fields)}


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 10**9}),
    ("n", {"n": 0}),
    ("n", {"n": "3"}),
    ("candidates", {"candidates": -1}),
    ("max_tokens", {"limit": -1}),
    ("max_tokens", {"limit": 1.5}),
    ("max_tokens", {"limit": True}),
    ("options.most", {"limit": 1.5, "names": NAMES}),
    ("options.most", {"limit": 1 << 40, "names": NAMES}),
    ("needs_context", {"needs_context": "3"}),
    ("priority", {"priority": 1.5}),
    ("priority", {"priority": 1 << 31}),
    (None, {"priority": 1 << 70}),
    ("logprobs", {"logprobs": 0.5}),
    ("prompt_logprobs_start", {"prompt_logprobs": 1, "prompt_logprobs_start": 0.5}),
    ("logprob_token_ids", {"logprobs": 1, "named_ids": [True]}),
    ("logprob_token_ids", {"logprobs": 1, "named_ids": [1] * 5000}),
    ("thinking_budget", {"thinking_budget": -1}),
    ("temperature", sampling(temperature=math.nan)),
    ("options.temperature", sampling(temperature=-1.0) | {"names": NAMES}),
    ("repetition_penalty", sampling(repetition_penalty=0.0)),
    ("top_k", sampling(top_k=1.5)),
    (None, sampling(seed=1 << 70)),
    ("seed", sampling(seed=1 << 63)),
    ("stop_token_ids", sampling(stop_token_ids=[1] * 257)),
    ("allowed_token_ids", sampling(allowed_token_ids=[])),
    ("bad_words", sampling(bad_words=[""])),
    ("logit_bias", sampling(logit_bias={"1": math.nan})),
    ("logit_bias", sampling(logit_bias={"1": -math.inf})),
    ("logit_bias", sampling(logit_bias={"9" * 5000: 1.0})),
    ("cache_salt", {"cache_salt": "x" * 513}),
    (None, {"cache_salt": "\ud800"}),
    (None, {"grammar": {"json_schema": {"const": "\ud800"}}}),
    ("grammar", {"grammar": []}),
    ("grammar", {"grammar": {"zork": 1}}),
    ("candidates", {"candidates": 1, "n": 3}),
    ("candidates", {"candidates": 3, "stream": True}),
    ("metadata", {"keeps": {str(n): "a" for n in range(20)}}),
    ("metadata", {"keeps": {"a": "b" * 513}}),
    ("metadata", {"keeps": {"a" * 65: "b"}}),
    ("rid", {"rid": "a\nb"}),
    ("prompt", {"cut": Cut(most=-2)}),
    ("prompt", {"prompts": []}),
    ("input", {"prompts": [Text(text="")], "names": NAMES}),
    ("prompt", {"prompts": [Text(text=5)]}),  # type: ignore[arg-type]
    ("prompt", {"prompts": [Ids(ids=[1, True])]}),
    ("prompt", {"prompts": [Ids(ids=[10**9])]}),
    ("prompt", {"prompts": [Ids(ids=[1 << 70])]}),
    ("prompt", {"prompts": chat({"content": "a"})}),
    ("prompt", {"prompts": chat({"role": "user", "content": 5})}),
    ("prompt", {"prompts": chat({"role": "user", "content": "a"}, input_ids=[])}),
    ("tools", {"prompts": chat({"role": "user"}), "tools": Tools(tools=[{"type": "function"}])}),
    ("tools", {"prompts": chat({"role": "user"}), "tools": Tools(tools=[{"function": {"name": 5}}])}),
]


def test_what_no_request_may_have_is_refused(loose: Loose, loose_server: Harness) -> None:
    """Numbers, types and forms that an adapter lets pass are refused by name, before the engine has them."""
    loose.status = 400
    for param, fields in WRONG:
        loose.made = replace(ONE, **fields)
        reply = loose_server.post("/loose/say", {})
        assert (reply.status_code, reply.json()["param"]) == (400, param), (fields, reply.text)
        assert len(reply.text) < 1000, fields
        assert not loose_server.engine.submits, fields
    loose.made = ONE
    assert loose_server.post("/loose/say", {}).status_code == 200


def test_a_right_request_stays_as_it_is() -> None:
    """What is checked is the same afterwards, whatever there is to say."""
    for request in (
        ONE,
        replace(ONE, prompts=[Ids(ids=[1, 2], tail="a"), Text(text="b", suffix="c")], n=128, logprobs=-1),
        replace(ONE, sampling=Sampling(temperature=0.0, logit_bias={5: 1.0, "6": -1.0}, seed=-1, stop="a")),
        Request(
            prompts=chat({"role": "user", "content": [{"type": "text", "text": "a"}], "more": {"a": [1]}}),
            tools=Tools(tools=[{"type": "function", "function": {"name": "f", "strict": True}, "more": 1}]),
            grammar={"regex": "a"},
            keeps={"a": "b"},
            reply={"a": [1, {"b": None}]},
        ),
    ):
        assert checked(request, "read()") == [request]


def test_an_object_of_a_client_may_hold_whole_numbers_of_any_length() -> None:
    """JSON Schemas do, in grammars and in tools; they are passed on, not copied."""
    schema = {"type": "integer", "maximum": 1 << 70}
    tools = Tools(tools=[{"function": {"name": "f", "parameters": schema}}])
    (made,) = checked([replace(ONE, grammar={"json_schema": schema}, tools=tools)], "read()")
    assert made.grammar["json_schema"] is schema
    assert made.tools == tools


def test_bounds_are_those_of_the_http_api() -> None:
    """A field that bodies have, too, is bounded alike there."""
    for model, names in (
        (ChatRequest, {"n": "n", "priority": "priority"}),
        (CompletionRequest, {"candidates": "best_of"}),
    ):
        properties = model.model_json_schema()["properties"]
        for name, field in names.items():
            [number] = [form for form in properties[field]["anyOf"] if form["type"] == "integer"]
            assert (number["minimum"], number["maximum"]) == OF_REQUEST[name]


STRANGE: list[tuple[Any, str]] = [
    *[
        (made, f"returned {made!r}; possible: a Request, or a list of them")
        for made in (None, [], "abc", {"a": 1}, [None])
    ],
    ([ONE, None], "possible: a Request, or a list of them"),
    ((ONE,), "possible: a Request, or a list of them"),
    (replace(ONE, reply={"a": object()}), "an object in reply (Encoding objects of type object is unsupported)"),
    (replace(ONE, grammar={"regex": {1, object()}}), "an object in grammar"),
    (replace(ONE, names=None), "whose names is None; possible: a Names"),  # type: ignore[arg-type]
    (replace(ONE, names={"prompt": "a"}), "whose names is {'prompt': 'a'}"),  # type: ignore[arg-type]
    (replace(ONE, names=Names(prompt=5)), "Expected `str`, got `int` - at `$.prompt`"),  # type: ignore[arg-type]
    (replace(ONE, names=Names(renamed=None)), "at `$.renamed`"),  # type: ignore[arg-type]
    (replace(ONE, names=Names(renamed={"a": 5})), "at `$.renamed[...]`"),  # type: ignore[dict-item]
    (replace(ONE, sampling=None), "whose sampling is None; possible: a Sampling"),  # type: ignore[arg-type]
    (replace(ONE, tools=[]), "whose tools is []; possible: a Tools, or None"),  # type: ignore[arg-type]
    (replace(ONE, cut=5), "whose cut is 5; possible: a Cut, or None"),  # type: ignore[arg-type]
    (replace(ONE, prompts="abc"), "whose prompts is 'abc'; possible: a list of Chat, Text and Ids"),  # type: ignore[arg-type]
    (replace(ONE, prompts=["abc"]), "whose prompts is ['abc']"),  # type: ignore[list-item]
    (replace(ONE, dropped=None), "whose dropped is None; possible: a list of Dropped"),  # type: ignore[arg-type]
    (replace(ONE, dropped=["web"]), "whose dropped is ['web']"),  # type: ignore[list-item]
]


def test_what_is_no_request_is_told_by_package_field_and_what_is_possible(
    loose: Loose, loose_server: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader that returns something else gets a 500 that says what it was, and so does the log."""
    loose.status = 500
    for made, why in STRANGE:
        loose.made = made
        caplog.clear()
        with caplog.at_level(logging.ERROR, "dovetail.server"):
            reply = loose_server.post("/loose/say", {})
        assert reply.status_code == 500
        text = reply.json()["loose"]
        assert text.startswith(f"{WHO}: /loose/say: read() returned "), text
        assert why in text
        assert "; possible: " in text
        assert why in caplog.text
    loose.made = ONE
    assert loose_server.post("/loose/say", {}).status_code == 200


def test_prompts_of_a_body_want_some_things_alike(loose: Loose, loose_server: Harness) -> None:
    """Only the first request's model, stream and metadata could be used, so that others are refused by name."""
    loose.status = 400
    for name, value in {"stream": True, "model": "tiny-too", "keeps": {}}.items():
        loose.made = [ONE, replace(ONE, **{name: value})]
        reply = loose_server.post("/loose/say", {})
        assert (reply.status_code, reply.json()["param"]) == (400, name)


def test_prompts_have_identifiers_of_their_own(loose: Loose, loose_server: Harness) -> None:
    """Requests of one body that claim one identifier are refused: the server counts by it."""
    loose.status = 400
    for other in ("a", "a#0"):
        loose.made = [replace(ONE, rid="a", n=2 if other == "a#0" else 1), replace(ONE, rid=other)]
        reply = loose_server.post("/loose/say", {})
        assert (reply.status_code, reply.json()["param"]) == (400, "rid")
    assert loose_server.state.num_live == 0


@pytest.mark.parametrize(
    "change",
    [{"param": 5}, {"code": [1]}, {"message": b"x"}, {"message": "\ud800"}, {"status": 200}, {"status": 400.5}],
)
def test_a_refusal_that_cannot_be_told_is_the_packages_fault(
    change: dict[str, Any], strange: Strange, strange_server: Harness
) -> None:
    """Its parts are what a client, a batch's line and another process are sent."""

    def refuses() -> Any:
        error = RequestError("no")
        for name, value in change.items():
            setattr(error, name, value)
        raise error

    strange.made = refuses
    told = strange_server.post("/loose/say", {}).json()["error"]
    assert told["code"] == "plugin_failed"
    assert told["message"].startswith(f"{WHO}: /loose/say: read() raised a RequestError that cannot be told: ")


def test_names_that_are_no_regular_expression_are_told(
    strange: Strange, strange_server: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first request, also one that is served: refusals would otherwise be 500 one day."""
    strange.made = replace(ONE, names=Names(renamed={"a(": "b"}))
    with caplog.at_level(logging.ERROR, "dovetail.server"):
        assert strange_server.post("/loose/say", {}).status_code == 500
    assert f"{WHO}: /loose/say: read() returned a Request whose names are Names(" in caplog.text
    assert "missing ), unterminated subpattern" in caplog.text
