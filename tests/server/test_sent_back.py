"""What clients send back: the messages that their libraries made of a reply are taken, and make the same prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from exchanges import error_of
from grammar_server import WithGrammars
from harness import Harness

CHAT = "/v1/chat/completions"
USER: Any = {"role": "user", "content": "What is the weather in Paris?"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
CALL: Any = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
RESULT: Any = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
PLAIN: Any = {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [CALL]}
TEXT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
RECORDED = json.loads((Path(__file__).parent / "compat" / "sent_back.json").read_text("utf-8"))
"""By library: the assistant's message that it sent behind a call, and the tool's; see `recorded_by` in the file."""


TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
"""Prints whole calls, as many do: what a library keeps in a call would show."""


class Answer(pydantic.BaseModel):
    city: str


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    template = tmp_path_factory.mktemp("template") / "whole_calls.jinja"
    template.write_text(TEMPLATE, "utf-8")
    running = WithGrammars(folder, chat_template=str(template))
    yield running
    running.close()


@pytest.fixture
def thinking(server: Harness) -> Harness:
    server.reset()
    return server


@pytest.fixture
def api(thinking: Harness) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinking.base}/v1", api_key="None", max_retries=0) as client:
        yield client


def prompt_of(harness: Harness, *messages: Any) -> str:
    reply = harness.post(CHAT, {"model": "tiny", "messages": [USER, *messages], "tools": [TOOL]})
    assert reply.status_code == 200, reply.text
    return last_prompt(harness)


def last_prompt(harness: Harness) -> str:
    return harness.tokenizer.decode(harness.engine.submits[-1].prompt_ids, skip_special_tokens=False)


@pytest.mark.parametrize("made_by", ["create", "parse", "stream"])
@pytest.mark.parametrize("is_dumped", [False, True])
def test_messages_of_openais_client_are_sent_back(
    thinking: Harness, api: openai.OpenAI, made_by: str, is_dumped: bool
) -> None:
    """The object itself, and what `model_dump` makes of it: `parsed_arguments` changes no prompt."""
    given: Any = {"model": "tiny", "messages": [USER], "tools": [TOOL]}
    thinking.text = TEXT
    if made_by == "stream":
        with api.chat.completions.stream(**given) as stream:
            message: Any = stream.get_final_completion().choices[0].message
    else:
        message = getattr(api.chat.completions, made_by)(**given).choices[0].message
    call = message.tool_calls[0]
    assert made_by == "create" or call.function.parsed_arguments == {"city": "Paris"}
    sent = message.model_dump(warnings=False) if is_dumped else message
    answer = {**RESULT, "tool_call_id": call.id}
    api.chat.completions.create(model="tiny", messages=[USER, sent, answer], tools=[TOOL])
    found = last_prompt(thinking)
    assert found == prompt_of(thinking, {"role": "assistant", "tool_calls": [{**CALL, "id": call.id}]}, answer)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_parsed_answer_is_sent_back(thinking: Harness, api: openai.OpenAI, is_streamed: bool) -> None:
    """`parsed` holds the user's own object."""
    given: Any = {"model": "tiny", "messages": [USER]}
    thinking.text = '{"city": "Paris"}'
    if is_streamed:
        with api.chat.completions.stream(**given, response_format=Answer) as stream:
            message: Any = stream.get_final_completion().choices[0].message
    else:
        message = api.chat.completions.parse(**given, response_format=Answer).choices[0].message
    assert message.parsed == Answer(city="Paris")
    for sent in (message, message.model_dump(warnings=False)):
        api.chat.completions.create(model="tiny", messages=[USER, sent, USER])
        said = last_prompt(thinking)
        api.chat.completions.create(
            model="tiny", messages=[USER, {"role": "assistant", "content": thinking.text}, USER]
        )
        assert said == last_prompt(thinking)


@pytest.mark.parametrize("library", RECORDED["messages"])
def test_recorded_messages_of_libraries_are_taken(thinking: Harness, library: str) -> None:
    """Each library's message behind a call makes the prompt of the same call, written plainly."""
    sent, result = RECORDED["messages"][library]
    found = prompt_of(thinking, sent, result)
    kept = {key: sent[key] for key in ("role", "content", "reasoning_content", "reasoning") if sent.get(key)}
    call = {**CALL, "function": {**CALL["function"], "name": sent["tool_calls"][0]["function"]["name"]}}
    assert found == prompt_of(thinking, {**kept, "tool_calls": [call]}, {**RESULT, "content": result["content"]})


@pytest.mark.parametrize("library", RECORDED["conversations"])
def test_recorded_conversations_of_libraries_are_taken(thinking: Harness, library: str) -> None:
    """Of a library that writes calls as text."""
    reply = thinking.post(CHAT, {"model": "tiny", "messages": RECORDED["conversations"][library]})
    assert reply.status_code == 200, reply.text


WRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "arguments as an object": (
        {**PLAIN, "tool_calls": [{**CALL, "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]},
        RESULT,
    ),
    "null, where there is nothing": (
        {**PLAIN, "name": None, "audio": None, "function_call": None, "annotations": [], "refusal": None},
        {**RESULT, "name": None},
    ),
    "a call of a stream": (
        {**PLAIN, "tool_calls": [{**CALL, "index": 0, "type": None, "extra_content": {"google": {"x": "y"}}}]},
        RESULT,
    ),
    "thinking as parts": (
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "I look."}], "closed": True}],
            "tool_calls": [CALL],
        },
        RESULT,
    ),
    "thinking that is signed": (
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
            ],
            "tool_calls": [CALL],
        },
        RESULT,
    ),
    "reasoning in detail": (
        {**PLAIN, "reasoning_details": [{"type": "reasoning.text", "text": "I look."}], "thinking_blocks": []},
        RESULT,
    ),
    "a part with fields of its own": (
        PLAIN,
        {**RESULT, "content": [{"type": "text", "text": "sunny", "cache_control": {"type": "ephemeral"}, "index": 0}]},
    ),
    "parts that are texts": (PLAIN, {**RESULT, "content": ["sunny"]}),
    "times and pictures that are none": ({**PLAIN, "timestamp": 1, "images": []}, RESULT),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_other_forms_of_a_message_make_the_same_prompt(thinking: Harness, name: str) -> None:
    """Fields of others are left out, and other forms of the same are read."""
    assert prompt_of(thinking, *WRITTEN[name]) == prompt_of(thinking, PLAIN, RESULT)


def test_a_result_that_is_an_object_is_its_json(thinking: Harness) -> None:
    """As a tool's content only: a user's is refused."""
    found = prompt_of(thinking, PLAIN, {**RESULT, "content": {"sky": "blü"}})
    assert found == prompt_of(thinking, PLAIN, {**RESULT, "content": '{"sky": "blü"}'})
    reply = thinking.post(CHAT, {"messages": [{"role": "user", "content": {"sky": "blue"}}]})
    assert error_of(reply)["param"] == "messages[0].content"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "What is this?", "images": ["aGk="]}, "messages[0].images"),
        ({"role": "user", "content": [{"type": "thinking", "thinking": "I look."}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": 1}]}, "messages[0].content[0].thinking"),
        ({"role": "user", "content": [{"type": "text"}, 1]}, "messages[0].content[1]"),
    ],
)
def test_what_a_prompt_would_lack_is_refused(thinking: Harness, message: Any, param: str) -> None:
    """Pictures, a user's thinking, and what is no part at all."""
    reply = thinking.post(CHAT, {"messages": [message]})
    assert (reply.status_code, error_of(reply)["param"]) == (400, param)


def test_an_echo_of_parts_that_are_texts(thinking: Harness) -> None:
    """The reply begins with them."""
    last = {"role": "assistant", "content": ["The ", {"type": "text", "text": "sky"}]}
    reply = thinking.post(CHAT, {"messages": [USER, last], "echo": True})
    assert reply.json()["choices"][0]["message"]["content"].startswith("The sky")
