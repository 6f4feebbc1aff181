"""`/generate`, `/tokenize`, `/detokenize`: the native API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from exchanges import error_of, events
from harness import Harness


def generate(harness: Harness, **fields: Any) -> Any:
    reply = harness.post("/generate", fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_golden_reply(harness: Harness) -> None:
    """A reply has text, ids and meta_info; the default length is 128 and the model's sampling defaults stay out."""
    body = generate(harness, text="abc", sampling_params={"temperature": 0, "max_new_tokens": 4}, rid="r1")
    assert body["meta_info"].pop("e2e_latency") >= 0
    assert body == {
        "text": "Hell",
        "output_ids": harness.tokenizer.encode("Hell", add_special_tokens=False),
        "meta_info": {
            "id": "r1",
            "finish_reason": {"type": "length", "length": 4},
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "cached_tokens": 3,
            "reasoning_tokens": 0,
            "num_retractions": 0,
        },
    }
    generate(harness, text="abc")
    params = harness.engine.submits[-1].params
    assert (params.max_tokens, params.temperature, params.top_k) == (128, 1.0, -1)


def test_stop_is_told(harness: Harness) -> None:
    """`finish_reason` says what matched: a token id or a string."""
    assert generate(harness, text="a")["meta_info"]["finish_reason"] == {"type": "stop", "matched": harness.engine.eos}
    body = generate(harness, text="a", sampling_params={"stop": "lo"})
    assert (body["text"], body["meta_info"]["finish_reason"]) == ("Hel", {"type": "stop", "matched": "lo"})
    body = generate(harness, text="a", sampling_params={"stop_regex": ["[kl]o", "never"]})
    assert (body["text"], body["meta_info"]["finish_reason"]) == ("Hel", {"type": "stop", "matched": "lo"})


def test_stream_is_cumulative(harness: Harness) -> None:
    """The usual client, which prints what is new by slicing, sees the whole text."""
    reply = harness.post("/generate", {"text": "abc", "stream": True}, stream=True)
    printed, prev, done = "", 0, False
    for line in reply.iter_lines(decode_unicode=False):
        text = line.decode("utf-8")
        if not text.startswith("data:"):
            continue
        if text == "data: [DONE]":
            done = True
            break
        output = json.loads(text[5:].strip("\n"))["text"]
        printed += output[prev:]
        prev = len(output)
    assert done
    assert printed == "Hello, world"


@pytest.mark.parametrize("per_delta", [1, 4])
def test_last_chunk_of_a_stream_equals_the_full_reply(harness: Harness, per_delta: int) -> None:
    """Streamed or not, batch or not, the result is the same."""
    harness.engine.per_delta = per_delta
    fields = {
        "text": ["abc", "de"],
        "sampling_params": [{"max_new_tokens": 3}, {"n": 2}],
        "return_logprob": True,
        "top_logprobs_num": 1,
        "logprob_start_len": 0,
        "rid": ["x", "y"],
    }
    full = generate(harness, **fields)
    chunks = events(harness.post("/generate", {**fields, "stream": True}))
    last = {chunk["index"]: chunk for chunk in chunks}
    for index, reply in enumerate(full):
        chunk = last[index]
        del chunk["index"], chunk["meta_info"]["e2e_latency"], reply["meta_info"]["e2e_latency"]
        assert chunk == reply
    assert [reply["meta_info"]["id"] for reply in full] == ["x", "y#0", "y#1"]


def test_logprobs(harness: Harness) -> None:
    """Rows are `[logprob, id, text]`, for output always and for the prompt from `logprob_start_len`."""
    params = {"max_new_tokens": 2}
    meta = generate(harness, text="abc", sampling_params=params, return_logprob=True)["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"] == [[-0.25, 39, None], [-0.25, 68, None]]
    assert "output_top_logprobs" not in meta
    fields = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    meta = generate(harness, input_ids=[64, 65, 66], sampling_params=params, **fields)["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.25, 65, "b"], [-0.25, 66, "c"]]
    assert meta["output_top_logprobs"] == [[[-0.25, 39, "H"]], [[-0.25, 68, "e"]]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_token": 1}}, "sampling_params.max_new_token"),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, "regex"),
        ({"text": "a", "sampling_params": {"json_schema": "{}"}}, "json_schema"),
        ({"text": "a", "sampling_params": {"stop_regex": "a*"}}, "stop_regex"),
        ({"text": "a", "sampling_params": {"stop_regex": ["ok", "("]}}, "stop_regex"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [999]}}, "stop_token_ids"),
        ({"input_ids": [999]}, "input_ids"),
        ({"text": "a" * 600}, "text"),
        ({"text": "a", "image_data": "x"}, "image_data"),
    ],
)
def test_bad_requests(harness: Harness, fields: dict[str, Any], param: str) -> None:
    """What cannot be served is a 400 that names the field."""
    reply = harness.post("/generate", fields)
    assert reply.status_code == 400
    assert error_of(reply)["param"] == param
    assert not harness.engine.submits


def test_tokenize_and_back(harness: Harness) -> None:
    """A text survives the round trip; messages are tokenized as the model sees them."""
    ids = harness.post("/tokenize", {"prompt": "héllo"}).json()
    assert ids["count"] == len(ids["tokens"]) == 6
    assert harness.post("/detokenize", {"tokens": ids["tokens"]}).json()["text"] == "héllo"
    messages = [{"role": "user", "content": "hi"}]
    tokens = harness.post("/tokenize", {"messages": messages}).json()["tokens"]
    harness.post("/v1/chat/completions", {"model": "tiny", "messages": messages})
    assert harness.engine.submits[-1].prompt_ids == tokens
    assert harness.post("/detokenize", {"tokens": [999]}).status_code == 400
    assert harness.post("/tokenize", {}).status_code == 400
