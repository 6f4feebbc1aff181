from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))  # the helpers of its tests

from harness import Harness, folder, make_harness

__all__ = ["folder", "make_harness"]

CHAT = "/v1/chat/completions"


def line(custom_id: str, url: str = "/v1/chat/completions", **changes: Any) -> dict[str, Any]:
    """A good line of an input file."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"Say {custom_id}"}], "max_tokens": 50}
    if url.endswith("/completions") and "chat" not in url:
        body = {"model": "tiny", "prompt": custom_id, "max_tokens": 50}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body | changes}


def jsonl(*lines: Any) -> bytes:
    """Lines as a file's bytes; what is text already stays as it is."""
    return b"".join(
        (item if isinstance(item, bytes) else item.encode() if isinstance(item, str) else json.dumps(item).encode())
        + b"\n"
        for item in lines
    )


class Api:
    """What tests do with a server's files and batches, over plain HTTP."""

    def __init__(self, harness: Any) -> None:
        self.harness = harness

    def upload(
        self, content: bytes, name: str = "in.jsonl", purpose: str = "batch", **fields: str
    ) -> requests.Response:
        files = {"file": (name, content)}
        reply: requests.Response = self.harness.post("/v1/files", files=files, data={"purpose": purpose, **fields})
        return reply

    def start(self, *lines: Any, endpoint: str = CHAT, **fields: Any) -> str:
        uploaded = self.upload(jsonl(*lines))
        assert uploaded.status_code == 200, uploaded.text
        body = {"input_file_id": uploaded.json()["id"], "endpoint": endpoint, "completion_window": "24h", **fields}
        reply = self.harness.post("/v1/batches", body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["status"] == "validating"
        return str(reply.json()["id"])

    def batch(self, batch_id: str) -> dict[str, Any]:
        reply = self.harness.get(f"/v1/batches/{batch_id}")
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def wait(self, batch_id: str, *statuses: str, timeout: float = 60.0) -> dict[str, Any]:
        wanted = statuses or ("completed", "failed", "expired", "cancelled")
        deadline = time.monotonic() + timeout
        while (batch := self.batch(batch_id))["status"] not in wanted:
            assert time.monotonic() < deadline, batch
            time.sleep(0.02)
        return batch

    def run(self, *lines: Any, **options: Any) -> dict[str, Any]:
        return self.wait(self.start(*lines, **options))

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        reply = self.harness.get(f"/v1/files/{file_id}/content")
        assert reply.status_code == 200, reply.text
        return [json.loads(text) for text in reply.text.splitlines()]

    def results(self, batch: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return self.lines(batch.get("output_file_id")), self.lines(batch.get("error_file_id"))


@pytest.fixture
def harness(make_harness: Callable[..., Any], tmp_path: Path) -> Any:
    """A server of its own with an empty storage folder."""
    return make_harness(file_storage_path=tmp_path / "storage", min_free_disk_bytes=0)


@pytest.fixture
def api(harness: Any) -> Api:
    return Api(harness)


@pytest.fixture(scope="session")
def shared_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    running = Harness(folder, file_storage_path=tmp_path_factory.mktemp("storage"), min_free_disk_bytes=0)
    yield running
    running.close()


@pytest.fixture
def shared(shared_server: Any) -> Api:
    """A server whose storage other tests use too."""
    return Api(shared_server)
