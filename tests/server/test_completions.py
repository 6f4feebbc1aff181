"""`/v1/completions`: golden exchanges, every prompt form, echo, logprobs, `best_of`, streams."""

from __future__ import annotations

from typing import Any

import pytest
from exchanges import error_of, events
from harness import Harness


def complete(harness: Harness, **fields: Any) -> dict[str, Any]:
    reply = harness.post("/v1/completions", {"model": "tiny", "prompt": "abc", **fields})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def stream(harness: Harness, **fields: Any) -> list[dict[str, Any]]:
    return events(harness.post("/v1/completions", {"model": "tiny", "prompt": "abc", "stream": True, **fields}))


def test_golden_reply(harness: Harness) -> None:
    """A full reply has exactly these parts."""
    body = complete(harness)
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body.pop("system_fingerprint").startswith("fp_")
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "Hello, world",
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": harness.engine.eos,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 13,
            "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 0},
            "reasoning_tokens": 0,
        },
    }
    assert harness.engine.submits[-1].params.max_tokens == 16


def test_golden_stream(harness: Harness) -> None:
    """A stream is: deltas, finish, usage when asked, `[DONE]`."""
    chunks = stream(harness, max_tokens=2, stream_options={"include_usage": True})
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "text": "H", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "e", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "matched_stop": None}],
        [],
    ]
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert chunks[0]["usage"] is None


@pytest.mark.parametrize("prompt", ["abc", [64, 65, 66], ["abc", "de"], [[64, 65, 66], [67]]])
def test_streamed_equals_full_for_every_prompt_form(harness: Harness, prompt: Any) -> None:
    """Strings, token ids and lists of either give the same choices, streamed or not, in the prompts' order."""
    fields = {"prompt": prompt, "n": 2, "echo": True, "logprobs": 2, "stop": ["wor"]}
    full = complete(harness, **fields)["choices"]
    chunks = [choice for chunk in stream(harness, **fields) for choice in chunk["choices"]]
    assert len(full) == (2 if isinstance(prompt, str) or isinstance(prompt[0], int) else 4)
    for choice in full:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        assert (own[-1]["finish_reason"], own[-1]["matched_stop"]) == ("stop", "wor")
        for name, values in choice["logprobs"].items():
            assert [v for chunk in own if chunk["logprobs"] for v in chunk["logprobs"][name]] == values
    assert full[0]["text"] == "abcHello, "
    assert "".join(full[0]["logprobs"]["tokens"]).startswith("abcHello, ")


def test_echo_with_logprobs_scores_the_prompt(harness: Harness) -> None:
    """Prompt tokens come first, the very first without a value; `max_tokens: 0` returns them alone."""
    choice = complete(harness, echo=True, logprobs=1, max_tokens=0)["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["finish_reason"] == "length"
    choice = complete(harness, echo=True, logprobs=1, max_tokens=2)["choices"][0]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


def test_best_of_returns_the_most_likely(harness: Harness) -> None:
    """`best_of` generates more than it returns, all of which counts as usage."""
    body = complete(harness, best_of=3, n=1)
    assert len(body["choices"]) == 1
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 39
    assert body["usage"]["prompt_tokens"] == 3


def test_token_ids_and_prompt_logprobs(harness: Harness) -> None:
    """`return_token_ids` and `prompt_logprobs` add their fields to each choice."""
    choice = complete(harness, return_token_ids=True, prompt_logprobs=0, max_tokens=2)["choices"][0]
    assert choice["prompt_token_ids"] == [64, 65, 66]
    assert harness.tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == "He"
    assert [None if row is None else list(row) for row in choice["prompt_logprobs"]] == [None, ["65"], ["66"]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "n": 1, "stream": True}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt[1][0]"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_bad_requests(harness: Harness, fields: dict[str, Any], param: str) -> None:
    """What cannot be served is a 400 that names the field."""
    reply = harness.post("/v1/completions", {"model": "tiny", "prompt": "abc", **fields})
    assert reply.status_code == 400
    assert error_of(reply)["param"] == param
    assert not harness.engine.submits
