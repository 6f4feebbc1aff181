"""Which requests are prepared at once, and which in a worker thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from harness import Harness

from dovetail.processing.input import Preparation

HI = [{"role": "user", "content": "hi"}]
LONG = "many words " * 300
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads in which requests were prepared."""
    seen: list[threading.Thread] = []
    rendered = Preparation.rendered

    def noting(self: Preparation, **options: Any) -> Any:
        seen.append(threading.current_thread())
        return rendered(self, **options)

    monkeypatch.setattr(Preparation, "rendered", noting)
    return seen


@pytest.mark.parametrize(
    ("path", "fields", "is_quick"),
    [
        ("/v1/completions", {"prompt": "abc", "temperature": 0, "n": 2, "stream": True}, True),
        ("/v1/completions", {"prompt": [5] * 2000}, True),
        ("/v1/completions", {"prompt": [[5, 6], [7]]}, True),
        ("/v1/completions", {"prompt": LONG}, False),
        ("/v1/completions", {"prompt": "abc", "n": 9}, False),
        ("/v1/completions", {"prompt": "abc", "stop_regex": "a+"}, False),
        ("/v1/completions", {"prompt": "abc", "best_of": 2}, True),
        ("/v1/chat/completions", {"messages": HI, "seed": 4, "stop": ["x"]}, True),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, False),
        ("/v1/chat/completions", {"messages": HI, "response_format": SCHEMA}, False),
        ("/v1/chat/completions", {"messages": HI, "tools": [TOOL]}, False),
        ("/v1/messages", {"messages": HI, "max_tokens": 5, "system": "Be brief."}, True),
        ("/v1/messages", {"messages": HI, "max_tokens": 5, "system": LONG}, False),
    ],
    ids=str,
)
def test_short_plain_requests_need_no_thread(
    path: str, fields: dict[str, Any], is_quick: bool, harness: Harness, threads: list[threading.Thread]
) -> None:
    """They are prepared by the server's own thread; whatever may take longer is not, and is served or refused alike."""
    reply = harness.post(path, {"model": "tiny", **fields})
    assert reply.status_code in (200, 400), reply.text
    assert {thread is harness.thread for thread in threads} == {is_quick}
