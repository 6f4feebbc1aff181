"""The OpenAI and Anthropic clients, unchanged, against `dovetail serve` with the demo model: Responses and Messages."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest
import requests

from dovetail.utils import launch_server_cmd, terminate_process, wait_for_server

MODEL = "dovetail-demo"
FRANCE = "What is the capital of France?"
WEATHER = "What is the weather in Paris?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "parameters": PARAMETERS,
    "strict": True,
}
CLAUDE_TOOL: Any = {"name": "get_weather", "description": TOOL["description"], "input_schema": PARAMETERS}


class Answer(pydantic.BaseModel):
    is_city: bool
    rating: int


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    storage = tmp_path_factory.mktemp("storage")
    process, port = launch_server_cmd(
        f"dovetail serve --random-seed 1 --num-threads 1 --min-free-disk-bytes 0 --file-storage-path {storage}"
    )
    try:
        wait_for_server(f"http://localhost:{port}", timeout=120)
        yield port
    finally:
        terminate_process(process, timeout=60)


@pytest.fixture(scope="module")
def gpt(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="None", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(port: int) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="None", max_retries=0) as client:
        yield client


def test_a_response_and_what_continues_it(gpt: openai.OpenAI) -> None:
    """Create, retrieve, continue by id, list the input, delete."""
    first = gpt.responses.create(model=MODEL, input=FRANCE, instructions="You answer questions.", temperature=0)
    assert "Paris" in first.output_text
    assert gpt.responses.retrieve(first.id).output_text == first.output_text
    given: Any = {"instructions": "You answer questions.", "temperature": 0, "metadata": {"k": "v"}}
    second = gpt.responses.create(model=MODEL, input="And of Japan?", previous_response_id=first.id, **given)
    assert second.metadata == {"k": "v"}
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0
    counted = gpt.responses.input_tokens.count(
        model=MODEL, input="And of Japan?", previous_response_id=first.id, instructions=given["instructions"]
    )
    assert counted.input_tokens == second.usage.input_tokens
    items = gpt.responses.input_items.list(second.id, order="asc")
    assert [item.role for item in items] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    gpt.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="was deleted"):
        gpt.responses.create(model=MODEL, input="x", previous_response_id=first.id)


def test_a_stream_and_the_streaming_helper(gpt: openai.OpenAI) -> None:
    """Events add up to the whole response, in the client's own accumulator too."""
    text = ""
    for event in gpt.responses.create(model=MODEL, input=FRANCE, temperature=0, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
        last = event.type
    assert "Paris" in text
    assert last == "response.completed"
    with gpt.responses.stream(model=MODEL, input=FRANCE, temperature=0) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == text


def test_parsing_into_a_model(gpt: openai.OpenAI) -> None:
    """A pydantic class is a grammar: the answer is one of its objects, whole and streamed."""
    given: Any = {"model": MODEL, "input": "Rate Paris.", "temperature": 0}
    parsed = gpt.responses.parse(**given, text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer)
    with gpt.responses.stream(**given, text_format=Answer) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Answer)


def test_a_tool_and_its_result(gpt: openai.OpenAI) -> None:
    """The model calls, the client answers with the result, and the model reads it; also when forced and streamed."""
    first = gpt.responses.create(model=MODEL, input=WEATHER, tools=[TOOL], temperature=0)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Paris"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"weather": "sunny"}'}
    second = gpt.responses.create(
        model=MODEL, input=[result], previous_response_id=first.id, tools=[TOOL], temperature=0
    )
    assert second.output_text
    history: Any = [{"role": "user", "content": WEATHER}, *first.output, result]
    whole = gpt.responses.create(model=MODEL, input=history, tools=[TOOL], temperature=0, store=False)
    assert whole.output_text == second.output_text
    forced = gpt.responses.create(
        model=MODEL, input="Hi", tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"}
    )
    assert [item.type for item in forced.output] == ["function_call"]
    with gpt.responses.stream(model=MODEL, input=WEATHER, tools=[TOOL], temperature=0) as stream:
        (call,) = [item for item in stream.get_final_response().output if item.type == "function_call"]
    assert call.parsed_arguments == {"city": "Paris"}


def test_reasoning_items(gpt: openai.OpenAI) -> None:
    """With effort the reasoning is an item of its own; `none` has none."""
    given: Any = {"model": MODEL, "input": "What is 2^8?", "temperature": 0}
    found = gpt.responses.create(**given, reasoning={"effort": "high"})
    assert [item.type for item in found.output] == ["reasoning", "message"]
    assert "256" in found.output_text
    assert found.usage is not None
    assert found.usage.output_tokens_details.reasoning_tokens > 0
    assert [item.type for item in gpt.responses.create(**given, reasoning={"effort": "none"}).output] == ["message"]


def test_background_and_cancel(gpt: openai.OpenAI) -> None:
    """A background response is polled; one that is cancelled ends so; its events can be followed."""
    started = gpt.responses.create(model=MODEL, input=FRANCE, temperature=0, background=True)
    assert started.status in ("queued", "in_progress")
    followed = list(gpt.responses.retrieve(started.id, stream=True))
    assert followed[-1].type == "response.completed"
    assert "Paris" in gpt.responses.retrieve(started.id).output_text
    again = list(gpt.responses.retrieve(started.id, stream=True, starting_after=3))
    assert again[0].sequence_number == 4
    slow: Any = {"chat_template_kwargs": {"enable_thinking": True}}
    long = gpt.responses.create(model=MODEL, input="Tell a very long story.", background=True, extra_body=slow)
    assert gpt.responses.cancel(long.id).status in ("cancelled", "completed")


def test_a_batch_of_responses(gpt: openai.OpenAI, tmp_path: Path) -> None:
    """Responses run in batches, too."""
    path = tmp_path / "in.jsonl"
    body = {"model": MODEL, "input": FRANCE, "temperature": 0}
    lines = [{"custom_id": f"r-{i}", "method": "POST", "url": "/v1/responses", "body": body} for i in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with path.open("rb") as file:
        uploaded = gpt.files.create(file=file, purpose="batch")
    batch = gpt.batches.create(input_file_id=uploaded.id, endpoint="/v1/responses", completion_window="24h")
    deadline = time.monotonic() + 60
    while batch.status not in ("completed", "failed"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
        batch = gpt.batches.retrieve(batch.id)
    assert batch.output_file_id is not None
    results = [json.loads(line) for line in gpt.files.content(batch.output_file_id).text.splitlines()]
    assert len(results) == 3
    for result in results:
        assert "Paris" in openai.types.responses.Response.model_validate(result["response"]["body"]).output_text


def test_async_files_and_batches(port: int) -> None:
    """The async client uploads, runs and reads a batch."""

    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="None") as api:
            body = {"model": MODEL, "messages": say(FRANCE), "temperature": 0}
            line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
            uploaded = await api.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
            batch = await api.batches.create(
                input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            async with asyncio.timeout(60):
                while batch.status not in ("completed", "failed"):
                    await asyncio.sleep(0.1)
                    batch = await api.batches.retrieve(batch.id)
            assert batch.output_file_id is not None
            return (await api.files.content(batch.output_file_id)).text

    assert "Paris" in asyncio.run(run())


def test_async_responses(port: int) -> None:
    """Many at once with the async client, whole and streamed."""

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="None") as api:

            async def one(stream: bool) -> str:
                given: Any = {"model": MODEL, "input": FRANCE, "temperature": 0, "store": False}
                if not stream:
                    return (await api.responses.create(**given)).output_text
                async with api.responses.stream(**given) as events:
                    return (await events.get_final_response()).output_text

            return list(await asyncio.gather(*(one(i % 2 == 0) for i in range(8))))

    texts = asyncio.run(ask())
    assert len(set(texts)) == 1
    assert "Paris" in texts[0]


def test_embeddings(gpt: openai.OpenAI) -> None:
    """Vectors of length 1, the same whatever else is asked for with them, and in either encoding."""
    texts = ["What is the capital of France?", "Paris", "A cat"]
    plain = [item.embedding for item in gpt.embeddings.create(model=MODEL, input=texts, encoding_format="float").data]
    assert [sum(x * x for x in vector) for vector in plain] == pytest.approx([1.0] * 3, abs=1e-5)
    for text, vector in zip(texts, plain, strict=True):
        assert gpt.embeddings.create(model=MODEL, input=text).data[0].embedding == pytest.approx(vector, abs=1e-5)
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.embeddings.create(model=MODEL, input="x", dimensions=3)
    assert caught.value.param == "dimensions"


def test_stored_completions(gpt: openai.OpenAI) -> None:
    """Kept, shown, listed, changed and deleted through the client's own methods, which check each reply."""
    asked: Any = {"model": MODEL, "temperature": 0, "store": True, "messages": say(FRANCE)}
    kept = gpt.chat.completions.create(**asked, metadata={"topic": "clients"})
    assert gpt.chat.completions.retrieve(kept.id).choices == kept.choices
    changed = gpt.chat.completions.update(kept.id, metadata={"topic": "others"})
    assert changed.to_dict()["metadata"] == {"topic": "others"}
    listed = gpt.chat.completions.list(metadata={"topic": "others"}, model=MODEL)
    assert [one.id for one in listed] == [kept.id]
    assert [message.content for message in gpt.chat.completions.messages.list(kept.id)] == [FRANCE]
    assert gpt.chat.completions.delete(kept.id).deleted
    with pytest.raises(openai.NotFoundError):
        gpt.chat.completions.retrieve(kept.id)


def test_what_is_not_there(gpt: openai.OpenAI) -> None:
    """Errors arrive as the client's types with our codes."""
    with pytest.raises(openai.NotFoundError):
        gpt.files.retrieve("file-none")
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve("resp_none")


def say(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_a_message_and_its_stream(claude: anthropic.Anthropic) -> None:
    """Whole, as raw events, and through the streaming helper."""
    given: Any = {"model": MODEL, "max_tokens": 60, "temperature": 0, "messages": say(FRANCE)}
    extra: Any = {key: given.pop(key) for key in ("temperature",)}
    found = claude.messages.create(**given, extra_body=extra, system="You answer questions.")
    assert "Paris" in found.content[0].text  # type: ignore[union-attr]
    assert found.stop_reason == "end_turn"
    assert found._request_id
    plain = claude.messages.create(**given, extra_body=extra)
    with claude.messages.stream(**given, extra_body=extra) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == plain.content[0].text  # type: ignore[union-attr]
    assert final.usage.output_tokens == plain.usage.output_tokens


def test_a_messages_tool(claude: anthropic.Anthropic) -> None:
    """The model calls, reads the result, and is made to call; the helper puts the input together."""
    given: Any = {"model": MODEL, "max_tokens": 100, "tools": [CLAUDE_TOOL], "extra_body": {"temperature": 0}}
    found = claude.messages.create(messages=say(WEATHER), **given)
    assert found.stop_reason == "tool_use"
    (call,) = [block for block in found.content if block.type == "tool_use"]
    assert call.input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"weather": "sunny"}'}
    history = [*say(WEATHER), found.to_param(), {"role": "user", "content": [result]}]
    assert claude.messages.create(messages=history, **given).content[0].type == "text"
    forced = claude.messages.create(messages=say("Hi"), tool_choice={"type": "any"}, **given)
    assert forced.content[-1].type == "tool_use"
    with claude.messages.stream(messages=say(WEATHER), **given) as stream:
        (call,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert call.input == {"city": "Paris"}


def test_the_tool_runner(claude: anthropic.Anthropic) -> None:
    """The client's own loop of calls and results runs to the answer."""

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the current weather in a city.

        Args:
            city: Its name.
        """
        return json.dumps({"city": city, "weather": "sunny"})

    runner = claude.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, tools=[get_weather], messages=say(WEATHER), extra_body={"temperature": 0}
    )
    assert [message.content[0].type for message in runner] == ["tool_use", "text"]


def test_thinking_and_its_budget(claude: anthropic.Anthropic) -> None:
    """Thinking comes in a block of its own and is bounded; without it there is none; the count is the prompt's."""
    given: Any = {"model": MODEL, "messages": say("What is 2^8?"), "extra_body": {"temperature": 0}}
    budget: Any = {"type": "enabled", "budget_tokens": 1024}
    found = claude.messages.create(max_tokens=1100, thinking=budget, **given)
    assert [block.type for block in found.content] == ["thinking", "text"]
    assert "256" in found.content[1].text  # type: ignore[union-attr]
    with claude.messages.stream(max_tokens=200, thinking={**budget, "budget_tokens": 2}, **given) as stream:
        short = stream.get_final_message()
    assert [block.type for block in short.content] == ["thinking", "text"]
    assert short.usage.output_tokens_details is not None
    assert short.usage.output_tokens_details.thinking_tokens <= 2
    off = claude.messages.create(max_tokens=100, thinking={"type": "disabled"}, **given)
    assert [block.type for block in off.content] == ["text"]
    count = claude.messages.count_tokens(model=MODEL, messages=say("What is 2^8?"), thinking={"type": "disabled"})
    assert count.input_tokens == off.usage.input_tokens + (off.usage.cache_read_input_tokens or 0)


def test_a_message_as_a_model(claude: anthropic.Anthropic) -> None:
    """`output_config.format` is a grammar."""
    schema = {**Answer.model_json_schema(), "additionalProperties": False}
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    given: Any = {"model": MODEL, "max_tokens": 1000, "messages": say("Rate Paris."), "extra_body": {"temperature": 0}}
    found = claude.messages.create(**given, output_config=config)
    assert Answer.model_validate_json(found.content[0].text)  # type: ignore[union-attr]


def test_anthropics_errors(claude: anthropic.Anthropic) -> None:
    """Errors arrive as the client's types, with the request's id."""
    with pytest.raises(anthropic.NotFoundError, match="served: dovetail-demo") as caught:
        claude.messages.create(model="claude", max_tokens=5, messages=say("Hi"))
    assert caught.value.request_id
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image cannot be read"):
        claude.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": [image]}])


def test_async_messages(port: int) -> None:
    """Many at once with the async client, whole and streamed."""

    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key="None") as api:

            async def one(stream: bool) -> str:
                given: Any = {"model": MODEL, "max_tokens": 40, "messages": say(FRANCE)}
                given["extra_body"] = {"temperature": 0}
                if not stream:
                    return (await api.messages.create(**given)).content[0].text  # type: ignore[union-attr]
                async with api.messages.stream(**given) as events:
                    return await events.get_final_text()

            return list(await asyncio.gather(*(one(i % 2 == 0) for i in range(8))))

    texts = asyncio.run(ask())
    assert len(set(texts)) == 1
    assert "Paris" in texts[0]


def run_example(block: str) -> None:
    """Run a page's example and close its client, whose connection the collector would find within another test."""
    names: dict[str, Any] = {}
    exec(compile(block, "example.md", "exec"), names)
    if "client" in names:
        names["client"].close()


@pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")  # openai-python's
def test_the_examples_of_the_page_run(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python blocks of docs/api.md run as they stand and print what one expects, but for other models'."""
    page = (Path(__file__).parents[2] / "docs/api.md").read_text("utf-8").replace(":30000", f":{port}")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    own = [block for block in blocks if "path/to/" not in block]  # see test_offline_scores
    for block, answers in zip(own, (("Paris", "Tokyo"), ("response.completed",), ("2",)), strict=True):
        run_example(block)
        out = capsys.readouterr().out
        assert all(answer in out for answer in answers), out


def test_the_examples_of_the_clients_page_run(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """So do those of docs/clients.md, one for each client."""
    page = (Path(__file__).parents[2] / "docs/clients.md").read_text("utf-8").replace(":30000", f":{port}")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for block, answers in zip(
        blocks, (("Paris", "Tokyo"), ("256",), ("Hello",), (MODEL, "Paris"), ("Paris",)), strict=True
    ):
        run_example(block)
        out = capsys.readouterr().out
        assert all(answer in out for answer in answers), out


def blocks_of(page: str, language: str, port: int) -> list[str]:
    """Return a page's blocks of one language, with the port of this module's server."""
    text = (Path(__file__).parents[2] / page).read_text("utf-8").replace(":30000", f":{port}")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_request_of_the_readme_is_answered(port: int) -> None:
    """The first request that a visitor copies, by curl."""
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    *_, request = blocks_of("README.md", "bash", port)
    out = subprocess.run(["bash", "-c", request], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "Paris" in json.loads(out)["choices"][0]["message"]["content"]


def test_the_examples_of_the_page_on_structured_outputs_run(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The request is answered by its schema, in full, and the offline examples choose a continent."""
    request, said = blocks_of("docs/structured-outputs.md", "json", port)
    reply = requests.post(f"http://localhost:{port}/v1/chat/completions", json=json.loads(request), timeout=60).json()
    assert json.loads(reply["choices"][0]["message"]["content"])["capital"] == "Paris"
    assert reply["choices"][0]["structured_output"] == json.loads(said)
    for block, answer in zip(
        blocks_of("docs/structured-outputs.md", "python", port),
        ("(Europe|Asia) full", "(Europe|Asia)"),
        strict=True,
    ):
        run_example(block)
        assert re.fullmatch(answer, capsys.readouterr().out.strip())


def test_the_example_of_the_page_on_batches_runs(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its line in a file `requests.jsonl` is a batch whose output is printed."""
    (line,) = blocks_of("docs/batches.md", "json", port)
    (tmp_path / "requests.jsonl").write_text(line, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (block,) = blocks_of("docs/batches.md", "python", port)
    run_example(block)
    (answered,) = [json.loads(each) for each in capsys.readouterr().out.splitlines() if each]
    assert "Paris" in answered["response"]["body"]["choices"][0]["message"]["content"]
