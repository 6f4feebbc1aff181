"""The fixtures that Dovetail offers to everybody's tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dovetail.plugins import Registry
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_testing import FakeSite
from dovetail_testing.models import make_model

HOOKS = """
import sys
from dovetail.contracts import RouteSet, hookimpl
plugin = sys.modules[__name__]

async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})

@hookimpl
def dovetail_routes(ctx):
    return RouteSet(routes={"/hello": hello})
"""


def test_a_server_without_a_model_runs_a_parser(dovetail_server: Callable[..., Any]) -> None:
    """A reply reaches the client through the parser that is named."""
    server = dovetail_server("<think>\nwhy\n</think>\n\nso", reasoning_parser="qwen3")
    message = server.chat()
    assert (message["reasoning_content"], message["content"]) == ("why", "so")
    assert server.chat("just so")["content"] == "just so"
    assert server.get("/v1/models")[0] == 200
    assert server.get("/nowhere")[0] == 404


def test_a_server_without_a_model_serves_a_hooks_route(
    dovetail_server: Callable[..., Any], dovetail_site: FakeSite
) -> None:
    """A route of a made-up, installed plugin is served."""
    dovetail_site.add("acme", "1.0", {"dovetail.hooks.v1": {"acme": "acme_hooks:plugin"}}, {"acme_hooks.py": HOOKS})
    server = dovetail_server(hooks=["acme"])
    assert server.get("/x/acme/hello") == (200, "hello")


def test_discovery_is_isolated(dovetail_site: FakeSite) -> None:
    """A made-up distribution is found, and only in the test that made it up."""
    dovetail_site.add("acme", "1.0", {"dovetail.tool_parsers.v1": {"acme-calls": "acme:Calls"}})
    assert "acme-calls" in Registry.scan().names("tool_parser")
    assert Registry.scan(path=[str(dovetail_site.root)]).names("tool_parser") == ["acme-calls"]
    (dovetail_site.root / "acme_names").mkdir()
    import_module("acme_names")


def test_nothing_of_another_test_is_left() -> None:
    """The distribution of the test above is gone, and its namespace, which has no file."""
    assert "acme-calls" not in Registry.scan().names("tool_parser")
    assert "acme_names" not in sys.modules


def test_tokenizers(dovetail_tokenizer: Tokenizer, dovetail_tokenizer_fallback: Tokenizer) -> None:
    """Both give text back; markers are one token in the one and several in the other."""
    for tokenizer in (dovetail_tokenizer, dovetail_tokenizer_fallback):
        ids = tokenizer.encode("the 🎉 <think>", add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == "the 🎉 <think>"
    assert "<think>" in dovetail_tokenizer.added_tokens
    assert "<think>" not in dovetail_tokenizer_fallback.added_tokens


def test_tiny_models(dovetail_tiny_model: Callable[..., Path]) -> None:
    """Equal arguments give the same checkpoint."""
    folder = dovetail_tiny_model("LlamaForCausalLM", num_hidden_layers=1)
    assert (folder / "model.safetensors").is_file()
    assert dovetail_tiny_model("LlamaForCausalLM", num_hidden_layers=1) == folder


@pytest.mark.parametrize("module", ["dovetail_testing.fixtures", "dovetail_server.testing"])
def test_fixture_modules_are_light(module: str) -> None:
    """Every run of pytest beside an installed Dovetail imports them: they import nothing heavy."""
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'pydantic', 'fastapi'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("architecture", ["BambaForCausalLM", "Gemma3ForCausalLM"])
def test_a_tiny_checkpoint_leaves_the_settings_that_it_is_made_of(tmp_path: Path, architecture: str) -> None:
    """These configs write defaults of their own into `rope_parameters`; the next model of the kit shares that dict."""
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    make_model(tmp_path, architecture, rope_parameters=rope)
    assert rope == {"rope_type": "default", "rope_theta": 5000.0}
