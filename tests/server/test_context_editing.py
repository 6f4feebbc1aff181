"""`context_management` of `/v1/messages`: old results of tools and old thinking are cleared out of the prompt."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types.beta import BetaMessage, BetaMessageTokensCount
from harness import Harness
from replies import message_events, strict

from dovetail_server.apis.messages.editing import PLACEHOLDER, edited
from dovetail_server.apis.messages.schema import MessagesRequest

USES, THOUGHTS = {"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015"}
ALWAYS = {"trigger": {"type": "tool_uses", "value": 0}}


def conversation(num: int) -> list[dict[str, Any]]:
    """Return a question, and so many uses of tools with a thought before each."""
    found: list[dict[str, Any]] = [{"role": "user", "content": "Look at all of it"}]
    for at in range(num):
        call = {"type": "tool_use", "id": f"c{at}", "name": ("look", "find")[at % 2], "input": {"place": f"p{at}"}}
        thought = {"type": "thinking", "thinking": f"thought {at}", "signature": "s"}
        found.append({"role": "assistant", "content": [thought, call]})
        result = {"type": "tool_result", "tool_use_id": f"c{at}", "content": f"result {at} " * 20}
        found.append({"role": "user", "content": [result]})
    return found


def talk(num: int) -> list[dict[str, Any]]:
    """Return as many turns, each with a thought."""
    found: list[dict[str, Any]] = []
    for at in range(num):
        thought = {"type": "thinking", "thinking": f"thought {at}", "signature": "s"}
        text = {"type": "text", "text": f"answer {at}"}
        found += [{"role": "user", "content": f"q{at}"}, {"role": "assistant", "content": [thought, text]}]
    return [*found, {"role": "user", "content": "And?"}]


def edit(messages: list[dict[str, Any]], *edits: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    body = MessagesRequest(messages=messages, max_tokens=9, context_management={"edits": [*edits]})
    before = deepcopy(messages)
    changed, applied = edited(body)
    assert messages == before
    assert applied is not None
    return changed.messages, applied


def results(messages: list[dict[str, Any]]) -> list[str]:
    return [
        block["content"][:8]
        for message in messages
        if isinstance(message["content"], list)
        for block in message["content"]
        if block["type"] == "tool_result"
    ]


def test_old_results_are_cleared_and_the_last_three_stay() -> None:
    """A line stands in their place; calls stay, with their inputs unless they are to go."""
    changed, [told] = edit(conversation(5), {**USES, **ALWAYS})
    assert results(changed) == [PLACEHOLDER[:8]] * 2 + ["result 2", "result 3", "result 4"]
    assert told["cleared_tool_uses"] == 2
    assert told["cleared_input_tokens"] > 50
    assert changed[1] == conversation(5)[1]
    for clears, left in ((True, [{}, {}]), (["find"], [{"place": "p0"}, {}]), ([], [{"place": "p0"}, {"place": "p1"}])):
        changed, _ = edit(conversation(5), {**USES, **ALWAYS, "clear_tool_inputs": clears})
        assert [changed[at]["content"][1]["input"] for at in (1, 3)] == left


@pytest.mark.parametrize(
    ("fields", "num"),
    [
        ({"keep": {"type": "tool_uses", "value": 0}}, 5),
        ({"keep": {"type": "tool_uses", "value": 5}}, 0),
        ({"keep": {"type": "tool_uses", "value": 1}, "exclude_tools": ["look"]}, 2),
        ({"trigger": {"type": "tool_uses", "value": 5}}, 0),
        ({"trigger": {"type": "tool_uses", "value": 4}}, 2),
        ({"trigger": {"type": "input_tokens", "value": 100}}, 2),
        ({"trigger": None}, 0),
        ({"clear_at_least": {"type": "input_tokens", "value": 1000}}, 0),
        ({"clear_at_least": {"type": "input_tokens", "value": 50}}, 2),
    ],
)
def test_what_decides_which_results_go(fields: dict[str, Any], num: int) -> None:
    """When it is time, how many stay, whose stay, and how much has to be won."""
    changed, applied = edit(conversation(5), {**USES, **ALWAYS, **fields})
    assert results(changed).count(PLACEHOLDER[:8]) == num
    assert [told["cleared_tool_uses"] for told in applied] == [num] * bool(num)


def test_thinking_stays_in_the_last_turns() -> None:
    """A turn of the model goes on behind results of tools; what is not to go does not."""
    for keep, gone in ((None, 2), ({"type": "thinking_turns", "value": 2}, 1), ("all", 0), ({"type": "all"}, 0)):
        changed, applied = edit(talk(3), {**THOUGHTS, "keep": keep})
        kinds = [message["content"][0]["type"] for message in changed if message["role"] == "assistant"]
        assert kinds == ["text"] * gone + ["thinking"] * (3 - gone)
        assert [told["cleared_thinking_turns"] for told in applied] == [gone] * bool(gone)
    assert edit(conversation(4), THOUGHTS)[1] == []
    both = [*talk(2)[:-1], *conversation(5)]
    changed, applied = edit(both, THOUGHTS, {**USES, **ALWAYS})
    assert [told["type"] for told in applied] == [THOUGHTS["type"], USES["type"]]
    alone = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [talk(1)[1]["content"][0]]}, *talk(1)]
    assert [message["role"] for message in edit(alone, THOUGHTS)[0]] == ["user", "user", "assistant", "user"]


def test_anthropics_client_is_told(make_harness: Callable[..., Harness]) -> None:
    """Whole, in a stream and where tokens are counted; the prompt has what is left."""
    server = make_harness(context_len=4096)
    client = Anthropic(base_url=server.base, api_key="none")
    asked: Any = {"model": "tiny", "messages": conversation(5), "context_management": {"edits": [{**USES, **ALWAYS}]}}
    whole = client.beta.messages.create(max_tokens=50, **asked)
    with client.beta.messages.stream(max_tokens=50, **asked) as stream:
        streamed = stream.get_final_message()
    client.close()
    for found in (whole, streamed):
        assert found.context_management is not None
        assert found.context_management.applied_edits[0].type == USES["type"]
    prompt = server.tokenizer.decode(server.engine.submits[-1].prompt_ids, skip_special_tokens=False)
    assert prompt.count(PLACEHOLDER) == 2
    assert "result 1" not in prompt
    reply = server.post("/v1/messages", {"max_tokens": 50, **asked})
    strict(BetaMessage, reply.json())
    events = message_events(server.post("/v1/messages", {"max_tokens": 50, "stream": True, **asked}))
    assert events[-2]["context_management"] == reply.json()["context_management"]
    counted = server.post("/v1/messages/count_tokens", asked).json()
    strict(BetaMessageTokensCount, counted)
    assert counted["input_tokens"] == len(server.engine.submits[-1].prompt_ids)
    plain = server.post("/v1/messages/count_tokens", {**asked, "context_management": None}).json()
    assert counted["context_management"]["original_input_tokens"] == plain["input_tokens"]
    asked["context_management"] = {"edits": [{**THOUGHTS, "keep": "all"}]}
    assert server.post("/v1/messages", {"max_tokens": 50, **asked}).json()["context_management"] == {
        "applied_edits": []
    }
