"""Named, allowed and banned tokens, and scores of labels, over HTTP with the demo model."""

from __future__ import annotations

import math
from typing import Any

import pytest
from served import Served

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


def ids_of(served: Served, text: str) -> list[int]:
    return served.text.tokenizer.encode(text, add_special_tokens=False)


def ask(served: Served, path: str = CHAT, **body: Any) -> dict[str, Any]:
    sent = {"messages": QUESTION} if path == CHAT else {"prompt": "The capital of France is"} if path == PLAIN else {}
    reply = served.post(path, **{**sent, **({} if path == "/generate" else {"temperature": 0}), **body})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def refused(served: Served, path: str, **body: Any) -> dict[str, Any]:
    sent = {"messages": QUESTION} if path == CHAT else {"prompt": "a"} if path == PLAIN else {}
    reply = served.post(path, **{**sent, **body})
    assert reply.status_code == 400, reply.text
    found: dict[str, Any] = reply.json()["error"]
    return found


def test_bad_words_are_not_said(served: Served) -> None:
    """Wherever the word would stand; on all three routes that generate from a prompt."""
    assert "Paris" in ask(served)["choices"][0]["message"]["content"]
    assert "Paris" not in ask(served, bad_words=["Paris"])["choices"][0]["message"]["content"]
    assert "Paris" not in ask(served, PLAIN, bad_words=["Paris"])["choices"][0]["text"]
    params = {"temperature": 0, "bad_words": ["Paris"], "max_new_tokens": 12}
    assert "Paris" not in ask(served, "/generate", text="The capital of France is", sampling_params=params)["text"]


def test_only_allowed_tokens_are_said(served: Served) -> None:
    """A classifier by two tokens; ids that are none are refused."""
    yes, no = ids_of(served, "Yes")[0], ids_of(served, "No")[0]
    found = ask(served, PLAIN, allowed_token_ids=[yes, no], max_tokens=5, return_token_ids=True)["choices"][0]
    assert set(found["token_ids"]) <= {yes, no}
    assert refused(served, PLAIN, allowed_token_ids=[10**6])["code"] == "invalid_token_id"
    assert refused(served, CHAT, allowed_token_ids=[])["param"] == "allowed_token_ids"


def test_named_tokens_stand_behind_the_most_likely(served: Served) -> None:
    """`logprob_token_ids` in OpenAI's forms, whole and streamed."""
    named = ids_of(served, " Paris")[0]
    text = served.text.tokenizer.token_text(named)
    rows = ask(served, logprobs=True, top_logprobs=2, logprob_token_ids=[named], max_tokens=3)["choices"][0]["logprobs"]
    assert [len(row["top_logprobs"]) for row in rows["content"]] == [3, 3, 3]
    assert {row["top_logprobs"][2]["token"] for row in rows["content"]} == {text}
    found = ask(served, PLAIN, logprobs=0, logprob_token_ids=[named], max_tokens=3)["choices"][0]["logprobs"]
    assert all(text in row for row in found["top_logprobs"])
    assert refused(served, CHAT, logprob_token_ids=[named])["param"] == "logprob_token_ids"
    assert refused(served, PLAIN, logprobs=1, logprob_token_ids=[10**6])["code"] == "invalid_token_id"


def test_named_tokens_of_generate(served: Served) -> None:
    """`token_ids_logprob`: rows for the prompt and the reply; one list for all prompts, or one for each."""
    named = ids_of(served, " Paris")[:1] + ids_of(served, " Rome")[:1]
    base = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    meta = ask(served, "/generate", text="The capital of", token_ids_logprob=named, **base)["meta_info"]
    assert [[row[1] for row in place] for place in meta["output_token_ids_logprobs"]] == [named, named]
    assert meta["input_token_ids_logprobs"][0] is None
    assert [row[1] for row in meta["input_token_ids_logprobs"][1]] == named
    both: Any = ask(served, "/generate", text=["a", "b"], token_ids_logprob=[named, None], **base)
    assert "output_token_ids_logprobs" in both[0]["meta_info"]
    assert "output_token_ids_logprobs" not in both[1]["meta_info"]
    error = refused(served, "/generate", text="a", token_ids_logprob=named)
    assert "return_logprob" in error["message"]
    assert refused(served, "/generate", text=["a", "b"], token_ids_logprob=[named], **base)["param"]


def test_all_log_probabilities_only_where_the_server_gives_them(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`top_logprobs: -1` is refused with the flag that allows it; with that flag the whole vocabulary comes."""
    for path, fields in (
        (CHAT, {"logprobs": True, "top_logprobs": -1}),
        (CHAT, {"logprobs": True, "top_logprobs": 21}),
        (PLAIN, {"logprobs": -1}),
        (PLAIN, {"prompt_logprobs": -1}),
        ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 21}),
    ):
        assert "--max-logprobs" in refused(served, path, **fields)["message"]
    import dataclasses

    limits = dataclasses.replace(served.text.limits, max_logprobs=-1)
    monkeypatch.setattr(served.text, "limits", limits)
    [row] = ask(served, logprobs=True, top_logprobs=-1, max_tokens=1)["choices"][0]["logprobs"]["content"]
    assert len(row["top_logprobs"]) == limits.vocab_size
    assert math.isclose(sum(math.exp(item["logprob"]) for item in row["top_logprobs"]), 1, abs_tol=1e-3)


def test_a_chat_reply_may_begin_with_the_last_message(served: Served) -> None:
    """`echo` puts the assistant's message before its continuation, whole and streamed; a user's is none of it."""
    going = {"messages": [*QUESTION, {"role": "assistant", "content": "The capital"}], "continue_final_message": True}
    body = {**going, "add_generation_prompt": False, "max_tokens": 8}
    plain = ask(served, **body)["choices"][0]["message"]["content"]
    assert ask(served, **body, echo=True)["choices"][0]["message"]["content"] == "The capital" + plain
    import json

    reply = served.post(CHAT, **body, temperature=0, echo=True, stream=True)
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert "".join(c["delta"].get("content") or "" for k in chunks for c in k["choices"]) == "The capital" + plain
    assert ask(served, echo=True)["choices"][0]["message"] == ask(served)["choices"][0]["message"]


def test_labels_are_scored_behind_each_item(served: Served) -> None:
    """Scores are the model's probabilities of the labels; with softmax they add up to 1; order of the parts holds."""
    labels = [ids_of(served, " Paris")[0], ids_of(served, " Rome")[0]]
    body = {"query": "The capital of", "items": [" France is", " Italy is"], "label_token_ids": labels}
    found = served.post("/v1/score", **body, return_token_logprobs=True).json()
    assert found["object"] == "scoring"
    assert len(found["scores"]) == 2
    assert found["scores"][0][0] > found["scores"][0][1]
    assert found["scores"][1][1] > found["scores"][1][0]
    for row, logs in zip(found["scores"], found["token_logprobs"], strict=True):
        assert row == pytest.approx([math.exp(value) for value in logs])
    direct = ask(
        served,
        "/generate",
        text="The capital of France is",
        return_logprob=True,
        token_ids_logprob=labels,
        sampling_params={"max_new_tokens": 1, "temperature": 0},
    )["meta_info"]["output_token_ids_logprobs"][0]
    assert [item[0] for item in direct] == pytest.approx(found["token_logprobs"][0], abs=0.05)
    weighed = served.post("/v1/score", **body, apply_softmax=True, temperature=2).json()["scores"]
    assert [sum(row) for row in weighed] == pytest.approx([1, 1])
    assert found["usage"]["completion_tokens"] == 0
    ids = {"query": ids_of(served, "a"), "items": [ids_of(served, "b")], "label_token_ids": [labels]}
    assert len(served.post("/v1/score", **ids, item_first=True).json()["scores"][0]) == 2


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"label_token_ids": [10**6]}, "label_token_ids"),
        ({"label_token_ids": [[1], [2], [3]]}, "label_token_ids"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"query": [1]}, "items"),
        ({"query": "", "items": ""}, "items[0]"),
        ({"temperature": 2}, "temperature"),
        ({"items": "x " * 6000}, None),
        ({"items": []}, "items"),
        ({"score_extraction_token": "x"}, "score_extraction_token"),
        ({"text_1": "x"}, "text_1"),
    ],
)
def test_what_cannot_be_scored_is_refused(served: Served, change: dict[str, Any], param: str | None) -> None:
    """Each with the field at fault."""
    error = refused(served, "/v1/score", **{"query": "a", "items": ["b", "c"], "label_token_ids": [1], **change})
    assert param is None or error["param"] == param
