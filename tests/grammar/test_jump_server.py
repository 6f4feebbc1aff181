"""Jump-forward over HTTP: choices, stops, limits, log probabilities and streams see tokens, however they came."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from grammar_demo import Jump
from served import Served

from dovetail.engine import replies

LETTER = "(Dear Sir|Hello Madam), thank you very much for your letter of [0-9]{2} May[.] We are (happy|sorry) about it"
CHAT = "/v1/chat/completions"
PLAIN = {"regex": LETTER, "seed": 4, "temperature": 1.0}
ASKED = {
    "messages": [{"role": "user", "content": "Write a letter, please."}],
    "chat_template_kwargs": {"enable_thinking": False},
}
COUNTED = {"return_token_ids": True, "max_tokens": 100}


@pytest.fixture(params=[True, False], ids=["jumps", "steps"])
def jumping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, jumps: list[Jump]) -> Iterator[bool]:
    """Run a test with forced tokens taken at once, and with each sampled; the first is seen to happen."""
    if not request.param:
        monkeypatch.setattr(replies, "MIN_JUMP", 1 << 30)
    yield request.param
    assert bool(jumps) is request.param


def chat(served: Served, **body: Any) -> Any:
    """One reply, in full."""
    reply = served.post(CHAT, **{**ASKED, **PLAIN, **COUNTED, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def shown(served: Served, ids: list[int]) -> str:
    """The text of tokens."""
    return served.text.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("fields", "kept", "match"),
    [
        ({"stop": "much for"}, "thank you very ", "much for"),
        ({"stop": ["never there", "ery mu", "much"]}, "thank you v", "ery mu"),
        ({"stop_regex": "m[a-z]+h f"}, "thank you very ", "much f"),
        ({"stop": "?", "stop_regex": "[,] t"}, "", ", t"),
    ],
    ids=["string", "strings", "regex", "both"],
)
@pytest.mark.parametrize("keep", [False, True], ids=["trimmed", "kept"])
def test_a_stop_within_forced_text_ends_the_reply_there(
    served: Served, jumping: bool, fields: dict[str, Any], kept: str, match: str, keep: bool
) -> None:
    """The text ends at the match, and the tokens that count are those up to the one that completed it."""
    reply = chat(served, no_stop_trim=keep, **fields)
    [choice] = reply["choices"]
    text, ids = choice["message"]["content"], choice["token_ids"]
    assert text.endswith(match if keep else kept or ("Sir", "Madam"))
    assert choice["finish_reason"] == "stop"
    assert match in shown(served, ids)
    assert match not in shown(served, ids[:-1])
    assert reply["usage"]["completion_tokens"] == len(ids)
    completion = served.post("/v1/completions", prompt="x", no_stop_trim=keep, **PLAIN, **COUNTED, **fields).json()
    ids = completion["choices"][0]["token_ids"]
    assert completion["choices"][0]["text"].endswith(match if keep else kept or ("Sir", "Madam"))
    assert completion["usage"]["completion_tokens"] == len(ids)
    assert match not in shown(served, ids[:-1])


@pytest.mark.sampled
@pytest.mark.parametrize("max_tokens", [6, 9, 14])
def test_the_length_limit_holds_for_every_choice(served: Served, jumping: bool, max_tokens: int) -> None:
    """Choices that share a prompt are each cut at `max_tokens`, also where the text that is forced goes on."""
    reply = chat(served, n=3, max_tokens=max_tokens)
    assert [len(choice["token_ids"]) for choice in reply["choices"]] == [max_tokens] * 3
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
    assert reply["usage"]["completion_tokens"] == 3 * max_tokens


def test_choices_are_the_same_with_jumps_and_without(
    served: Served, monkeypatch: pytest.MonkeyPatch, jumps: list[Jump]
) -> None:
    """`n` seeded choices: the same texts, ids, ends and usage, streamed or whole; each ends by itself."""
    first = chat(served, n=4)
    assert len({jumped.rid for jumped in jumps}) == 4
    monkeypatch.setattr(replies, "MIN_JUMP", 1 << 30)
    second = chat(served, n=4)
    for reply in (first, second):
        for field in ("id", "created"):
            reply.pop(field)
        reply["usage"].pop("prompt_tokens_details")
    assert first == second
    assert {choice["finish_reason"] for choice in first["choices"]} == {"stop"}
    assert len({choice["message"]["content"] for choice in first["choices"]}) > 1


def test_stop_tokens_within_forced_text(served: Served, jumping: bool) -> None:
    """A stop token that is forced ends the reply, unless `min_tokens` asks for more."""
    [*_, stop] = served.text.tokenizer.encode("thank you very much", add_special_tokens=False)
    short = chat(served, stop_token_ids=[stop])
    [choice] = short["choices"]
    assert choice["message"]["content"].endswith("thank you very")
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)
    assert choice["token_ids"][-1] == stop
    assert short["usage"]["completion_tokens"] == len(choice["token_ids"])
    long = chat(served, stop_token_ids=[stop], min_tokens=len(choice["token_ids"]) + 1)
    assert long["choices"][0]["message"]["content"].endswith("about it")


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 17}, {"stop": "much for", "no_stop_trim": True}], ids=["length", "stop"]
)
def test_every_token_has_its_log_probability(served: Served, jumps: list[Jump], fields: dict[str, Any]) -> None:
    """With `logprobs` nothing is taken without sampling: one entry per token, whose texts are the reply's."""
    reply = chat(served, logprobs=True, top_logprobs=2, n=2, **fields)
    for choice in reply["choices"]:
        rows = choice["logprobs"]["content"]
        assert len(rows) == len(choice["token_ids"])
        assert "".join(row["token"] for row in rows).startswith(choice["message"]["content"])
        assert all(len(row["top_logprobs"]) == 2 for row in rows)
    assert reply["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in reply["choices"])
    body = {"prompt": "x", "logprobs": 1, **PLAIN, **COUNTED, **fields}
    [choice] = served.post("/v1/completions", **body).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    assert not jumps


@pytest.mark.sampled
@pytest.mark.parametrize(
    "fields",
    [{}, {"max_tokens": 13}, {"stop": "much for"}, {"stop_regex": "M[a-z]y", "no_stop_trim": True}, {"n": 3}],
    ids=["whole", "length", "stop", "regex", "choices"],
)
def test_a_stream_adds_up_to_the_reply(served: Served, jumping: bool, fields: dict[str, Any]) -> None:
    """Texts, ids, ends and usage of a stream are those of the reply that is sent whole."""
    body = {"model": "dovetail-demo", **ASKED, **PLAIN, **COUNTED, **fields}
    whole = chat(served, **fields)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = requests.post(served.base + CHAT, json={**body, **options}, timeout=120)
    chunks = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    for wanted in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == wanted["index"]]
        assert "".join(c["delta"].get("content") or "" for c in mine) == wanted["message"]["content"]
        assert [i for c in mine for i in c.get("token_ids") or ()] == wanted["token_ids"]
        assert mine[-1]["finish_reason"] == wanted["finish_reason"]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])


def test_generate_counts_the_same(served: Served, jumping: bool) -> None:
    """`/generate`: the ids that it returns and counts end with the stop string, in a batch too."""
    params = {"regex": LETTER, "seed": 4, "temperature": 1.0, "max_new_tokens": 100, "stop": "very"}
    for reply in served.post("/generate", text=["x", "y"], sampling_params=params).json():
        assert reply["text"].endswith("thank you ")
        assert shown(served, reply["output_ids"]).endswith("very")
        assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"])
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "very"}
