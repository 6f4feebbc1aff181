"""`ray.serve.llm` with `dovetail.ray:Ingress`: Ray's own application, over HTTP, with Dovetail's engine behind it."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi import FastAPI
from ray_process import RayServed
from starlette.testclient import TestClient

pytest.importorskip("ray", reason="needs dovetail-llm[ray]")

from dovetail.demo import MODEL_DIR
from dovetail_server.ray import llm_server

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from ray.serve._private.http_util import make_fastapi_class_based_view

    import dovetail.ray

STAND_IN = """
from pydantic import BaseModel, ConfigDict


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class Request(Open):
    model: str | None = None
    stream: bool | None = None


def __getattr__(name):
    if name.startswith("_") or not name.endswith(("Request", "Response")):
        raise AttributeError(name)
    base = Request if name.endswith("Request") else Open
    globals()[name] = type(name, (base,), {"__module__": __name__})
    return globals()[name]
"""
"""What Ray takes from SGLang: types of requests and replies, here with whatever fields there are."""


class Front:
    """A front as Ray's is one: methods that an application in another process imports."""

    def __init__(self, answer: str) -> None:
        self.answer = answer

    async def ask(self, question: str = "") -> dict[str, str]:
        return {question: self.answer}


def made(cls: type) -> FastAPI:
    """What Ray's `make_fastapi_ingress` does with methods and their signatures."""
    app = FastAPI()
    named = type(cls.__name__, (cls,), {"ask": app.get("/ask")(cls.ask)})  # type: ignore[attr-defined]
    named.__qualname__ = cls.__qualname__
    make_fastapi_class_based_view(app, named)
    return app


def test_a_replica_sets_the_signatures_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported anew, methods have none; the front's constructor, which runs in the replica, sets them."""
    module = ModuleType("ray.serve.llm.ingress")
    module.OpenAiIngress, module.make_fastapi_ingress = Front, made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.serve.llm", ModuleType("ray.serve.llm"))
    monkeypatch.setitem(sys.modules, "ray.serve.llm.ingress", module)
    monkeypatch.setitem(sys.modules, llm_server.TYPES, ModuleType(llm_server.TYPES))
    monkeypatch.delitem(sys.modules, "dovetail_server.ray.ingress", raising=False)
    front = dovetail.ray.Ingress
    app = made(front)
    del Front.ask.__signature__  # type: ignore[attr-defined]  # as in a process that has only imported it
    replica = front("Paris")
    given = inspect.signature(Front.ask).parameters["self"].default
    app.dependency_overrides[given.dependency] = lambda: replica
    with TestClient(app) as client:
        assert client.get("/ask", params={"question": "France"}).json() == {"France": "Paris"}
    monkeypatch.delitem(sys.modules, "dovetail_server.ray.ingress")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the cluster's processes find the types that Ray takes from an engine."""
    for name in ("pyarrow", "httpx"):
        pytest.importorskip(name, reason="needs what ray.serve.llm imports: pip install pyarrow httpx")
    folder = tmp_path / "stand-in" / "sglang" / "srt" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    (folder / "protocol.py").write_text(STAND_IN, "utf-8")
    return tmp_path / "stand-in"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_rays_own_front_answers(path: Path, tmp_path: Path) -> None:
    """Whole replies, streams, the models' list, and errors in Ray's words."""
    model = {
        "model_loading_config": {"model_id": "demo", "model_source": str(MODEL_DIR)},
        "server_cls": "dovetail.ray.LLMServer",
        "engine_kwargs": {"device": "cpu", "max_total_tokens": 8192, "random_seed": 1},
        "deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.5}},
    }
    options = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.2}}
    more: dict[str, Any] = {"ingress_cls_config": {"ingress_cls": "dovetail.ray:Ingress"}}
    more |= {"llm_configs": [model], "ingress_deployment_config": options}
    served = RayServed(tmp_path, builder="ray.serve.llm:build_openai_app", path=path, **more)
    question = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    try:
        served.wait(300, "/v1/models")
        assert [each["id"] for each in served.get("/v1/models").json()["data"]] == ["demo"]
        reply = served.post("/v1/chat/completions", {**question, "max_tokens": 16})
        assert reply.status_code == 200, reply.text
        assert "Paris" in reply.json()["choices"][0]["message"]["content"]
        stream = served.post("/v1/chat/completions", {**question, "stream": True}).text
        lines = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        told = [choice["delta"].get("content") or "" for line in lines[:-1] for choice in json.loads(line)["choices"]]
        assert "Paris" in "".join(told)
        assert served.post("/tokenize", {"model": "demo", "prompt": "hi"}).json()["count"] > 0
        assert served.post("/v1/chat/completions", {**question, "model": "other"}).status_code == 404
        wrong = served.post("/v1/chat/completions", {**question, "temperature": -1})
        assert (wrong.status_code, "temperature" in wrong.text) == (400, True), wrong.text
    finally:
        served.close()
