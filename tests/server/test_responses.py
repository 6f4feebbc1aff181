"""`/v1/responses` over a real HTTP server whose model says what it is told."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from exchanges import error_of, send_raw
from harness import Harness
from replies import fold_response, response_events, text_of
from response_requests import ALL, TOOL, ask, prompt_of, refused

from dovetail.contracts.errors import EngineDeadError
from dovetail_server.apis.responses.reply import ResponsesWriter
from dovetail_server.apis.responses.schema import ResponsesRequest
from dovetail_server.apis.routes import RESPONSES
from dovetail_server.http.journal import JOURNAL
from dovetail_server.serving import run
from dovetail_testing.replies import FakeStep, play, reply_of


def test_a_plain_answer(harness: Harness) -> None:
    """A text gives one message, and the response echoes what was used."""
    found = ask(harness, "Say hello", instructions="Be brief.", metadata={"k": "v"}, max_output_tokens=50)
    (message,) = found["output"]
    assert (message["type"], message["status"], text_of(message)) == ("message", "completed", "Hello, world")
    assert (found["status"], found["temperature"], found["max_output_tokens"]) == ("completed", 0.6, 50)
    assert found["metadata"] == {"k": "v"}
    assert found["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert found["usage"]["total_tokens"] == found["usage"]["input_tokens"] + 13
    assert prompt_of(harness).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay hello<|im_end|>"
    )


def test_reasoning_text_and_calls_are_items_in_order(thinking: Harness) -> None:
    """The output is reasoning, message and calls; a stream tells the same items, and its deltas add up to them."""
    thinking.text = ALL
    found = ask(thinking, tools=[TOOL])
    kinds = ["reasoning", "message", "function_call", "function_call"]
    texts = ["Where is it?", "Let me look.", '{"city": "Paris"}', '{"city": "Rome"}']
    assert [item["type"] for item in found["output"]] == kinds
    assert [text_of(item) for item in found["output"]] == texts
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] == 14
    assert found["tools"][0]["strict"] is False
    events = response_events(
        thinking.post("/v1/responses", {"model": "tiny", "input": "hi", "tools": [TOOL], "stream": True})
    )
    assert [item["type"] for item in fold_response(events)] == kinds
    assert [item["text"] for item in fold_response(events)] == texts
    last = events[-1]["response"]
    assert [text_of(item) for item in last["output"]] == texts
    assert last["usage"] == found["usage"]


def test_the_order_of_a_streams_events(thinking: Harness) -> None:
    """Each item begins, has its parts and deltas, and ends before the next begins."""
    thinking.text = ALL
    thinking.engine.per_delta = 1000
    body = {"model": "tiny", "input": "hi", "tools": [TOOL], "stream": True, "parallel_tool_calls": False}
    told = [event["type"].removeprefix("response.") for event in response_events(thinking.post("/v1/responses", body))]
    assert [kind for kind, _ in itertools.groupby(told)] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


def test_a_summary_is_the_reasoning_itself(thinking: Harness) -> None:
    """`summary: auto` moves the reasoning into the summary, with the summary's events; `concise` is refused."""
    thinking.text = "<think>\nlong thoughts\n</think>\n\nyes"
    found = ask(thinking, reasoning={"summary": "auto"})
    assert found["output"][0]["summary"] == [{"type": "summary_text", "text": "long thoughts"}]
    assert "content" not in found["output"][0]
    assert found["reasoning"] == {"effort": None, "summary": "auto"}
    body = {"model": "tiny", "input": "hi", "reasoning": {"summary": "detailed"}, "stream": True}
    kinds = [event["type"] for event in response_events(thinking.post("/v1/responses", body))]
    assert "response.reasoning_summary_part.added" in kinds
    assert "response.reasoning_summary_text.done" in kinds
    assert "response.content_part.added" in kinds  # the message's
    assert refused(thinking, reasoning={"summary": "concise"})["param"].startswith("reasoning.summary")


def test_a_reply_can_be_continued_by_id_by_items_and_by_reference(thinking: Harness) -> None:
    """All three ways give the model the same prompt, with its call and the call's result."""
    thinking.text = ALL
    first = ask(thinking, "weather?", tools=[TOOL])
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"} for call in calls]
    thinking.text = "Sunny."
    second = ask(thinking, results, tools=[TOOL], previous_response_id=first["id"])
    prompts = [prompt_of(thinking)]
    assert prompts[0].count("<|im_start|>tool\nsunny") == 2
    ask(thinking, [{"role": "user", "content": "weather?"}, *first["output"], *results], tools=[TOOL])
    prompts.append(prompt_of(thinking))
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    ask(thinking, [{"role": "user", "content": "weather?"}, *references, *results], tools=[TOOL])
    prompts.append(prompt_of(thinking))
    assert len(set(prompts)) == 1
    ask(thinking, "thanks", tools=[TOOL], previous_response_id=second["id"])
    assert prompt_of(thinking).startswith(prompts[0].removesuffix("<|im_start|>assistant\n"))
    assert "Sunny." in prompt_of(thinking)


def test_reasoning_comes_back_from_what_was_encoded(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """A client that keeps only `encrypted_content` gives the model its reasoning back; anything else is refused."""
    from dovetail_parsers.reasoning.think_tags import Qwen3Reasoning

    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }})"
        "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    server = make_harness(reasoning=Qwen3Reasoning(), chat_template=str(template))
    server.text = "<think>\nhm\n</think>\n\nyes"
    found = ask(server, store=False, include=["reasoning.encrypted_content"])
    item = {**found["output"][0], "content": None}
    assert item["encrypted_content"]
    ask(server, [{"role": "user", "content": "hi"}, item, found["output"][1], {"role": "user", "content": "so?"}])
    assert prompt_of(server) == "[user]hi[assistant](hm)yes[user]so?[assistant]"
    bad = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA!"}
    assert refused(server, given=[bad])["param"] == "input[0].encrypted_content"


def test_counting_input_tokens(thinking: Harness) -> None:
    """The count is that of the prompt that a response would have, with what it continues and with its tools."""
    thinking.text = ALL
    first = ask(thinking, "weather?", tools=[TOOL])
    fields = {"tools": [TOOL], "instructions": "Be brief.", "previous_response_id": first["id"]}
    results = [{"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "sunny"}]
    used = ask(thinking, results, **fields)["usage"]["input_tokens"]
    body = {"model": "tiny", "input": results, **fields, "text": {"format": {"type": "text"}}}
    reply = thinking.post("/v1/responses/input_tokens", body)
    assert reply.json() == {"object": "response.input_tokens", "input_tokens": used}
    long = thinking.post("/v1/responses/input_tokens", {"model": "tiny", "input": "x" * 600})
    assert long.json()["input_tokens"] > 600
    bad = thinking.post("/v1/responses/input_tokens", {"model": "tiny", "input": "x", "store": True})
    assert error_of(bad)["param"] == "store"


def test_cut_off_is_incomplete(thinking: Harness) -> None:
    """At `max_output_tokens` the last item and the response are incomplete, whatever was being written."""
    thinking.text = ALL
    for limit, kind in ((5, "reasoning"), (24, "message"), (70, "function_call")):
        found = ask(thinking, tools=[TOOL], max_output_tokens=limit)
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (found["output"][-1]["type"], found["output"][-1]["status"]) == (kind, "incomplete")
        assert [item["status"] for item in found["output"][:-1]] == ["completed"] * (len(found["output"]) - 1)
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 5, "stream": True}
    assert response_events(thinking.post("/v1/responses", body))[-1]["type"] == "response.incomplete"


def test_errors_before_and_in_a_stream(harness: Harness) -> None:
    """Before the first token an error is a status; later it is `response.failed`, and the stream ends."""
    assert refused(harness, 404, model="nope")["code"] == "model_not_found"
    harness.engine.die_after = 3
    events = response_events(harness.post("/v1/responses", {"model": "tiny", "input": "hi", "stream": True}))
    assert events[-1]["type"] == "response.failed"
    assert "engine is gone" in events[-1]["response"]["error"]["message"]


@pytest.mark.parametrize("is_journaled", [False, True])
def test_a_gateway_goes_on_with_a_stream_whose_engine_is_gone(is_journaled: bool) -> None:
    """The response fails and is stored as such, but where a gateway has another server go on: then nothing is told."""
    body = ResponsesRequest(input="hi", stream=True)
    reply = reply_of([RESPONSES.read(body)])
    kept: list[bytes] = []

    async def steps() -> AsyncGenerator[list[FakeStep], None]:
        yield next(play(reply, 0, (1,)))
        raise EngineDeadError("killed")

    async def finish(body: bytes, model: str) -> bool:
        kept.append(body)
        return False

    async def finished(make: Callable[[], bytes]) -> bytes:
        return make()

    async def told() -> bytes:
        JOURNAL.set(object() if is_journaled else None)  # type: ignore[arg-type]
        return b"".join([chunk async for chunk in run.stream(job)])

    generation = SimpleNamespace(steps=steps, finished=finished)
    writer = ResponsesWriter(reply)
    job: Any = SimpleNamespace(generation=generation, reply=reply, writer=writer, keeper=SimpleNamespace(finish=finish))
    if is_journaled:
        with pytest.raises(EngineDeadError):
            asyncio.run(told())
        assert not kept
        return
    last = json.loads(asyncio.run(told()).split(b"data: ")[-1])["response"]
    assert (last["status"], last["error"]["code"], last["store"]) == ("failed", "server_error", False)
    assert json.loads(kept[0])["status"] == "failed"


def test_an_error_after_a_long_wait_is_an_event(make_harness: Callable[..., Harness]) -> None:
    """Once the headers had to go, an error before the first event is one of the API's own."""
    server = make_harness(stream_keep_alive=0.1)
    server.engine.hold.clear()
    body = {"model": "tiny", "input": "hi", "stream": True, "rid": "x"}
    with requests.post(server.base + "/v1/responses", json=body, stream=True, timeout=60) as reply:
        lines = reply.iter_lines(decode_unicode=True)
        assert next(lines).startswith(":")
        assert server.post("/abort_request", {"rid": "x"}).json() == {"aborted": 1}
        rest = [line for line in lines if line and not line.startswith(":")]
    assert rest[0] == "event: error"
    assert json.loads(rest[1][6:])["code"] == "request_aborted"
    assert len(rest) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(harness: Harness, stream: bool) -> None:
    """Nothing runs, and nothing is stored, after the connection was closed; streaming or not."""
    harness.engine.delay_s = 0.01
    harness.text = "x" * 10_000
    body = {"model": "tiny", "input": "hi", "stream": stream}
    before = [submit.rid for submit in harness.engine.submits]
    client = send_raw(harness, "/v1/responses", body)
    harness.eventually(lambda: harness.engine.step > 3)
    client.close()
    harness.eventually(lambda: not harness.engine.live and harness.state.num_live == 0)
    (rid,) = [submit.rid for submit in harness.engine.submits if submit.rid not in before]
    assert harness.engine.aborted == [rid]
    assert harness.get(f"/v1/responses/{rid}").status_code == 404


@pytest.mark.parametrize("per_delta", [1, 3, 1000])
def test_log_probabilities_belong_to_the_text(thinking: Harness, per_delta: int) -> None:
    """Each token of the text has its row, however tokens come; reasoning, markers and calls have none."""
    thinking.text = ALL
    thinking.engine.per_delta = per_delta
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": [TOOL]}
    response = ask(thinking, **fields)
    assert response["top_logprobs"] == 2
    part = response["output"][1]["content"][0]
    assert "".join(row["token"] for row in part["logprobs"]) == part["text"] == "Let me look."
    assert all(len(row["top_logprobs"]) == 2 for row in part["logprobs"])
    events = response_events(thinking.post("/v1/responses", {"model": "tiny", "input": "hi", "stream": True, **fields}))
    rows = [row for event in events if event["type"] == "response.output_text.delta" for row in event["logprobs"]]
    assert rows == part["logprobs"]


class Words:
    """A tokenizer whose tokens are these words."""

    def __init__(self, *words: bytes) -> None:
        self.words = words

    def token_bytes(self, token_id: int) -> bytes:
        return self.words[token_id]


def test_rows_of_tokens_that_are_cut() -> None:
    """A token that is cut by the end of a piece is given once; text that is in no token gets what waits."""
    from dovetail.messages import TokenLogprob
    from dovetail_server.apis.responses.builder import TokenRows

    words = Words(b"think", b"</think>", b"\n\nHel", b"lo w", b"", b"orld", b"\xff", b"end")
    rows = TokenRows(words)  # type: ignore[arg-type]
    rows.add([TokenLogprob(i, -0.5, []) for i in range(6)])
    rows.skip("think")
    assert [row.token_id for row in rows.take("Hello")] == [2, 3]
    assert [row.token_id for row in rows.take(" wor")] == [4, 5]
    assert rows.take("ld") == []
    rows.add([TokenLogprob(i, -0.5, []) for i in (6, 7)])
    rows.skip("nowhere")
    assert [row.token_id for row in rows.take("\ufffdend")] == [6, 7]


def test_truncation_leaves_out_the_oldest_turns(harness: Harness) -> None:
    """With `auto` as few old turns go as let the rest fit; system messages stay; without it the request is refused."""
    harness.engine.context_len = 300
    harness.make_ready()
    turns: list[dict[str, Any]] = [{"role": "system", "content": "KEEP"}]
    for i in range(12):
        turns += [{"role": "user", "content": f"question-{i:02}"}, {"role": "assistant", "content": "answer"}]
    turns.append({"role": "user", "content": "last"})
    try:
        error = refused(harness, given=turns)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
        ask(harness, turns, truncation="auto", max_output_tokens=20)
        prompt = prompt_of(harness)
        assert "KEEP" in prompt
        assert "last" in prompt
        assert "question-00" not in prompt
        first = prompt.index("question-")
        number = int(prompt[first + 9 : first + 11])
        turn = len("<|im_start|>user\nquestion-00<|im_end|>\n<|im_start|>assistant\nanswer<|im_end|>\n") - 2 * 18
        assert len(harness.engine.submits[-1].prompt_ids) + 20 + turn > 300
        assert f"question-{number - 1:02}" not in prompt
        assert refused(harness, given=[{"role": "user", "content": "x" * 400}], truncation="auto")["param"] == "input"
    finally:
        harness.engine.context_len = 512
        harness.make_ready()


def test_sampling_and_service_fields_reach_the_engine(harness: Harness) -> None:
    """Fields mean what they mean in chat requests."""
    found = ask(
        harness,
        temperature=0.3,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=5,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={"3": 1},
        stop=[", w"],
        priority=2,
        cache_salt="s",
        rid="mine",
        user="u",
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="i",
    )
    submit = harness.engine.submits[-1]
    params = submit.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.3, 0.9, 7, 0.1, 5)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (submit.priority, submit.cache_salt, submit.rid) == (2, "s", "mine")
    assert text_of(found["output"][0]) == "Hello"
    assert (found["temperature"], found["top_p"], found["user"]) == (0.3, 0.9, "u")
    ask(harness)
    assert harness.engine.submits[-1].rid.startswith("resp_")


def test_effort_sets_the_templates_switches(thinking: Harness) -> None:
    """`reasoning.effort: none` turns thinking off, as in chat requests."""
    ask(thinking, reasoning={"effort": "none"})
    assert prompt_of(thinking).endswith("<think>\n\n</think>\n\n")
    ask(thinking, reasoning={"effort": "high"})
    assert prompt_of(thinking).endswith("assistant\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": 3}}]}, "tools[0].parameters"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"conversation": "c", "previous_response_id": "resp_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"multi_agent": {"enabled": True}}, "multi_agent"),
        ({"context_management": [{"type": "tokens"}]}, "context_management[0].type"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"reasoning": {"context": "current_turn"}}, "reasoning.context"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["nothing"]}, "include[0]"),
        ({"tools": [{**TOOL, "async": True}]}, "tools[0].async"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"image": {"context_compression": "enabled"}}, "image"),
        ({"background": True, "store": False}, "background"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_what_cannot_be_done_is_refused(thinking: Harness, fields: dict[str, Any], param: str) -> None:
    """Each field that is wrong or not supported is a 400 that names it as the client wrote it."""
    error = refused(thinking, **({"given": fields.pop("input")} if "input" in fields else {}), **fields)
    assert error["param"] == param
    assert "messages" not in error["message"]
    assert "response_format" not in error["message"]


def test_an_empty_list_asks_for_no_compaction(thinking: Harness) -> None:
    """Clients that write every field send it."""
    accepted = {"context_management": [], "max_tool_calls": 0, "multi_agent": {"enabled": False}}
    assert ask(thinking, **accepted, stream_options={"include_usage": True})["status"] == "completed"


def test_item_references_are_bounded(harness: Harness) -> None:
    """Each is a look-up in the database, and a body could hold thirty thousand."""
    items = [{"type": "item_reference", "id": "msg_a"}] * 1025
    reply = harness.post("/v1/responses", {"model": "tiny", "input": items})
    assert reply.status_code == 400
    assert "1024 item references" in error_of(reply)["message"]
