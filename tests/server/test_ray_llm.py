"""`dovetail.ray.LLMServer` as `ray.serve.llm` calls it, with stand-ins for the types that Ray takes from others."""

from __future__ import annotations

import asyncio
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

pytest.importorskip("ray", reason="needs dovetail-llm[ray]")

from dovetail.contracts.errors import ConfigError
from dovetail.demo import MODEL_DIR
from dovetail_server.ray import llm_server
from dovetail_server.ray.llm_server import LLMServer, model_of
from dovetail_server.ray.options import ClusterNode


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(BaseModel):
    error: ErrorInfo


@pytest.fixture
def types(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(llm_server.TYPES)
    for name in ("ChatCompletion", "Completion", "Embedding", "Tokenize", "Detokenize"):
        setattr(module, f"{name}Response", type(f"{name}Response", (Open,), {}))
    module.ErrorInfo, module.ErrorResponse = ErrorInfo, ErrorResponse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, llm_server.TYPES, module)
    return module


def config(**engine_kwargs: Any) -> SimpleNamespace:
    loading = SimpleNamespace(model_id="demo", model_source=str(MODEL_DIR))
    more = {"model_id": "demo", "deployment_config": {"max_ongoing_requests": 9}}
    return SimpleNamespace(model_loading_config=loading, engine_kwargs=engine_kwargs, **more)


async def every(reply: Any) -> list[Any]:
    return [each async for each in reply]


@pytest.mark.filterwarnings(
    "ignore:.*__del__:pytest.PytestUnraisableExceptionWarning"
)  # Ray awaits it, Python does not
def test_requests_become_replies_of_rays_types(types: ModuleType) -> None:
    """Whole replies, streams, errors and tokens."""

    async def run() -> None:
        server: Any = LLMServer.__new__(LLMServer)
        await server.__init__(config(device="cpu", max_total_tokens=8192, random_seed=1))
        try:
            question = [{"role": "user", "content": "What is the capital of France?"}]
            [reply] = await every(server.chat(Open(model="demo", messages=question, max_tokens=16, top_k=None)))
            assert isinstance(reply, types.ChatCompletionResponse)
            assert "Paris" in reply.choices[0]["message"]["content"]
            named = SimpleNamespace(headers={"X-Request-Id": "mine"})
            events = await every(server.chat(Open(model="demo", messages=question, stream=True), named))
            assert all(isinstance(event, str) and event.endswith("\n\n") for event in events)
            lines = [line[6:] for line in "".join(events).split("\n\n") if line.startswith("data: ")]
            assert lines[-1] == "[DONE]"
            told = [
                choice["delta"].get("content") or "" for line in lines[:-1] for choice in json.loads(line)["choices"]
            ]
            assert "Paris" in "".join(told)
            [error] = await every(server.completions(Open(model="other", prompt="x")))
            assert (error.error.code, error.error.param) == (404, "model")
            [tokens] = await every(server.tokenize(Open(prompt="hi")))
            [text] = await every(server.detokenize(Open(tokens=tokens.tokens)))
            assert text.text == "hi"
            [vectors] = await every(server.embeddings(Open(model="demo", input="hi")))
            assert len(vectors.data[0]["embedding"]) > 0
            await server.check_health()
            await server.reset_prefix_cache()
            assert (await server.llm_config()).model_id == "demo"
        finally:
            await server.__del__()

    asyncio.run(run())


def test_the_deployment_reserves_what_a_replica_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps what the user said of it."""
    monkeypatch.setattr(llm_server, "cluster_nodes", lambda: [ClusterNode(8, 2)])
    assert LLMServer.get_deployment_options(config(tensor_parallel_size=2)) == {
        "max_ongoing_requests": 9,
        "ray_actor_options": {"num_cpus": 1, "num_gpus": 2.0},
    }


@pytest.mark.parametrize("name", ["api_key", "served_model_name", "max_replicas", "page_sizes"])
def test_engine_kwargs_that_are_no_settings_of_it_are_refused(name: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=name):
        model_of(config(**{name: 1}))


def test_without_rays_types_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's module of them cannot be imported without vLLM or SGLang."""
    monkeypatch.setitem(sys.modules, llm_server.TYPES, None)
    with pytest.raises(ConfigError, match="takes its types of requests from vLLM or SGLang"):
        llm_server.types()
