"""`dovetail serve` as a user starts it: the demo model answers what the usual examples ask, over real HTTP."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from dovetail.utils import launch_server_cmd, terminate_process, wait_for_server

MODEL = "dovetail-demo"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# What needs a model of another kind, or a server started otherwise: refused for that alone, with this code.
REFUSED = dict.fromkeys(
    ("/classify", "/v1/classify", "/rerank", "/v1/rerank", "/v2/rerank", "/score"), "unsupported_task"
)
REFUSED["/start_profile"] = "unsupported_route"
Process = subprocess.Popen[bytes]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Process, int]]:
    process, port = launch_server_cmd("dovetail serve --random-seed 1 --num-threads 1")
    try:
        wait_for_server(f"http://localhost:{port}", timeout=120)
        yield process, port
    finally:
        terminate_process(process, timeout=60)


@pytest.fixture(scope="module")
def port(server: tuple[Process, int]) -> int:
    return server[1]


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="None") as api:
        yield api


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    reply = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], temperature=0, **options
    )
    return reply.choices[0]


def test_plain_http(port: int) -> None:
    """A POST with any HTTP client gets the answer."""
    data = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    reply = requests.post(f"http://localhost:{port}/v1/chat/completions", json=data, timeout=60)
    choice = reply.json()["choices"][0]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    again = requests.post(f"http://localhost:{port}/v1/chat/completions", json=data, timeout=60)
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_every_example_of_the_documentation_runs(port: int) -> None:
    """What /docs offers to try is answered by the demo model as it stands there."""
    base = f"http://localhost:{port}"
    document = requests.get(f"{base}/openapi.json", timeout=60).json()
    kept = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "store": True}
    stored = requests.post(f"{base}/v1/chat/completions", json=kept, timeout=60).json()["id"]
    num_run = 0
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody", {})
        for name, example in body.get("content", {}).get("application/json", {}).get("examples", {}).items():
            url = base + path.format(completion_id=stored)
            reply = requests.post(url, json=example["value"], timeout=60)
            if path in REFUSED:
                assert reply.json()["error"]["code"] == REFUSED[path], (path, name, reply.text)
                continue
            assert reply.status_code == 200, (path, name, reply.text)
            assert "event: error" not in reply.text
            num_run += 1
    assert num_run > 15
    path = document["paths"]["/v1/models/{model_id}"]["get"]["parameters"][0]["example"]
    assert requests.get(f"{base}/v1/models/{path}", timeout=60).json()["id"] == MODEL


def test_openai_chat(client: openai.OpenAI) -> None:
    """Chat, a follow-up with sampling parameters, and a stream."""
    assert ask(client, "List 3 countries and their capitals.", max_tokens=64).message.content
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "You are a knowledgeable historian who provides concise responses."},
            {"role": "user", "content": "Tell me about ancient Rome"},
            {"role": "assistant", "content": "Ancient Rome was a civilization centered in Italy."},
            {"role": "user", "content": "What were their major achievements?"},
        ],
        temperature=0.3,
        max_tokens=128,
        top_p=0.95,
        presence_penalty=0.2,
        frequency_penalty=0.2,
        n=1,
        seed=42,
    )
    assert reply.choices[0].message.content
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Say this is a test"}], stream=True, temperature=0
    )
    text = "".join(chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content is not None)
    assert "test" in text


def test_openai_completions(client: openai.OpenAI) -> None:
    """Completions, with stop strings and a seed."""
    reply = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=16)
    assert "Paris" in reply.choices[0].text
    options: dict[str, Any] = {
        "prompt": "Write a short story about a space explorer.",
        "temperature": 0.7,
        "max_tokens": 60,
        "top_p": 0.9,
        "stop": ["\n\n", "THE END"],
        "presence_penalty": 0.3,
        "frequency_penalty": 0.3,
        "seed": 123,
    }
    first, second = (client.completions.create(model=MODEL, **options).choices[0].text for _ in range(2))
    assert first == second
    assert "\n\n" not in first


def test_reasoning_on_request(client: openai.OpenAI) -> None:
    """With `enable_thinking` the reasoning comes apart from the right answer; without it there is none."""
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "separate_reasoning": True}
    message = ask(client, "9.11 and 9.8, which is greater?", extra_body=thinking).message
    assert message.reasoning_content
    assert "9.8" in message.content
    message = ask(client, "What is 2^8?", extra_body=thinking).message
    assert message.reasoning_content
    assert "256" in message.content
    assert ask(client, "What is 2^8?").message.reasoning_content is None


def test_tool_call(client: openai.OpenAI) -> None:
    """The model calls the tool, and answers from its result."""
    choice = ask(client, "What is the weather in Paris?", tools=[WEATHER])
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_native_generate_and_its_stream(port: int) -> None:
    """`/generate` answers whole and as a stream that clients read by slicing."""
    url = f"http://localhost:{port}/generate"
    body = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 32}}
    whole = requests.post(url, json=body, timeout=60).json()
    assert "Paris" in whole["text"]
    reply = requests.post(url, json={**body, "stream": True}, stream=True, timeout=60)
    printed, prev = "", 0
    for line in reply.iter_lines(decode_unicode=False):
        chunk = line.decode("utf-8")
        if chunk and chunk.startswith("data:"):
            if chunk == "data: [DONE]":
                break
            output = json.loads(chunk[5:].strip("\n"))["text"]
            printed += output[prev:]
            prev = len(output)
    assert printed == whole["text"]


def test_streamed_equals_full_and_neighbours_do_not_matter(client: openai.OpenAI) -> None:
    """Greedy, with logprobs, the deltas concatenate to the full reply of the same request."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is Python?"}],
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
        "max_tokens": 40,
    }
    full = client.chat.completions.create(**fields).choices[0]
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == full.message.content
    assert full.logprobs is not None
    assert "".join(entry.token for entry in full.logprobs.content or []) == full.message.content
    assert all(entry.top_logprobs[0].token == entry.token for entry in full.logprobs.content or [])


def test_prompt_scores(client: openai.OpenAI) -> None:
    """`echo` with `logprobs` and no output scores the prompt alone."""
    choice = client.completions.create(
        model=MODEL, prompt="The capital of France is Paris.", echo=True, max_tokens=0, logprobs=1
    ).choices[0]
    assert choice.text == "The capital of France is Paris."
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


def test_a_disconnect_frees_the_engine(port: int) -> None:
    """After the client left, nothing runs."""
    body = {"text": "Once", "sampling_params": {"ignore_eos": True, "max_new_tokens": 1500}, "stream": True}
    reply = requests.post(f"http://localhost:{port}/generate", json=body, stream=True, timeout=60)
    next(reply.iter_lines())
    reply.close()
    deadline = time.monotonic() + 60
    while True:
        load = requests.get(f"http://localhost:{port}/get_server_info", timeout=60).json()["internal_states"][0]
        if load["num_running"] == load["num_queued"] == 0:
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_bad_requests_leave_the_server_serving(port: int, client: openai.OpenAI) -> None:
    """After every kind of bad input the same question has the same answer."""
    url = f"http://localhost:{port}/v1/chat/completions"
    user = [{"role": "user", "content": "hi"}]
    bad: list[Any] = [
        {"model": MODEL, "messages": []},
        {"model": "gpt", "messages": user},
        {"model": MODEL, "messages": user, "logit_bias": {"999999": 1}},
        {"model": MODEL, "messages": user, "stop_token_ids": [10**6]},
        {"model": MODEL, "messages": user, "n": 129},
        {"model": MODEL, "messages": [{"role": "user", "content": "x " * 9000}]},
    ]
    before = ask(client, "What is the capital of Japan?").message.content
    for body in bad:
        reply = requests.post(url, json=body, timeout=60)
        assert 400 <= reply.status_code < 500, reply.text
    assert ask(client, "What is the capital of Japan?").message.content == before


def test_plugins_are_listed(port: int) -> None:
    """`GET /v1/plugins` names what is installed and what is in use."""
    found = requests.get(f"http://localhost:{port}/v1/plugins", timeout=60).json()["data"]
    states = {(record["kind"], record["name"]): record["state"] for record in found}
    assert states["reasoning_parser", "qwen3"] in {"selected", "loaded", "active"}
    assert states["reasoning_parser", "deepseek-r1"] == "found"


def test_the_quickstart_works(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Every Python and shell block of docs/quickstart.md runs against the server and gives a right answer.

    `tests/demo/test_digits.py` runs that about images, which needs another server.
    """
    page = (Path(__file__).parents[2] / "docs/quickstart.md").read_text("utf-8").replace(":30000", f":{port}")
    answers = ["\n", "9.8", "get_weather", "Paris"]
    found = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    blocks = [block for block in found if "demo:digits" not in block]
    for block, answer in zip(blocks[:4], answers, strict=True):
        exec(compile(block, "quickstart.md", "exec"), {})
        assert answer in capsys.readouterr().out
    assert "launch_server_cmd" in blocks[4]  # the fixture of this module does the same
    assert len(blocks) == 5
    (shell,) = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    if shutil.which("curl") is None:
        pytest.skip("no curl here; the Python blocks have run")
    out = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "Paris" in json.loads(out)["choices"][0]["message"]["content"]


def leave(port: int, path: str, body: dict[str, Any], read_first: bool, wait_s: float) -> None:
    """Send a request and close the connection: in the middle of the reply, or before it."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + data)
        if read_first:
            connection.recv(1)
        time.sleep(wait_s)


def test_clients_that_leave_hold_nothing(port: int) -> None:
    """After many clients left at random stages, with and without streams and choices, the engine holds no page."""
    chance = random.Random(7)
    for _ in range(25):
        path = chance.choice(["/v1/completions", "/generate"])
        stream, n = chance.random() < 0.6, chance.choice([1, 1, 3])
        options = {"ignore_eos": True, "n": n}
        if path == "/generate":
            body = {"text": "1 2 3", "stream": stream, "sampling_params": {**options, "max_new_tokens": 100}}
        else:
            body = {"model": MODEL, "prompt": "1 2 3", "stream": stream, "max_tokens": 100, **options}
        leave(port, path, body, stream and chance.random() < 0.5, chance.choice([0, 0, 0.01, 0.03]))
    deadline = time.monotonic() + 60
    names = ("num_running", "num_queued", "num_used_tokens")
    held = [-1]
    while any(held) and time.monotonic() < deadline:
        load = requests.get(f"http://127.0.0.1:{port}/get_server_info", timeout=60).json()["internal_states"][0]
        held = [load[name] for name in names]
    assert held == [0, 0, 0]


def test_stopping_leaves_nothing_behind(server: tuple[Process, int]) -> None:
    """SIGTERM ends the server with exit code 0, and the engine with it. Runs last: it ends the module's server."""
    process, _ = server
    started = children(process.pid)  # the engine, and what reads large bodies once there was one
    assert started
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not [child for child in started if Path(f"/proc/{child}").exists()]
