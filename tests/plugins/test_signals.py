"""A `KeyboardInterrupt` that a plugin raises is its error; Ctrl-C meanwhile still ends the process as Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts.errors import PluginError
from dovetail.plugins import Registry, load, make_plan
from dovetail.plugins.config_facts import config_facts
from dovetail.plugins.files import add_file
from dovetail.plugins.manager import HookManager
from dovetail.plugins.signals import Signalled, catching_signals
from dovetail.plugins.time_limit import time_limit
from dovetail.processing.plan import make_parsers
from dovetail_server.apis.loaded import apis_of
from dovetail_server.cli import serve
from dovetail_testing import FakeSite

OWN = "raise KeyboardInterrupt"
ASKED = {
    "ctrl-c": "import signal; signal.raise_signal(signal.SIGINT)",
    "service manager": "import signal; signal.raise_signal(signal.SIGTERM)",
}
PARSER = """
from dovetail.contracts import FormatSpec, ReasoningParser

class Acme(ReasoningParser):
    def __init__(self):
        {made}

    def spec(self, tokenizer, template, request):
        return FormatSpec()
{imported}
"""
API = """
from dovetail.contracts import Api

class Acme(Api):
    def routes(self):
        {made}
{imported}
"""
HOOKS = """
import sys
from dovetail.contracts import hookimpl

@hookimpl
def dovetail_process_start(ctx):
    {made}
{imported}
plugin = sys.modules[__name__]
"""
PARSERS = "dovetail.reasoning_parsers.v1"


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As `dovetail serve` has them while it starts; they are the same afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    yield
    left = [signal.getsignal(number) for number in before]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert left == [signal.default_int_handler] * 2


def found(site: FakeSite, group: str, source: str) -> Registry:
    site.add(
        "acme",
        "1.0",
        {group: {"acme": "acme_odd:" + ("plugin" if "hooks" in group else "Acme")}},
        {"acme_odd.py": source},
    )
    return Registry.scan(path=[str(site.root)])


def parser(site: FakeSite, tmp_path: Path, source: str) -> None:
    make_parsers(make_plan(found(site, PARSERS, source), reasoning_parser="acme"))


def api(site: FakeSite, tmp_path: Path, source: str) -> None:
    apis_of(make_plan(found(site, "dovetail.apis.v1", source), api=["acme"]))


def hooks(site: FakeSite, tmp_path: Path, source: str) -> None:
    loaded = load(make_plan(found(site, "dovetail.hooks.v1", source), hooks=["acme"]), "api")
    HookManager(loaded.all("hooks")).start("api")


def file(site: FakeSite, tmp_path: Path, source: str) -> None:
    (tmp_path / "acme.py").write_text(source)
    add_file(Registry(), tmp_path / "acme.py")


def facts(site: FakeSite, tmp_path: Path, source: str) -> None:
    (site.root / "acme_facts.py").write_text(source)
    registry = found(site, "dovetail.models.v1", "class Acme: ...\n")
    (record,) = registry.of_kind("model")
    config_facts(replace(record, facts=record.facts._replace(config="acme_facts:Acme")))


PLACES: dict[str, tuple[Callable[..., None], str, str]] = {
    "a parser is imported": (parser, PARSER.format(made="pass", imported="{code}"), "importing acme_odd"),
    "a parser is made": (parser, PARSER.format(made="{code}", imported=""), "Acme.__init__"),
    "an API is imported": (api, API.format(made="return []", imported="{code}"), "importing acme_odd"),
    "an API's routes": (api, API.format(made="{code}", imported=""), "Acme.routes"),
    "hooks are imported": (hooks, HOOKS.format(made="pass", imported="{code}"), "importing acme_odd"),
    "a hook": (hooks, HOOKS.format(made="{code}", imported=""), "dovetail_process_start"),
    "a file": (file, "{code}", "running it"),
    "facts of a model": (facts, "{code}", "its manifest names acme_facts:Acme as config, which"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_of_its_own_is_an_error_of_the_plugin(place: str, site: FakeSite, tmp_path: Path) -> None:
    """Whatever of it is called: who, what, and no word of Ctrl-C."""
    call, source, what = PLACES[place]
    with pytest.raises(PluginError) as error:
        call(site, tmp_path, source.replace("{code}", OWN))
    assert f"{what} raised KeyboardInterrupt" in str(error.value)
    assert "acme" in str(error.value)
    assert "KeyboardInterrupt: ;" not in str(error.value)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("place", PLACES)
def test_a_signal_ends_the_process_wherever_a_plugin_is(place: str, asked: str, site: FakeSite, tmp_path: Path) -> None:
    """Ctrl-C, and a service manager's signal, pass through as they are."""
    call, source, _ = PLACES[place]
    with pytest.raises(Signalled):
        call(site, tmp_path, source.replace("{code}", ASKED[asked]))


@pytest.mark.parametrize(("code", "status"), [(OWN, 2), (ASKED["ctrl-c"], 130), (ASKED["service manager"], 130)])
def test_a_start_ends_so(code: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line for the plugin's error; 130 and nothing for a signal."""
    (tmp_path / "acme.py").write_text(code)
    assert serve.main(["--plugin-file", str(tmp_path / "acme.py"), "--port", "0"]) == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (status == 2)
    assert all("acme.py': running it raised KeyboardInterrupt; correct the file" in line for line in lines)


def test_a_handler_that_the_block_sets_stays() -> None:
    """It is noted elsewhere who left it; one that raises nothing ends nothing."""
    heard: list[int] = []

    def hear(number: int, frame: Any) -> None:
        heard.append(number)

    with catching_signals(), time_limit("acme", 60):
        before = signal.signal(signal.SIGINT, hear)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is hear
    assert heard == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(Signalled):
        before(signal.SIGINT, None)  # type: ignore[misc, operator]
