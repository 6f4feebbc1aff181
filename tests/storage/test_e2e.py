"""Batches as users run them: the OpenAI client against `dovetail serve` and the demo model; `dovetail run-batch`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from dovetail.utils import launch_server_cmd, terminate_process, wait_for_server

pytestmark = pytest.mark.usefixtures("light_servers")

NAME = "org/some-model-8b-instruct"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    storage = tmp_path_factory.mktemp("storage")
    command = f"dovetail serve --num-threads 1 --served-model-name {NAME} --file-storage-path {storage}"
    process, port = launch_server_cmd(command + " --min-free-disk-bytes 0")
    try:
        wait_for_server(f"http://localhost:{port}", timeout=120)
        yield port
    finally:
        terminate_process(process, timeout=60)


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="None") as api:
        yield api


def task(number: int, **body: Any) -> dict[str, Any]:
    system = {"role": "system", "content": f"{number}: You answer questions."}
    messages = [system, {"role": "user", "content": "Tell a long story."}]
    body = {"model": NAME, "messages": messages, "max_tokens": 128} | body
    return {"custom_id": f"task-{number}", "method": "POST", "url": "/chat/completions", "body": body}


def submit(client: openai.OpenAI, path: Path, tasks: list[dict[str, Any]]) -> tuple[Any, Any]:
    path.write_text("".join(json.dumps(each) + "\n" for each in tasks))
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
    return uploaded, batch


def poll(client: openai.OpenAI, batch: Any, *ends: str, timeout: float = 60) -> Any:
    deadline = time.monotonic() + timeout
    while batch.status not in ends:
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def test_create_poll_and_read(client: openai.OpenAI, tmp_path: Path) -> None:
    """Two requests go in as a file, their replies come out as one, and the file can be deleted."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    tasks = [task(1, messages=question, temperature=0, max_tokens=50), task(2, max_tokens=50)]
    _, batch = submit(client, tmp_path / "requests.jsonl", tasks)
    assert batch.status == "validating"
    batch = poll(client, batch, "completed", "failed", "cancelled")
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (2, 2, 0)
    text = client.files.content(batch.output_file_id).read().decode("utf-8")
    results = [json.loads(each) for each in text.split("\n") if each.strip()]
    assert [each["custom_id"] for each in results] == ["task-1", "task-2"]
    assert "Paris" in results[0]["response"]["body"]["choices"][0]["message"]["content"]
    assert client.files.delete(batch.output_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(batch.output_file_id)


def test_watching_a_batch(client: openai.OpenAI, tmp_path: Path) -> None:
    """Counts only grow, and files and batches can be listed."""
    uploaded, batch = submit(client, tmp_path / "requests.jsonl", [task(i, max_tokens=24) for i in range(40)])
    seen = []
    while batch.status not in ("completed", "failed"):
        time.sleep(0.05)
        batch = client.batches.retrieve(batch_id=batch.id)
        seen.append(batch.request_counts.completed)
    assert batch.status == "completed"
    assert seen == sorted(seen)
    assert seen[-1] == batch.request_counts.total == 40
    assert batch.input_file_id == uploaded.id
    assert uploaded.id in [file.id for file in client.files.list(purpose="batch")]
    assert batch.id in [each.id for each in client.batches.list(limit=2)]
    assert client.files.retrieve(uploaded.id).filename == "requests.jsonl"


def test_cancel_among_thousands(client: openai.OpenAI, tmp_path: Path) -> None:
    """`cancelling`, then `cancelled` within seconds; the input can be deleted, and the server serves on."""
    uploaded, batch = submit(client, tmp_path / "requests.jsonl", [task(i) for i in range(3000)])
    batch = poll(client, batch, "in_progress")
    time.sleep(1)
    batch = client.batches.cancel(batch_id=batch.id)
    assert batch.status == "cancelling"
    batch = poll(client, batch, "cancelled", "failed")
    assert batch.status == "cancelled"
    assert client.files.delete(uploaded.id).deleted
    found: list[str] = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            found += [json.loads(each)["custom_id"] for each in client.files.content(file_id).text.splitlines()]
    assert sorted(found) == sorted(f"task-{i}" for i in range(3000))
    reply = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
    assert reply.choices[0].message.content is not None


def test_a_bad_file(client: openai.OpenAI, tmp_path: Path) -> None:
    """The client shows what is wrong with the input."""
    _, batch = submit(client, tmp_path / "requests.jsonl", [task(1), task(1), task(2, model="another")])
    batch = poll(client, batch, "failed")
    assert [(e.code, e.line) for e in batch.errors.data] == [("duplicate_custom_id", 2), ("model_mismatch", 3)]


def run_batch(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dovetail_server", "run-batch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def test_run_batch(tmp_path: Path) -> None:
    """Replies and refusals stand in one file in the order of the input; nothing else is left behind."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    tasks = [task(i, model="dovetail-demo", max_tokens=8) for i in range(6)]
    tasks[2]["body"] |= {"temperature": -1}
    tasks[4]["body"] |= {"messages": question, "temperature": 0, "max_tokens": 40}
    source.write_text("\n".join(map(json.dumps, tasks)))
    done = run_batch("-i", str(source), "-o", str(target), "--num-threads", "1", "--min-free-disk-bytes", "0")
    assert done.returncode == 1, done.stderr
    results = [json.loads(each) for each in target.read_text().splitlines()]
    assert [each["custom_id"] for each in results] == [f"task-{i}" for i in range(6)]
    assert [each["response"]["status_code"] for each in results] == [200, 200, 400, 200, 200, 200]
    assert "Paris" in results[4]["response"]["body"]["choices"][0]["message"]["content"]
    assert "6/6" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["-o", "out"], "-i is missing"),
        (["-i", "in.jsonl"], "-o is missing"),
        (["-i", "none.jsonl", "-o", "out"], "no such file"),
        (["-i", "in.jsonl", "-o", "none/out"], "its folder does not exist"),
        (["-i", "in.jsonl", "-o", "out", "--no-such-flag"], "--no-such-flag: unknown option"),
        (["-i", "in.jsonl", "-o"], "-o/--output-file: expected one argument"),
        (["-i", "in.jsonl", "-o", "out"], "the first request cannot be read"),
        (["-i", "other.jsonl", "-o", "out"], "'/v1/moderations' is none of"),
    ],
)
def test_mistakes_of_run_batch(
    arguments: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the cause, exit code 2, before an engine starts."""
    from dovetail_server.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text("{")
    (tmp_path / "other.jsonl").write_text(json.dumps(task(1) | {"url": "/v1/moderations"}))
    assert main(["run-batch", *arguments]) == 2
    error = capsys.readouterr().err
    assert part in error.splitlines()[-1]
    assert not (tmp_path / "out").exists()


NUM_TASKS = 48
"""Several times as many as are done at once, and as are done when the server is killed."""


@pytest.mark.full
def test_a_killed_server_goes_on_with_its_batch(tmp_path: Path) -> None:
    """`kill -9` of `dovetail serve` in the middle; the next start finishes the batch without being asked."""
    command = f"dovetail serve --num-threads 1 --served-model-name {NAME} --file-storage-path {tmp_path / 'storage'}"
    command += " --min-free-disk-bytes 0 --max-batch-requests 8"
    batch = None
    for attempt in range(2):
        process, port = launch_server_cmd(command)
        try:
            wait_for_server(f"http://localhost:{port}", timeout=120)
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="None") as client:
                if attempt == 0:
                    _, batch = submit(client, tmp_path / "in.jsonl", [task(i, max_tokens=32) for i in range(NUM_TASKS)])
                    while batch.request_counts.completed < 10:
                        time.sleep(0.05)
                        batch = client.batches.retrieve(batch.id)
                    process.send_signal(signal.SIGKILL)
                    process.wait(60)
                    continue
                assert batch is not None
                batch = poll(client, batch, "completed", "failed")
                lines = client.files.content(batch.output_file_id or "").text.splitlines()
                assert [json.loads(each)["custom_id"] for each in lines] == [f"task-{i}" for i in range(NUM_TASKS)]
        finally:
            terminate_process(process, timeout=60)
