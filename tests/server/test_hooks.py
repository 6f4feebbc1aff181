"""Hook plugins in the server: one enabled by name reaches settings, routes, health, start and stop."""

from __future__ import annotations

import importlib
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from harness import Harness
from pydantic import SecretStr
from server_tiny import NO_TENSORS, write_model

from dovetail.contracts.errors import ConfigError
from dovetail.processing.plan import configure, plan_plugins
from dovetail.processing.prepare import check_model
from dovetail_server.serving.hooks import ApiHooks
from dovetail_server.settings.serve import ServeSettings

SOURCE = """
import sys

from dovetail.contracts import hookimpl
from dovetail.contracts.hooks import HealthCheck, RouteSet

plugin = sys.modules[__name__]
calls = []
complaint = None

@hookimpl
def dovetail_configure(draft):
    draft.set("page_size", 32, why="acme likes it")
    draft.set("dtype", "float16", why="acme likes that too")

@hookimpl
def dovetail_select(kind):
    return "torch_native" if kind == "attention_backend" else None

@hookimpl
def dovetail_process_start(ctx):
    calls.append(("start", ctx.role))

@hookimpl
def dovetail_process_stop(ctx):
    calls.append(("stop", ctx.role))

@hookimpl
def dovetail_health(ctx):
    return HealthCheck(name="mood", check=lambda: complaint)

async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})

@hookimpl
def dovetail_routes(ctx):
    return RouteSet(routes={"/hello": hello})
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a distribution with a hooks plugin."""
    info = tmp_path / "acme_hooks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-hooks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dovetail.hooks.v1]\nacme = acme_server_hooks:plugin\n")
    (tmp_path / "acme_server_hooks.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return "acme"


def test_a_hooks_plugin_reaches_every_place(acme: str, tmp_path: Path, folder: Path) -> None:
    """Defaults are proposed under the user's settings; routes, health, start and stop are called."""
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(NO_TENSORS)
    given = ServeSettings(model_path=str(model), plugin=["acme"], dtype="float32")
    settings, _, plan = plan_plugins(given, check_model(given))
    assert (settings.page_size, settings.dtype) == (32, "float32")
    assert plan.of_kind("attention_backend")[0].name == "torch_native"
    hooks = ApiHooks.start(plan)
    module = importlib.import_module("acme_server_hooks")
    assert module.calls == [("start", "api")]
    harness = Harness(folder, hooks=hooks)
    try:
        assert harness.get("/x/acme/hello").text == "hello"
        assert harness.get("/readyz").status_code == 200
        module.complaint = "gloomy"
        reply = harness.get("/readyz")
        assert (reply.status_code, reply.json()["reason"]) == (503, "acme: mood: gloomy")
    finally:
        harness.close()
    hooks.stop()
    assert module.calls[-1] == ("stop", "api")


def test_an_unknown_hooks_plugin_is_refused(tmp_path: Path) -> None:
    """A name that is not installed is an error, not a warning."""
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(NO_TENSORS)
    given = ServeSettings(model_path=str(model), plugin=["acmee"])
    with pytest.raises(ConfigError, match="acmee"):
        plan_plugins(given, check_model(given))


def test_a_plugin_neither_loses_nor_shows_keys(caplog: pytest.LogCaptureFixture) -> None:
    """Settings that a plugin's proposals are merged into keep their keys; what it proposes as a key is not shown."""

    class Proposals:
        def __init__(self, key: str, value: Any) -> None:
            self.key, self.value = key, value

        def configure(self, draft: Any, facts: Any) -> None:
            draft.for_plugin("acme").set(self.key, self.value, why="a test")

    given = ServeSettings(api_key=[SecretStr("a,b"), SecretStr("c")], admin_api_key=SecretStr("d"))
    merged = configure(given, Proposals("page_size", 32), {})  # type: ignore[arg-type]
    assert [key.get_secret_value() for key in merged.api_key] == ["a,b", "c"]
    assert merged.admin_api_key == SecretStr("d")
    keyless = ServeSettings(admin_api_key=SecretStr("secret"))
    logging.getLogger("dovetail").propagate = True
    caplog.set_level(logging.INFO, "dovetail")
    for proposal in (["secret"], ["sec ret"]):
        with pytest.raises(ConfigError) as caught:
            configure(keyless, Proposals("api_key", proposal), {})  # type: ignore[arg-type]
        assert not re.search("sec ?ret'", str(caught.value) + caplog.text)
    assert "sets api_key to a secret" in caplog.text
