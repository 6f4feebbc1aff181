"""A request of many choices: what they share, how many run at a time, and how many there may be."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from harness import Harness

from dovetail.messages import SamplerParams
from dovetail_server.serving.generation import AT_ONCE

PROMPT = "Say something."


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "n": 16}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "n": 16}),
        ("/generate", {"text": PROMPT, "sampling_params": {"n": 16}}),
    ],
)
def test_choices_share_their_prompt(harness: Harness, path: str, body: dict[str, Any]) -> None:
    """Sixteen choices hold one list of token ids."""
    assert harness.post(path, {"model": "tiny", **body}).status_code == 200
    assert len(harness.engine.submits) == 16
    assert len({id(submit.prompt_ids) for submit in harness.engine.submits}) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "bc", "def"] * 20, "logit_bias": {"5": 1.0}}),
        ("/generate", {"text": ["a", "bc", "def"] * 20, "sampling_params": {"logit_bias": {"5": 1.0}}}),
    ],
)
def test_prompts_share_their_parameters(harness: Harness, path: str, body: dict[str, Any]) -> None:
    """Sixty prompts hold one bias, and are ready to be sent as one."""
    assert harness.post(path, {"model": "tiny", **body}).status_code == 200
    submits = harness.engine.submits
    assert len(submits) == 60
    for name in set(SamplerParams.__struct_fields__) - {"seed"}:
        assert len({id(getattr(submit.params, name)) for submit in submits}) == 1, name


def test_items_of_a_batch_keep_their_own_parameters(harness: Harness) -> None:
    """A list of parameters, starts and log probabilities is not mixed up by what others share."""
    body = {
        "text": ["abc", "abc", "abc", "a"],
        "sampling_params": [{"max_new_tokens": 3}, {"max_new_tokens": 4}, {"max_new_tokens": 3}, {"max_new_tokens": 3}],
        "return_logprob": [False, True, True, True],
        "logprob_start_len": [-1, 0, -1, 2],
    }
    reply = harness.post("/generate", body)
    assert reply.status_code == 200, reply.text
    found = {(s.rid, s.params.max_tokens, s.params.logprobs, s.params.prompt_logprobs) for s in harness.engine.submits}
    by_rid = {item["meta_info"]["id"]: at for at, item in enumerate(reply.json())}
    assert sorted((by_rid[rid], *rest) for rid, *rest in found) == [
        (0, 3, None, None),
        (1, 4, 0, 0),
        (2, 3, 0, None),
        (3, 3, 0, None),
    ]


def test_one_request_gives_the_engine_what_keeps_it_busy(harness: Harness) -> None:
    """Of 1,000 prompts it has as many as it runs and some that wait; all are answered, in their order."""
    harness.engine.hold.clear()
    most = harness.engine.info.max_running_requests + AT_ONCE
    replies: list[Any] = []
    prompts = [f"{i}" for i in range(1000)]

    def ask() -> None:
        replies.append(harness.post("/v1/completions", {"model": "tiny", "prompt": prompts, "echo": True}))

    asking = threading.Thread(target=ask)
    asking.start()
    harness.eventually(lambda: len(harness.engine.live) == most)
    assert harness.get("/livez").status_code == 200
    assert len(harness.engine.live) == most
    harness.engine.hold.set()
    asking.join(60)
    assert [choice["text"] for choice in replies[0].json()["choices"]] == [f"{p}Hello, world" for p in prompts]
    assert len(harness.engine.submits) == 1000


def test_leaving_ends_what_has_not_begun_too(harness: Harness) -> None:
    """An abort ends all choices, those that wait in the server included."""
    harness.engine.hold.clear()
    body = {"model": "tiny", "prompt": ["a"] * 500, "rid": "many"}
    replies: list[Any] = []
    asking = threading.Thread(target=lambda: replies.append(harness.post("/v1/completions", body)))
    asking.start()
    harness.eventually(lambda: bool(harness.engine.live))
    assert harness.post("/abort_request", {"rid": "many"}).status_code == 200
    asking.join(60)
    harness.eventually(lambda: not harness.engine.live and not harness.state.num_live)
    assert replies[0].status_code != 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a"] * 4096, "n": 128}),
        ("/generate", {"text": ["a"] * 4096, "sampling_params": {"n": 128}}),
        ("/v1/completions/render", {"prompt": ["a"] * 4096, "n": 128}),
    ],
)
def test_more_choices_than_fit_are_refused_at_once(harness: Harness, path: str, body: dict[str, Any]) -> None:
    """Half a million choices of 25 KB: a 400 that trying again cannot help, and nothing is made of them."""
    reply = harness.post(path, {"model": "tiny", **body})
    assert reply.status_code == 400
    assert "524288" in reply.text
    assert not harness.engine.submits
