"""The OpenAI Python client, unchanged, against a real server."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from harness import Harness
from openai.types.chat import ChatCompletionMessageParam

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say this is a test"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def client(harness: Harness) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{harness.base}/v1", api_key="None", max_retries=0)


def test_chat(harness: Harness) -> None:
    """A plain reply, with SGLang's extras as extra attributes."""
    with client(harness) as api:
        reply = api.chat.completions.create(model="tiny", messages=USER, temperature=0, max_tokens=64)
    assert reply.choices[0].message.content == "Hello, world"
    assert reply.choices[0].matched_stop == harness.engine.eos  # type: ignore[attr-defined]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_stream(harness: Harness) -> None:
    """The usual loop prints the whole text."""
    with client(harness) as api:
        stream = api.chat.completions.create(model="tiny", messages=USER, stream=True)
        text = "".join(chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content is not None)
    assert text == "Hello, world"


def test_reasoning(thinking: Harness) -> None:
    """`extra_body` reaches the template, and `reasoning_content` is an attribute of the message."""
    thinking.text = "<think>\n9.8 is 9.80.\n</think>\n\n9.8"
    with client(thinking) as api:
        reply = api.chat.completions.create(
            model="tiny",
            messages=USER,
            extra_body={"chat_template_kwargs": {"enable_thinking": True}, "separate_reasoning": True},
        )
    message = reply.choices[0].message
    assert message.reasoning_content == "9.8 is 9.80."  # type: ignore[attr-defined]
    assert message.content == "9.8"


def test_tools_and_the_streaming_helper(thinking: Harness) -> None:
    """The client's own accumulator rebuilds a tool call from the stream."""
    thinking.text = CALL
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    with (
        client(thinking) as api,
        api.chat.completions.stream(
            model="tiny",
            messages=USER,
            tools=tools,  # type: ignore[arg-type]
        ) as stream,
    ):
        final = stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}


def test_completions(harness: Harness) -> None:
    """Whole and streamed."""
    with client(harness) as api:
        reply = api.completions.create(
            model="tiny", prompt="Write", temperature=0.7, max_tokens=150, stop=["\n\n", "world"], seed=123, n=1
        )
        assert reply.choices[0].text == "Hello, "
        stream = api.completions.create(model="tiny", prompt="Write", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, world"


def test_models(harness: Harness) -> None:
    """List and retrieve."""
    with client(harness) as api:
        assert [model.id for model in api.models.list()] == ["tiny", "tiny-too"]
        assert api.models.retrieve("tiny").object == "model"


def test_errors_have_the_clients_types(harness: Harness) -> None:
    """400, 404 and an error in a stream arrive as the client's exceptions."""
    with client(harness) as api:
        with pytest.raises(openai.NotFoundError, match="served: tiny"):
            api.chat.completions.create(model="nope", messages=USER)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            api.chat.completions.create(model="tiny", messages=USER, temperature=-1)
        harness.engine.die_after = 2
        with pytest.raises(openai.APIError, match="engine is gone"):
            list(api.chat.completions.create(model="tiny", messages=USER, stream=True))


def test_async_client(harness: Harness) -> None:
    """Many at once, whole and streamed."""

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{harness.base}/v1", api_key="None", max_retries=0) as api:

            async def one(stream: bool) -> str:
                if not stream:
                    reply = await api.chat.completions.create(model="tiny", messages=USER)
                    return reply.choices[0].message.content or ""
                chunks = await api.chat.completions.create(model="tiny", messages=USER, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            return await asyncio.gather(*(one(i % 2 == 0) for i in range(20)))

    assert asyncio.run(ask()) == ["Hello, world"] * 20
