"""Every hook, used from an installed package by a running server: one plugin that implements all of them."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from dovetail.base.distribution import DISTRIBUTION
from dovetail.plugins import KINDS, hookspecs
from dovetail.plugins.kinds import normalise
from dovetail_server.cli import main
from dovetail_testing.site import FakeSite

SOURCE = """
import json, os, sys, time
from dataclasses import dataclass, field
from dovetail.contracts import CacheObserver, FormatSpec, Markers, ReasoningParser, RequestObserver, StatLogger
from dovetail.contracts import ToolParser
from dovetail.contracts import HealthCheck, RouteSet, hookimpl

module = sys.modules[__name__]
seen = []

def note(*what):
    with open(os.environ["ACME_LOG"], "a") as file:
        print(*what, file=file, flush=True)

@dataclass
class Options:
    greeting: str = field(default="hello", metadata={"help": "What the route answers."})
    mood: str = ""

@hookimpl
def dovetail_settings():
    return Options

@hookimpl
def dovetail_models(registry):
    registry.add("AcmeForCausalLM", "acme_hooks:Nothing")

@hookimpl
def dovetail_attention_backends(registry):
    registry.add("acme-attention", "dovetail_backends.torch_native:TorchNativeBackend")

@hookimpl
def dovetail_reasoning_parsers(registry):
    registry.add("acme-think", "acme_hooks:Think")

@hookimpl
def dovetail_tool_parsers(registry):
    registry.add("acme-tools", "acme_hooks:Tools")

@hookimpl
def dovetail_configure(draft, facts, settings):
    draft.set("served_model_name", ["acme-" + settings.greeting], why="a test looks for it")
    draft.set("tool_call_parser", "acme-tools", why="it is ours")
    draft.set("log_level", "debug", why="it wants to know")
    note("configure", facts["architecture"], settings.greeting)

@hookimpl
def dovetail_select(kind, facts, settings):
    return "acme-attention" if kind == "attention_backend" else None

@hookimpl
def dovetail_process_start(ctx):
    note("start", ctx.role, ctx.plugin, ctx.settings.greeting)

@hookimpl
def dovetail_process_stop(ctx):
    note("stop", ctx.role)

@hookimpl
def dovetail_routes(ctx):
    async def hello(scope, receive, send):
        body = json.dumps([ctx.settings.greeting, scope["path_params"]["who"]]).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})
    async def told(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(seen).encode()})
    return RouteSet(routes={"/hello/{who}": hello, "/seen": told})

class LoggingExporter(RequestObserver):
    def request_started(self, request):
        seen.append(["started", request.num_choices, request.num_prompt_tokens])
    def request_ended(self, request):
        seen.append(["ended", request.num_completion_tokens, request.finish_reasons, request.seconds > 0])

class Clumsy(RequestObserver):
    def request_started(self, request):
        raise KeyError("lost")

@hookimpl
def dovetail_request_observers(ctx):
    return [LoggingExporter(), Clumsy()]

class Load(StatLogger):
    interval_s = 0.05
    def log(self, stats):
        seen.append(["load", stats.num_running, stats.max_total_tokens > 0])

class Cached(CacheObserver):
    def cache_changed(self, events):
        seen.append(["cache", len(events) > 0])

@hookimpl
def dovetail_cache_observers(ctx):
    return Cached()

@hookimpl
def dovetail_stat_loggers(ctx):
    return Load()

@hookimpl
def dovetail_health(ctx):
    return HealthCheck(name="mood", check=lambda: ctx.settings.mood or None)

@hookimpl
def dovetail_cli_commands(commands):
    commands.add("acme-tune", "acme_hooks:tune", help="Tune something.")

def tune(argv):
    print("tuned", *argv)
    return 3

class Think(ReasoningParser):
    def spec(self, tokenizer, template, request):
        return FormatSpec(reasoning=Markers("<think>", "</think>"))

class Tools(ToolParser):
    def extend(self, spec, tools):
        return spec

class Nothing: ...
"""
UNUSED = [kind for kind in KINDS.values() if kind.hook and f"def {kind.hook}(" not in SOURCE]
"""Kinds of which a plugin is registered that this server does not use."""
for unused in UNUSED:
    SOURCE += f"""
@hookimpl
def {unused.hook}(registry):
    registry.add("{normalise(unused.name, f"acme-{unused.name}")}", "acme_hooks:Nothing")
"""
ROLES = {"hooks": {"acme": {"roles": ["api", "engine"]}}}


def install(site: FakeSite) -> None:
    groups = {"dovetail.hooks.v1": {"acme": "acme_hooks:module"}}
    site.add("acme", "1.0", groups, {"acme_hooks.py": SOURCE}, manifest=ROLES)


def environment(site: FakeSite, log: Path) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith("DOVETAIL_")}
    return {**given, "PYTHONPATH": str(site.root), "ACME_LOG": str(log)}


class Running:
    """A server that serves the demo model with the plugin enabled."""

    def __init__(self, folder: Path) -> None:
        site = FakeSite(folder / "site")
        install(site)
        self.log = folder / "acme.log"
        self.output = folder / "output"
        flags = ["--plugin", "acme", "--acme.greeting", "hi", "--reasoning-parser", "acme-think", "--log-level", "info"]
        command = [sys.executable, "-m", "dovetail_server", *flags, "--port", "0", "--num-threads", "1"]
        with self.output.open("w") as output:
            env = environment(site, self.log)
            self.process = subprocess.Popen(command, env=env, stdout=output, stderr=output, cwd=folder)
        self.base = self._wait()

    def _wait(self) -> str:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            text = self.output.read_text()
            if "ready to roll" in text:
                return text.partition(" at http://")[2].partition("/v1")[0]
            time.sleep(0.05)
        raise AssertionError(self.output.read_text())

    def get(self, path: str) -> requests.Response:
        return requests.get(f"http://{self.base}{path}", timeout=30)

    def chat(self) -> Any:
        body = {"model": "acme-hi", "messages": [{"role": "user", "content": "What is 2^8?"}], "max_tokens": 3}
        reply = requests.post(f"http://{self.base}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("hooks"))
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def test_the_plugin_has_every_hook() -> None:
    """The plugin of this file implements each hook that there is."""
    hooks = [name for name, f in vars(hookspecs).items() if inspect.isfunction(f) and name.startswith("dovetail_")]
    assert [name for name in hooks if f"def {name}(" not in SOURCE] == []
    assert UNUSED


def test_registered_plugins_are_listed_and_used(server: Running) -> None:
    """What the registration hooks add is listed with its package; parsers and the backend chosen from them serve."""
    found = server.get("/v1/plugins").json()["data"]
    states = {(r["kind"], r["name"]): (r["state"], r["distribution"]) for r in found}
    assert states["model", "AcmeForCausalLM"] == ("found", "acme")
    for kind in UNUSED:
        assert states[kind.name, normalise(kind.name, f"acme-{kind.name}")] == ("found", "acme")
    assert states["reasoning_parser", "acme-think"] == ("active", "acme")
    assert states["tool_parser", "acme-tools"] == ("active", "acme")
    assert states["attention_backend", "acme-attention"] == ("active", "acme")
    assert states["hooks", "acme"] == ("active", "acme")
    assert states["reasoning_parser", "qwen3"] == ("found", DISTRIBUTION)


def test_proposed_defaults_hold_unless_the_user_gave_a_value(server: Running) -> None:
    """`dovetail_configure` set the served name with its option's value, and the log says why; --log-level stays."""
    assert server.get("/v1/models").json()["data"][0]["id"] == "acme-hi"
    output = server.output.read_text()
    assert "Plugin acme sets served_model_name to ['acme-hi']: a test looks for it." in output
    assert "Plugin acme would set log_level to 'debug': it wants to know." in output


def test_processes_of_its_roles_are_started(server: Running) -> None:
    """Start is called once in each process that the manifest names, with the settings, and in no other."""
    lines = server.log.read_text().splitlines()
    assert lines[0] == "configure Qwen3ForCausalLM hi"
    assert sorted(line for line in lines if line.startswith("start")) == ["start api acme hi", "start engine acme hi"]


def test_routes_are_mounted_below_its_name(server: Running) -> None:
    """A route with a parameter answers at `/x/acme/…`."""
    assert server.get("/x/acme/hello/you").json() == ["hi", "you"]
    assert server.get("/x/other/hello/you").status_code == 404


def test_observers_and_loggers_are_called_and_removed_when_they_keep_failing(server: Running) -> None:
    """Each request is told at its start and end; the load comes by itself; five failures in a row end an observer."""
    assert server.get("/health").json() == {"status": "ok"}
    for _ in range(5):
        server.chat()
    for _ in range(600):  # observers are told a moment later
        seen = server.get("/x/acme/seen").json()
        started, ended = ([entry for entry in seen if entry[0] == word] for word in ("started", "ended"))
        if len(ended) == 5 and any(entry[0] == "load" for entry in seen):
            break
        time.sleep(0.1)
    assert len(started) == len(ended) == 5
    assert started[0][1] == 1
    assert started[0][2] > 5
    assert ended[0] == ["ended", 3, ["length"], True]
    assert any(entry[0] == "load" and entry[2] for entry in seen)
    assert ["cache", True] in seen
    body = server.get("/health").json()
    assert body["status"] == "ok"
    assert body["plugins"] == [
        "Clumsy.request_started of hooks 'acme' of acme 1.0: dovetail_request_observers "
        "was removed after 5 failures in a row; the last: KeyError: 'lost'"
    ]
    server.chat()
    assert server.output.read_text().count("raised KeyError: 'lost'") == 5


def test_stop_is_called_in_each_process(server: Running) -> None:
    """An orderly end calls stop wherever start was called. Runs last: it ends the module's server."""
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    lines = server.log.read_text().splitlines()
    assert sorted(line for line in lines if line.startswith("stop")) == ["stop api", "stop engine"]


def test_commands_of_an_enabled_plugin_run(
    site: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dovetail --plugin acme acme-tune` runs the plugin's command and returns its code; `--help` lists it."""
    install(site)
    monkeypatch.setenv("ACME_LOG", str(tmp_path / "log"))

    def dovetail(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        return code, *capsys.readouterr()

    assert dovetail("--plugin", "acme", "acme-tune", "a", "b") == (3, "tuned a b\n", "")
    assert "  acme-tune  Tune something. (acme)" in dovetail("--plugin=acme", "--help")[1]
    code, _, said = dovetail("acme-tune")
    assert code == 2
    assert said.startswith("dovetail: 'acme-tune' is no command; commands: serve, gateway, chat, top, plugin, ")
    assert (
        dovetail("--plugin", "acme", "acme-tun")[2] == "dovetail: 'acme-tun' is no command; did you mean 'acme-tune'?\n"
    )


def test_an_unhealthy_plugin_makes_the_server_unready(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a check complains, its line is the reason why there should be no traffic."""
    monkeypatch.setenv("ACME_LOG", "/dev/null")
    install(site)
    from dovetail.plugins import Registry, make_plan
    from dovetail_server.serving.hooks import ApiHooks

    plan = make_plan(Registry.scan(path=[str(site.root)]), hooks=["acme"], options={"acme": {"mood": "gloomy"}})
    hooks = ApiHooks.start(plan)
    assert hooks.why_not_healthy() == "acme: mood: gloomy"
    assert json.dumps(sorted(hooks.routes)) == '["/x/acme/hello/{who}", "/x/acme/seen"]'
    hooks.stop()
