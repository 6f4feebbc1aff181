"""A plugin's own settings: from flags, variables and files to the object, in every process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.demo import MODEL_DIR
from dovetail.plugins import PluginPlan, load
from dovetail.plugins.options import describe_options, make_options
from dovetail.processing.plan import plan_plugins
from dovetail_server.cli import serve
from dovetail_server.cli.options import load_settings, parse_flags
from dovetail_server.settings.serve import ServeSettings
from dovetail_testing.folder import unread_model
from dovetail_testing.site import FakeSite

SOURCE = """
from dataclasses import dataclass, field
from typing import Literal
from pydantic import BaseModel, Field
from dovetail.contracts import FormatSpec, ReasoningParser, ToolParser
from dovetail.contracts import hookimpl
import sys
module = sys.modules[__name__]

@dataclass
class Options:
    top_k: int = field(default=4, metadata={"help": "Candidates to look at."})
    fast: bool = False
    names: list[str] = field(default_factory=list)
    size: Literal["small", "Large"] = field(default="small", metadata={"help": "Its size."})

class Think(ReasoningParser):
    Options = Options
    def spec(self, tokenizer, template, request):
        return FormatSpec()

class Plain(ToolParser):
    def extend(self, spec, tools):
        return spec

class Strict(BaseModel):
    ratio: float = Field(0.5, ge=0, le=1, description="A share.")
    mode: Literal["slow", 2] = Field("slow", description="How.")

@hookimpl
def dovetail_settings():
    return Strict
"""
GROUPS = {
    "dovetail.reasoning_parsers.v1": {"acme": "acme_options:Think"},
    "dovetail.tool_parsers.v1": {"plain": "acme_options:Plain"},
    "dovetail.hooks.v1": {"acme": "acme_options:module"},
}


@pytest.fixture(autouse=True)
def acme(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DOVETAIL_")]:
        monkeypatch.delenv(name)
    site.add("acme", "1.0", GROUPS, {"acme_options.py": SOURCE})


def plan(*argv: str) -> PluginPlan:
    flags = parse_flags([str(MODEL_DIR), *argv])
    assert isinstance(flags, dict)
    return plan_plugins(load_settings(flags), unread_model())[2]


def options(*argv: str) -> Any:
    """The options of the reasoning parser, as its process sees them after the plan's journey."""
    made = PluginPlan.decode(plan("--reasoning-parser", "acme", *argv).encode())
    return load(made, "api").get("reasoning_parser", "acme")().options


def test_defaults_reach_the_object() -> None:
    """Without any setting the object holds the class's defaults."""
    assert (options().top_k, options().fast, options().names) == (4, False, [])


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source is read; the precedence is the server's own."""
    yaml, toml = tmp_path / "c.yaml", tmp_path / "c.toml"
    yaml.write_text("plugins:\n  acme:\n    top-k: 1\n    fast: true\n    names: [a, b]\n")
    toml.write_text("[plugins.acme]\ntop_k = 2\n")
    assert (options("--config", str(yaml)).top_k, options("--config", str(yaml)).names) == (1, ["a", "b"])
    assert options("--config", str(toml)).top_k == 2
    monkeypatch.setenv("DOVETAIL_PLUGIN__ACME__TOP_K", "3")
    found = options("--config", str(yaml))
    assert (found.top_k, found.fast) == (3, True)
    assert options("--config", str(yaml), "--acme.top-k", "5").top_k == 5
    assert options("--ACME.top_k=6").top_k == 6


def test_a_switch_needs_no_value() -> None:
    """A flag before another flag, or at the end, is true; `=false` turns it off."""
    assert options("--acme.fast", "--acme.top-k", "5").fast
    assert options("--acme.fast").fast
    assert not options("--acme.fast=false").fast


def test_plugins_that_share_a_name_get_their_own() -> None:
    """Of one section, the hooks plugin and the parser of a name each get what they declare."""
    made = plan("--reasoning-parser", "acme", "--plugin", "acme", "--acme.top-k=5", "--acme.ratio=0.25")
    held = {planned.kind: planned.options for planned in made.plugins if planned.name == "acme"}
    assert held["reasoning_parser"] == {"top_k": 5, "fast": False, "names": [], "size": "small"}
    assert held["hooks"] == {"ratio": 0.25, "mode": "slow"}
    with pytest.raises(PluginError, match=r"--acme\.nope: unknown; .* it is an option of"):
        plan("--reasoning-parser", "acme", "--plugin", "acme", "--acme.nope=5")


def test_bounds_of_a_pydantic_model_hold() -> None:
    """A value out of bounds is refused with the bound and the flag."""
    with pytest.raises(PluginError, match=r"^--acme\.ratio: '2' should be less than or equal to 1; it is an option of"):
        plan("--plugin", "acme", "--acme.ratio", "2")


def test_a_plugin_without_options_takes_none() -> None:
    """A flag for a plugin that declares no options is refused."""
    with pytest.raises(PluginError, match=r"^--plain\.x: unknown; this plugin has no options; it is"):
        plan("--tool-call-parser", "plain", "--plain.x", "1")


def test_a_section_for_a_plugin_that_is_not_selected_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file or variable may hold options for other runs: the log says that they have no effect."""
    monkeypatch.setenv("DOVETAIL_PLUGIN__ACME__TOP_K", "3")
    with caplog.at_level("WARNING", "dovetail.server"):
        plan()
    assert "DOVETAIL_PLUGIN__ACME__TOP_K: plugin 'acme' is not selected" in caplog.text
    monkeypatch.setenv("DOVETAIL_PLUGIN__ACME", "3")
    with pytest.raises(ConfigError, match="expected DOVETAIL_PLUGIN__<PLUGIN>__<OPTION>"):
        plan()


def test_a_malformed_section_is_named(tmp_path: Path) -> None:
    """A section that is no mapping is an error of the file."""
    file = tmp_path / "c.yaml"
    file.write_text("plugins:\n  acme: 5\n")
    with pytest.raises(ConfigError, match=r"'plugins' in the configuration file .* expected `option: value` lines"):
        plan("--config", str(file))


def test_help_shows_the_options_of_what_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` beside a plugin's name shows its options with type, help and default; alone it shows none.

    `--help=all` says so. Values to choose from are shown as they are written.
    """
    assert serve.main(["--help"]) == 0
    assert "acme" not in capsys.readouterr().out
    assert serve.main(["--help=all"]) == 0
    assert "Options of plugins follow where flags name the plugins; `dovetail plugin info NAME` shows them, too" in (
        " ".join(capsys.readouterr().out.split())
    )
    assert serve.main(["--reasoning-parser", "acme", "--plugin=acme", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "options of reasoning_parser 'acme' of acme 1.0: --acme.top-k INT Candidates to look at. [4] --acme." in out
    assert "options of hooks 'acme' of acme 1.0: --acme.ratio FLOAT A share. [0.5]" in out
    assert "--acme.size {small,Large} Its size. [small]" in out
    assert "--acme.mode {slow,2} How. [slow]" in out
    assert "DOVETAIL_PLUGIN__ACME__" in out
    assert serve.main(["--reasoning-parser", "nope", "--help"]) == 0
    assert "The options of plugins cannot be shown: --reasoning-parser 'nope'" in capsys.readouterr().out


def test_options_of_two_plans_do_not_meet() -> None:
    """Loading under other options gives another class; the plugin's own class stays as it is."""
    one = load(plan("--reasoning-parser", "acme", "--acme.top-k=1"), "api").get("reasoning_parser", "acme")
    two = load(plan("--reasoning-parser", "acme", "--acme.top-k=2"), "api").get("reasoning_parser", "acme")
    assert (one.options.top_k, two.options.top_k, one.__mro__[1].options) == (1, 2, None)
    assert one.__name__ == "Think"


def test_what_is_no_options_class_is_refused() -> None:
    """A class without field declarations, and a field without default, are refused with the reason."""
    from dataclasses import dataclass

    @dataclass
    class Needy:
        key: str

    with pytest.raises(PluginError, match="is neither a dataclass nor a pydantic model"):
        describe_options(int)
    with pytest.raises(PluginError, match=r"Needy\.key has no default; every option needs one"):
        make_options(Needy, {})


def test_the_server_shows_what_it_was_given() -> None:
    """The settings hold each option with its source, so that `/get_server_info` can show it."""
    flags = parse_flags(["--acme.top-k", "5"])
    assert isinstance(flags, dict)
    assert load_settings(flags).model_dump(mode="json")["plugins"] == {
        "acme": {"top_k": {"value": "5", "source": "--acme.top-k", "is_public": False}}
    }
    assert ServeSettings().plugins == {}


def test_a_class_that_refuses_all_its_values_is_named_in_one_line() -> None:
    """What it checks of them together, and a type that is not defined: the author corrects both."""

    @dataclass
    class Strict:
        low: int = 3

        def __post_init__(self) -> None:
            raise ValueError("low is\nabove high")

    @dataclass
    class Unknown:
        low: "Undefined" = 3  # type: ignore[name-defined]  # noqa: F821, UP037

    with pytest.raises(PluginError, match=r"Strict: low is above high$"):
        make_options(Strict, {})
    with pytest.raises(PluginError, match=r"Unknown: `TypeAdapter.* is not fully defined.*$") as caught:
        make_options(Unknown, {})
    assert "\n" not in str(caught.value)
