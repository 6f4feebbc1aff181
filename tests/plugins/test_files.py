"""`--plugin-file`: a file is a plugin, and whatever is wrong with it stops the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.demo import MODEL_DIR
from dovetail.errors import PluginError
from dovetail.plugins import PluginPlan, Registry, load
from dovetail.plugins.files import add_file
from dovetail.processing.plan import plan_plugins
from dovetail_server.cli.options import load_settings, parse_flags

PARSER = """
from dovetail.contracts import FormatSpec, Markers, ModelPlugin, ReasoningParser
from dovetail.plugins import HealthCheck, hookimpl

class AcmeR2(ReasoningParser):
    def spec(self, tokenizer, template, request):
        return FormatSpec(reasoning=Markers("<r>", "</r>"))

class Named(AcmeR2):
    plugin_name = "other"

class Abstract(ReasoningParser): ...

class Arch(ModelPlugin):
    architectures = ("AForCausalLM", "BForCausalLM")
    @classmethod
    def config_from_hf(cls, hf): ...
    @classmethod
    def build(cls, config, ctx): ...
    @classmethod
    def weight_map(cls, config): ...
"""
HOOK = "\n@hookimpl\ndef dovetail_health(ctx):\n    return HealthCheck(name=ctx.plugin, check=lambda: 'ill')\n"


def plan(*argv: str) -> tuple[Registry, PluginPlan]:
    flags = parse_flags([str(MODEL_DIR), *argv])
    assert isinstance(flags, dict)
    return plan_plugins(load_settings(flags), "Qwen3ForCausalLM")[1:]


def test_its_classes_and_hooks_are_registered_and_load(tmp_path: Path) -> None:
    """Classes get kebab-case names or their own, models their architectures, hooks are enabled; a child can load it."""
    file = tmp_path / "my_parser.py"
    file.write_text(PARSER + HOOK)
    registry, made = plan("--plugin-file", str(file), "--reasoning-parser", "acme-r2")
    ours = {(r.kind, r.name) for r in registry.records if r.distribution == "my_parser.py"}
    assert ours == {
        ("reasoning_parser", "acme-r2"),
        ("reasoning_parser", "other"),
        ("model", "AForCausalLM"),
        ("model", "BForCausalLM"),
        ("hooks", "my-parser"),
    }
    loaded = load(PluginPlan.decode(made.encode()), "api")
    assert loaded.get("reasoning_parser", "acme-r2").__name__ == "AcmeR2"
    assert [planned.name for planned, _ in loaded.all("hooks")] == ["my-parser"]
    record = registry.resolve("reasoning_parser", "my_parser.py:acme-r2")
    assert record.location == str(file)


def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    """A process that finds another file than was planned does not go on."""
    file = tmp_path / "changing.py"
    file.write_text(PARSER)
    _, made = plan("--plugin-file", str(file), "--reasoning-parser", "acme-r2")
    file.write_text(PARSER + "\n")
    with pytest.raises(PluginError, match=r"of changing\.py \w{12}: .*changing\.py has changed since it was planned; "):
        load(made, "api")


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("gone.py", None, r"--plugin-file '.*gone\.py': No such file or directory; give a readable Python file"),
        ("text.txt", "", r"--plugin-file '.*text\.txt': is not a \.py file; install packages with pip"),
        ("empty.py", "", r"--plugin-file empty\.py: defines no plugin; subclass one of ModelPlugin, .* with @hookimpl"),
        ("bad.py", "1 / 0", r"bad\.py: running it raised ZeroDivisionError: division by zero; correct the file"),
        ("exits.py", "raise SystemExit(0)", r"exits\.py: running it raised SystemExit: 0; correct the file"),
        ("slow.py", "import time; time.sleep(60)", r"slow\.py: running it did not end within 0\.2 s; fix or disable"),
    ],
)
def test_a_bad_file_stops_the_start(tmp_path: Path, name: str, source: str | None, message: str) -> None:
    """The message names the file, the reason and the fix."""
    if source is not None:
        (tmp_path / name).write_text(source)
    with pytest.raises(PluginError, match=message):
        add_file(Registry(), tmp_path / name, timeout_s=0.2 if name == "slow.py" else 60)


def test_lists_and_locks_hold_for_files_too(tmp_path: Path) -> None:
    """A file on the deny list is refused by name; a lock refuses every file."""
    file = tmp_path / "denied.py"
    file.write_text(PARSER)
    with pytest.raises(PluginError, match=r"denied\.py \w{12} is blocked: on the deny list"):
        plan("--plugin-file", str(file), "--plugin-deny", "denied.py", "--reasoning-parser", "acme-r2")
    lock = tmp_path / "lock"
    lock.write_text('{"lock": 1, "distributions": []}')
    with pytest.raises(PluginError, match=r"denied\.py': a file cannot be locked; leave out --plugins-locked"):
        plan("--plugin-file", str(file), "--plugins-locked", str(lock))
