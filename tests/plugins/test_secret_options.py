"""Options that are secret reach the plugin and nobody else; users and passwords in addresses are shown to nobody."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, Secret, SecretBytes, SecretStr

from dovetail.demo import MODEL_DIR
from dovetail.plugins import PluginPlan, load
from dovetail.plugins.options import OptionError, describe_options, make_options, plain_options
from dovetail.processing.plan import plan_plugins
from dovetail_server.cli import serve
from dovetail_server.cli.options import load_settings, parse_flags
from dovetail_server.http.auth import Keys
from dovetail_server.http.shown import HIDDEN, shown, shown_options
from dovetail_server.settings.serve import ServeSettings
from dovetail_testing.folder import unread_model
from dovetail_testing.site import FakeSite

SOURCE = """
from dataclasses import dataclass, field
from pydantic import BaseModel, Field, SecretStr
from dovetail.contracts import FormatSpec, ReasoningParser, SchedulePolicy

@dataclass
class Options:
    token: SecretStr | None = None
    pin: SecretStr = field(default=SecretStr("p1n"))
    peer: str = ""
    num: int = 3

class Think(ReasoningParser):
    Options = Options
    def spec(self, tokenizer, template, request):
        return FormatSpec()

class Model(BaseModel):
    token: SecretStr | None = Field(None, description="Of the other service.", max_length=8)

class Turns(SchedulePolicy):
    Options = Model
    def order(self, waiting, cache):
        return waiting
"""
GROUPS = {
    "dovetail.reasoning_parsers.v1": {"acme": "acme_secret:Think"},
    "dovetail.schedule_policies.v1": {"turns": "acme_secret:Turns"},
}
FLAGS = ["--reasoning-parser", "acme", "--acme.token", "t0ps3cret", "--acme.num", "5"]
PEER = "https://me:pa55word@peer.example.org/x"


@pytest.fixture(autouse=True)
def acme(site: FakeSite) -> None:
    site.add("acme-secret", "1.0", GROUPS, {"acme_secret.py": SOURCE})


def planned(*more: str) -> tuple[ServeSettings, PluginPlan]:
    """Plan as `dovetail serve` does."""
    flags = parse_flags([str(MODEL_DIR), *FLAGS, *more])
    assert isinstance(flags, dict)
    settings = load_settings(flags)
    return settings, plan_plugins(settings, unread_model())[2]


def test_a_secret_reaches_the_plugin() -> None:
    """After the plan's journey to a process, one of the engine's too, which checks it there."""
    made = PluginPlan.decode(planned("--schedule-policy", "turns", "--turns.token", "abc")[1].encode())
    options = load(made, "api").get("reasoning_parser", "acme")().options
    assert options.token.get_secret_value() == "t0ps3cret"
    assert options.pin.get_secret_value() == "p1n"
    policy = load(made, "engine").get("schedule_policy", "turns")
    assert policy().options.token.get_secret_value() == "abc"


def test_a_secret_is_shown_nowhere() -> None:
    """Of options, those that are declared and no secrets are shown; of the engine's plugins, names only."""
    settings, _ = planned("--acme.peer", PEER, "--schedule-policy", "turns", "--turns.token", "abc")
    text = shown(shown_options(settings.plugins), Keys().caller(""))
    peer = f"https://{HIDDEN}@peer.example.org/x"
    assert text == {"acme": {"token": HIDDEN, "num": "5", "peer": peer}, "turns": {"token": HIDDEN}}


def test_neither_help_nor_errors_tell_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """A default is not shown, nor is a value that is wrong."""
    assert serve.main(["--reasoning-parser", "acme", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--acme.pin" in text
    assert "p1n" not in text
    from acme_secret import Model, Options  # type: ignore[import-not-found]

    assert [o.is_secret for o in describe_options(Options)] == [True, True, False, False]
    assert [(o.is_secret, o.default) for o in describe_options(Model)] == [(True, None)]
    with pytest.raises(OptionError) as caught:
        make_options(Model, {"token": "far too long a token"})
    assert "far too" not in str(caught.value)
    with pytest.raises(OptionError, match="'x' should be"):
        make_options(Options, {"num": "x"})


@dataclass
class Service:
    """Of another server."""

    url: str = ""
    key: SecretStr = field(default=SecretStr("k3y"))
    next: Service | None = None


class Plain(BaseModel):
    size: int = 3


class Deep(BaseModel):
    """Options with secrets at every place that a type has."""

    many: list[SecretStr] = []
    raw: SecretBytes = SecretBytes(b"k3y")
    number: Secret[int] = Secret[int](7)
    named: dict[str, list[SecretStr] | None] = {}
    service: Service = Service()
    services: list[Service] | None = None
    plain: Plain = Plain()
    choice: Literal["SecretStr"] = "SecretStr"


def test_a_secret_within_an_option_makes_all_of_it_secret() -> None:
    """A value that was wrong stood in the error, and the whole of an option that holds a secret in what is shown."""
    secret = {option.name for option in describe_options(Deep) if option.is_secret}
    assert secret == {"many", "raw", "number", "named", "service", "services"}
    assert all("k3y" not in str(option.default) for option in describe_options(Deep))
    for name in ("service", "services"):
        with pytest.raises(OptionError) as caught:
            make_options(Deep, {name: {"key": ["t0ps3cret"]}})
        assert "t0ps3cret" not in str(caught.value)


def test_secrets_within_options_reach_the_plugin() -> None:
    """As they were given, at any depth: not as the asterisks that pydantic writes for them."""
    given = {
        "many": ["a", "b"], "raw": "c", "number": 5, "named": {"x": ["d"], "y": None}, "plain": {"size": 4},
        "service": {"key": "e", "next": {"url": "u", "key": "f"}}, "services": [{"key": "g"}],
    }  # fmt: skip
    carried = json.loads(json.dumps(plain_options(Deep, make_options(Deep, given))))
    made = make_options(Deep, carried)
    assert made == make_options(Deep, given)
    assert made.many[1].get_secret_value() == "b"
    assert made.service.next.key.get_secret_value() == "f"


@pytest.mark.parametrize("is_admin", [False, True])
def test_places_are_for_admins(is_admin: bool, tmp_path: Path) -> None:
    """Others see the last part of an absolute path; nobody sees who logs in at an address."""
    keys = Keys([], None)
    caller = keys.identify(None) if is_admin else keys.caller("")
    assert caller is not None
    given = {"model_path": str(tmp_path), "name": "a/b", "urls": [PEER, "http://10.0.0.1/x@y"], "n": 3, "none": None}
    found = shown(given, caller)
    assert found["model_path"] == (str(tmp_path) if is_admin else tmp_path.name)
    urls = [f"https://{HIDDEN}@peer.example.org/x", "http://10.0.0.1/x@y"]
    assert {name: found[name] for name in ("name", "urls", "n", "none")} == {
        "name": "a/b", "urls": urls, "n": 3, "none": None,
    }  # fmt: skip
    assert "pa55word" not in json.dumps(found)
