"""`/v1/chat/completions`: golden exchanges, streams, and every field that changes the output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from exchanges import error_of, events, fold_chat
from harness import Harness

from dovetail_parsers.reasoning.think_tags import Qwen3Reasoning

USER = [{"role": "user", "content": "hi"}]
THINKS = "<think>\nI see.\n</think>\n\nAnswer: ü 😀"
CALLS = (
    'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def chat(harness: Harness, **fields: Any) -> dict[str, Any]:
    reply = harness.post("/v1/chat/completions", {"model": "tiny", "messages": USER, **fields})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def stream(harness: Harness, **fields: Any) -> list[dict[str, Any]]:
    return events(harness.post("/v1/chat/completions", {"model": "tiny", "messages": USER, "stream": True, **fields}))


def prompt_of(harness: Harness) -> str:
    return harness.tokenizer.decode(harness.engine.submits[-1].prompt_ids, skip_special_tokens=False)


def test_golden_reply(harness: Harness) -> None:
    """A full reply has exactly these parts: what clients read unasked is null where it is absent, the rest left out."""
    body = chat(harness)
    head = {key: body.pop(key) for key in ("id", "created", "system_fingerprint")}
    assert head["id"].startswith("chatcmpl-")
    assert head["system_fingerprint"].startswith("fp_")
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello, world",
                    "refusal": None,
                    "reasoning_content": None,
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": harness.engine.eos,
            }
        ],
        "usage": {
            "prompt_tokens": 21,
            "completion_tokens": 13,
            "total_tokens": 34,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 0},
            "reasoning_tokens": 0,
        },
    }


def test_golden_stream(harness: Harness) -> None:
    """A stream is: role, deltas, finish, usage when asked, `[DONE]`; every chunk carries the same head."""
    harness.text = "Hi"
    chunks = stream(harness, stream_options={"include_usage": True})
    heads = [{k: chunk[k] for k in ("id", "object", "created", "model", "system_fingerprint")} for chunk in chunks]
    assert all(head == heads[0] for head in heads)
    assert heads[0]["object"] == "chat.completion.chunk"
    null = {"logprobs": None, "finish_reason": None}
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, **null}],
        [{"index": 0, "delta": {"content": "H"}, **null}],
        [{"index": 0, "delta": {"content": "i"}, **null}],
        [
            {
                "index": 0,
                "delta": {},
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": harness.engine.eos,
            }
        ],
        [],
    ]
    assert [chunk["usage"] is None for chunk in chunks] == [True] * 4 + [False]
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_usage_is_absent_unless_asked_and_in_every_chunk_on_request(harness: Harness) -> None:
    """`include_usage` and `continuous_usage_stats` do what their names say."""
    assert all("usage" not in chunk for chunk in stream(harness))
    chunks = stream(harness, stream_options={"continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 13
    assert all(chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("text", [THINKS, CALLS, THINKS + "\n" + CALLS, "plain", "", "<think>\nnever closed", "ü😀"])
@pytest.mark.parametrize("per_delta", [1, 3, 1000])
def test_streamed_equals_full(thinking: Harness, text: str, per_delta: int) -> None:
    """However tokens are grouped, the deltas concatenate to the full reply."""
    thinking.text = text
    thinking.engine.per_delta = per_delta
    full = chat(thinking, tools=[TOOL])["choices"][0]
    folded = fold_chat(stream(thinking, tools=[TOOL]))[0]
    message = full["message"]
    assert folded["content"] == (message["content"] or "")
    assert folded["reasoning_content"] == (message["reasoning_content"] or "")
    pairs = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in folded["tool_calls"]] == pairs
    assert (folded["finish_reason"], folded["matched_stop"]) == (full["finish_reason"], full["matched_stop"])


def test_reasoning_is_separated_and_counted(thinking: Harness) -> None:
    """Reasoning stands under both names, apart from the content, and its tokens are counted."""
    thinking.text = THINKS
    body = chat(thinking)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("I see.", "Answer: ü 😀")
    assert message["reasoning"] == message["reasoning_content"]
    assert body["usage"]["reasoning_tokens"] == body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_reasoning_options(thinking: Harness) -> None:
    """`separate_reasoning`, `include_reasoning` and `stream_reasoning` each do what they say."""
    thinking.text = THINKS
    message = chat(thinking, separate_reasoning=False)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (None, THINKS)
    message = chat(thinking, include_reasoning=False)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (None, "Answer: ü 😀")
    folded = fold_chat(stream(thinking, include_reasoning=False))[0]
    assert (folded["reasoning_content"], folded["content"]) == ("", "Answer: ü 😀")
    chunks = stream(thinking, stream_reasoning=False)
    pieces = [c["choices"][0]["delta"]["reasoning_content"] for c in chunks if "reasoning" in c["choices"][0]["delta"]]
    assert pieces == ["I see."]


def test_template_switches(thinking: Harness) -> None:
    """`chat_template_kwargs` reach the template; `reasoning_effort` sets its switches, explicit ones win."""
    closed = "<think>\n\n</think>\n\n"
    chat(thinking)
    assert closed not in prompt_of(thinking)
    chat(thinking, chat_template_kwargs={"enable_thinking": False})
    assert prompt_of(thinking).endswith(closed)
    chat(thinking, reasoning_effort="none")
    assert prompt_of(thinking).endswith(closed)
    chat(thinking, reasoning_effort="low")
    assert closed not in prompt_of(thinking)
    chat(thinking, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert closed not in prompt_of(thinking)


def test_tool_calls(thinking: Harness) -> None:
    """Calls are parsed, carry ids but no index, and end the reply with `tool_calls`."""
    thinking.text = CALLS
    choice = chat(thinking, tools=[TOOL])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    calls = choice["message"]["tool_calls"]
    assert [set(call) for call in calls] == [{"id", "type", "function"}] * 2
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    assert len({call["id"] for call in calls}) == 2
    assert "get_weather" in prompt_of(thinking)


def test_tool_choice(thinking: Harness, harness: Harness) -> None:
    """`none` hides the tools; what cannot be enforced is refused with the reason."""
    thinking.text = CALLS
    choice = chat(thinking, tools=[TOOL], tool_choice="none")["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert "get_weather" not in prompt_of(thinking)
    named = {"type": "function", "function": {"name": "get_weather"}}
    for value in ("required", named):
        reply = thinking.post(
            "/v1/chat/completions", {"model": "tiny", "messages": USER, "tools": [TOOL], "tool_choice": value}
        )
        assert reply.status_code == 400
        assert "grammar backend" in error_of(reply)["message"]
    reply = harness.post("/v1/chat/completions", {"model": "tiny", "messages": USER, "tools": [TOOL]})
    assert reply.status_code == 400
    assert "--tool-call-parser" in error_of(reply)["message"]


def test_parallel_tool_calls_false_keeps_the_first(thinking: Harness) -> None:
    """The limit is enforced by dropping later calls, in both forms of reply."""
    thinking.text = CALLS
    calls = chat(thinking, tools=[TOOL], parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]
    assert len(calls) == 1
    assert len(fold_chat(stream(thinking, tools=[TOOL], parallel_tool_calls=False))[0]["tool_calls"]) == 1


def test_deprecated_functions(thinking: Harness) -> None:
    """`functions` are mapped to tools, and the reply uses the old form too."""
    thinking.text = CALLS
    fields = {"functions": [TOOL["function"]], "function_call": "auto"}
    choice = chat(thinking, **fields)["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"]["name"] == "get_weather"
    chunks = stream(thinking, **fields)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if "function_call" in choice["delta"]]
    assert deltas[0]["function_call"]["name"] == "get_weather"


def test_choices_have_their_own_seeds_and_order(harness: Harness) -> None:
    """`n` choices come in order, the first with the request's seed, the others with seeds derived from it."""
    body = chat(harness, n=3, seed=7)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == 21
    assert body["usage"]["completion_tokens"] == 39
    seeds = [submit.params.seed for submit in harness.engine.submits]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    chat(harness, n=3, seed=7)
    assert [submit.params.seed for submit in harness.engine.submits[3:]] == seeds
    folded = fold_chat(stream(harness, n=3))
    assert {i: choice["content"] for i, choice in folded.items()} == dict.fromkeys(range(3), "Hello, world")


def test_sampling_parameters_reach_the_engine(harness: Harness) -> None:
    """Every parameter arrives as sent; what is left out comes from the model's generation config."""
    chat(harness)
    params = harness.engine.submits[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 1.0, 512 - 21)
    chat(
        harness,
        temperature=0,
        top_p=0.5,
        top_k=0,
        min_p=0.1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.1,
        min_tokens=2,
        max_completion_tokens=9,
        stop_token_ids=[5],
        ignore_eos=True,
        logit_bias={"3": 1000},
        seed=-1,
        priority=4,
        cache_salt="salt",
        rid="mine",
    )
    submit = harness.engine.submits[-1]
    params = submit.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.5, -1, 0.1)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (params.min_tokens, params.max_tokens, params.stop_token_ids, params.ignore_eos) == (2, 9, (5,), True)
    assert params.logit_bias == {3: 100.0}
    assert params.seed == (1 << 63) - 1
    assert (submit.priority, submit.cache_salt, submit.rid) == (4, "salt", "mine")
    chat(harness, top_p=0)
    assert harness.engine.submits[-1].params.temperature == 0


def test_stop_strings_end_the_reply_and_abort_the_engine(harness: Harness) -> None:
    """The text ends before the match, `matched_stop` names it, and the engine's request is aborted."""
    body = chat(harness, stop=[", w", "zzz"])
    choice = body["choices"][0]
    assert choice["message"]["content"] == "Hello"
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", ", w")
    assert body["usage"]["completion_tokens"] == 8
    assert len(harness.engine.aborted) == 1
    assert chat(harness, stop="lo", no_stop_trim=True)["choices"][0]["message"]["content"] == "Hello"
    folded = fold_chat(stream(harness, stop=[", w"]))[0]
    assert (folded["content"], folded["matched_stop"]) == ("Hello", ", w")


def test_length_ends_the_reply(harness: Harness) -> None:
    """`max_tokens` cuts, with `finish_reason` `length` and no matched stop."""
    choice = chat(harness, max_tokens=4)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["matched_stop"]) == ("Hell", "length", None)


def test_logprobs(harness: Harness) -> None:
    """Each token of the text has its entry with bytes and rivals, streamed or not; the stop token has none."""
    content = chat(harness, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "Hello, world"
    assert content[0]["bytes"] == [ord("H")]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)
    chunks = stream(harness, logprobs=True, top_logprobs=2)
    rows = [c["choices"][0]["logprobs"]["content"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for row in rows for entry in row] == content


def test_token_ids_and_prompt_logprobs(harness: Harness) -> None:
    """`return_token_ids` and `prompt_logprobs` add their fields, and only then."""
    body = chat(harness, return_token_ids=True, prompt_logprobs=1)
    assert harness.tokenizer.decode(body["choices"][0]["token_ids"], skip_special_tokens=True) == "Hello, world"
    assert body["prompt_token_ids"] == harness.engine.submits[-1].prompt_ids
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == 21
    chunks = stream(harness, return_token_ids=True)
    ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", [])]
    assert ids == body["choices"][0]["token_ids"]
    assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]


def test_continue_final_message(harness: Harness) -> None:
    """The last message is the beginning of the reply."""
    messages = [*USER, {"role": "assistant", "content": "Once upon"}]
    chat(harness, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert prompt_of(harness).endswith("assistant\nOnce upon")


def test_thinking_that_the_template_hides_is_continued(make_harness: Any, tmp_path: Path) -> None:
    """Open thinking goes on behind the prompt of the reply, and what follows is thinking."""
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    (tmp_path / "t.jinja").write_text(source)
    harness = make_harness(chat_template=str(tmp_path / "t.jinja"), reasoning=Qwen3Reasoning())
    harness.engine.script = lambda _: harness.tokenizer.encode("yes</think>\n\nSo.", add_special_tokens=False)
    messages = [*USER, {"role": "assistant", "content": "", "reasoning_content": "hm, "}]
    message = chat(harness, messages=messages, continue_final_message=True)["choices"][0]["message"]
    assert prompt_of(harness).endswith("[a]<think>\nhm, ")
    assert (message["reasoning_content"], message["content"]) == ("yes", "So.")


def test_content_parts_and_fields_that_change_nothing(harness: Harness) -> None:
    """Text parts are joined by the template's rules, and harmless fields are accepted."""
    chat(
        harness,
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        user="u",
        metadata={"k": "v"},
        store=True,
        service_tier="auto",
        prompt_cache_key="key",
        response_format={"type": "text"},
        modalities=["text"],
        n=None,
        stop=None,
        tools=None,
    )
    assert "a\nb" in prompt_of(harness)


def test_a_reply_can_be_sent_back_as_history(thinking: Harness) -> None:
    """The message of a reply, nulls and all, is a valid message of the next request."""
    thinking.text = THINKS + "\n" + CALLS
    message = chat(thinking, tools=[TOOL])["choices"][0]["message"]
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in message["tool_calls"]]
    chat(thinking, tools=[TOOL], messages=[*USER, message, *answers])
    assert "sunny" in prompt_of(thinking)


def test_request_id_is_echoed_or_made(harness: Harness) -> None:
    """`x-request-id` is the client's if it is harmless, and always there."""
    reply = harness.get("/livez", headers={"x-request-id": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    assert harness.get("/livez", headers={"x-request-id": "x" * 500}).headers["x-request-id"].startswith("req_")
