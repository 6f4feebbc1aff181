"""Settings that change how everything is served: HTTPS, a path of a proxy, defaults of templates and streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from exchanges import events
from harness import Harness

from dovetail.contracts.errors import ConfigError
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start import preflight

USER = [{"role": "user", "content": "hi"}]
CHAT = {"model": "tiny", "messages": USER}
CERTIFICATE = Path(__file__).parent / "localhost.pem"
"""Made for 127.0.0.1, with its key; trusted by nobody."""


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Harness]:
    running = Harness(
        folder,
        default_chat_template_kwargs={"enable_thinking": False},
        preferred_sampling_params={"temperature": 0.25},
        stream_response_default_include_usage=True,
        root_path="/llm",
    )
    yield running
    running.close()


def rendered(server: Harness, **fields: object) -> str:
    ids = server.post("/v1/chat/completions/render", {**CHAT, **fields}).json()["token_ids"]
    return server.tokenizer.decode(ids, skip_special_tokens=False)


def test_template_variables_of_the_server_give_way_to_those_of_a_request(server: Harness) -> None:
    """`--default-chat-template-kwargs` holds where a request says nothing of it, for tokenizing, too."""
    assert "</think>" in rendered(server)
    assert "</think>" not in rendered(server, chat_template_kwargs={"enable_thinking": True})
    assert "</think>" not in rendered(server, reasoning_effort="high")
    ids = server.post("/tokenize", {"messages": USER}).json()["tokens"]
    assert "</think>" in server.tokenizer.decode(ids, skip_special_tokens=False)


def test_sampling_parameters_of_the_server_win_over_the_models(server: Harness) -> None:
    """`--preferred-sampling-params` holds beside what generation_config.json has, and gives way to a request's."""
    params = server.post("/v1/chat/completions/render", CHAT).json()["sampling_params"]
    assert (params["temperature"], params["top_k"]) == (0.25, 20)
    params = server.post("/v1/chat/completions/render", {**CHAT, "temperature": 1.5}).json()["sampling_params"]
    assert params["temperature"] == 1.5


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streams_end_with_usage_unless_a_request_says_otherwise(server: Harness, path: str) -> None:
    """`--stream-response-default-include-usage` is a default."""
    server.reset()
    body = {**CHAT, "stream": True} if "chat" in path else {"prompt": "hi", "stream": True}
    assert events(server.post(path, body))[-1]["usage"]["prompt_tokens"] > 0
    last = events(server.post(path, {**body, "stream_options": {"include_usage": False}}))[-1]
    assert last.get("usage") is None


def test_a_proxys_path_may_stand_before_every_route(server: Harness) -> None:
    """`--root-path` is for proxies that cut it off, and for those that do not; links in the document have it."""
    server.reset()
    assert server.post("/v1/chat/completions", CHAT).status_code == 200
    assert server.post("/llm/v1/chat/completions", CHAT).status_code == 200
    assert server.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_https_is_spoken_with_a_certificate(folder: Path) -> None:
    """`--ssl-certfile`, with the key in the same file."""
    settings = ServeSettings(ssl_certfile=CERTIFICATE)
    preflight.check_certificate(settings)
    running = Harness(folder, ssl_certfile=CERTIFICATE)
    try:
        url = f"https://127.0.0.1:{running.port}/v1/chat/completions"
        last = {"connection": "close"}
        reply = requests.post(url, json=CHAT, timeout=60, verify=str(CERTIFICATE), headers=last)
        assert reply.json()["choices"][0]["message"]["content"] == "Hello, world"
        running.eventually(lambda: not running.server.server_state.connections)
    finally:
        running.close()


def test_a_certificate_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    """A missing file, a key alone and a file that is none are told by the flag."""
    cases = {
        "--ssl-certfile": {"ssl_certfile": tmp_path / "no"},
        "give --ssl-certfile": {"ssl_keyfile": CERTIFICATE},
        "cannot be used": {"ssl_certfile": Path(__file__)},
        "--ssl-keyfile": {"ssl_certfile": CERTIFICATE, "ssl_keyfile": tmp_path / "no"},
    }
    for part, given in cases.items():
        with pytest.raises(ConfigError, match=part):
            preflight.check_certificate(ServeSettings(**given))  # type: ignore[arg-type]


def test_pickers_learn_the_size_of_the_cache(make_harness: Any) -> None:
    """llm-d's picker reads the tokens per block and their number off vLLM's name."""
    harness = make_harness(metrics_style="vllm")
    info, text = harness.engine.info, harness.get("/metrics").text
    [line] = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    assert f'block_size="{info.page_size}"' in line
    assert f'num_gpu_blocks="{info.max_total_tokens // info.page_size}"' in line
    assert line.endswith(" 1.0")
