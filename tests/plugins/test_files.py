"""`--plugin-file`: a file is a plugin, and whatever is wrong with it stops the start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.contracts.errors import PluginError
from dovetail.demo import MODEL_DIR
from dovetail.plugins import PluginPlan, Registry, load
from dovetail.plugins.files import _others, _warn_of_others, add_file, given_files
from dovetail.processing.plan import plan_plugins
from dovetail_server.cli.options import load_settings, parse_flags
from dovetail_testing.folder import unread_model

PARSER = """
from dovetail.contracts import FormatSpec, Markers, ModelPlugin, ReasoningParser
from dovetail.contracts import HealthCheck, hookimpl

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
    return plan_plugins(load_settings(flags), unread_model())[1:]


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


def model(architectures: str) -> str:
    return f"from dovetail_models.llama import Llama\nclass Own(Llama):\n    architectures = {architectures}\n"


def parser(line: str) -> str:
    source = "from dovetail.contracts import ReasoningParser\nclass Own(ReasoningParser):\n"
    return f"{source}    {line}\n    def spec(self, tokenizer, template, request): ...\n"


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("gone.py", None, r"--plugin-file '.*gone\.py': No such file or directory; give a readable Python file"),
        (
            "text.txt",
            "",
            r"--plugin-file '.*text\.txt': is neither a \.py file nor a folder with an __init__\.py; .* pip",
        ),
        (
            "empty.py",
            "",
            r"--plugin-file '.*empty\.py': defines no plugin; subclass one of ModelPlugin, .* with @hookimpl",
        ),
        (
            "half.py",
            "from dovetail.contracts import KernelSet\nclass Half(KernelSet):\n    def serves(self, ask): ...\n",
            r"--plugin-file '.*half\.py': defines no plugin: Half lacks make; subclass one of",
        ),
        ("letters.py", model("'AForCausalLM'"), r"model Own: architectures = 'AForCausalLM' .*; give a tuple of names"),
        ("number.py", model("5"), r"number\.py': model Own: architectures = 5 names nothing that can be asked for"),
        ("nobody.py", model("()"), r"model Own: architectures = \(\) names nothing"),
        (
            "spaced.py",
            parser("plugin_name = 'acme r2'"),
            r"plugin_name = 'acme r2' names nothing .*; give a name as it",
        ),
        ("empty_name.py", parser("plugin_name = ''"), r"reasoning_parser Own: plugin_name = '' names nothing"),
        ("of_two.py", parser("plugin_name = 'acme:r2'"), r"plugin_name = 'acme:r2' names nothing"),
        (
            "minor.py",
            parser("needs_minor = '0'"),
            r"'own': needs_minor = '0' is no number of a minor version; give one, such as \d+$",
        ),
        ("bad.py", "1 / 0", r"bad\.py': running it raised ZeroDivisionError: division by zero; correct the file"),
        ("exits.py", "raise SystemExit(0)", r"exits\.py': running it raised SystemExit: 0; correct the file"),
        ("slow.py", "import time; time.sleep(60)", r"slow\.py': running it did not end within 0\.2 s; fix or disable"),
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
    with pytest.raises(
        PluginError, match=r"^--plugin-file '.*denied\.py': a file cannot be locked; leave out --plugins-locked"
    ):
        plan("--plugin-file", str(file), "--plugins-locked", str(lock))


def folder_of_plugins(folder: Path) -> Path:
    """A folder with a file, a folder whose `__init__.py` takes two parsers from its own files, and what is none."""
    (folder / "acme" / "inner").mkdir(parents=True)
    (folder / "plain.py").write_text(PARSER)
    (folder / "acme" / "__init__.py").write_text("from .one import First\nfrom .inner.two import Second\n")
    (folder / "acme" / "inner" / "__init__.py").write_text("")
    parser = "from dovetail.contracts import FormatSpec, ReasoningParser\n\nclass {}(ReasoningParser):\n"
    parser += "    def spec(self, tokenizer, template, request):\n        return FormatSpec()\n"
    (folder / "acme" / "one.py").write_text(parser.format("First"))
    (folder / "acme" / "inner" / "two.py").write_text(parser.format("Second"))
    for other in ("README.md", "_draft.py", ".hidden.py"):
        (folder / other).write_text("1 / 0")
    (folder / "data").mkdir()
    return folder


def test_a_folder_of_plugins(tmp_path: Path) -> None:
    """Files and folders in it are plugins; a folder's own files are imported relatively, in another process too."""
    folder = folder_of_plugins(tmp_path / "plugins")
    registry, made = plan("--plugins-dir", str(folder), "--reasoning-parser", "acme:second")
    names = {(r.distribution, r.name) for r in registry.records if r.kind == "reasoning_parser" and r.file}
    assert names == {("plain.py", "acme-r2"), ("plain.py", "other"), ("acme", "first"), ("acme", "second")}
    assert load(PluginPlan.decode(made.encode()), "api").get("reasoning_parser", "second").__name__ == "Second"
    script = "import sys; from dovetail.plugins import PluginPlan, load\n"
    script += "print(load(PluginPlan.decode(bytes.fromhex(sys.argv[1])), 'api').get('reasoning_parser', 'second'))"
    done = subprocess.run(
        [sys.executable, "-c", script, made.encode().hex()], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith(".inner.two.Second'>")


def test_a_file_within_a_folder_that_changed_is_refused(tmp_path: Path) -> None:
    """What a folder was planned as is all of its Python files; planned anew, the new code is what is loaded."""
    folder = folder_of_plugins(tmp_path / "plugins")
    argv = ("--plugin-file", str(folder / "acme"), "--reasoning-parser", "second")
    _, made = plan(*argv)
    inner = folder / "acme" / "inner" / "two.py"
    inner.write_text(inner.read_text() + "    is_new = True\n")
    with pytest.raises(PluginError, match="acme has changed since it was planned"):
        load(made, "api")
    assert load(plan(*argv)[1], "api").get("reasoning_parser", "second").is_new


def test_two_files_of_one_name(tmp_path: Path) -> None:
    """They do not take each other's place; a name that both define is refused."""
    for place, name in (("a", "first"), ("b", "second")):
        (tmp_path / place).mkdir()
        text = PARSER.replace('"other"', f'"{name}"').replace("class AcmeR2", f"class {name.title()}R2")
        text = text.replace("(AcmeR2)", f"({name.title()}R2)").partition("class Arch")[0]
        (tmp_path / place / "same.py").write_text(text)
    files = f"{tmp_path / 'a' / 'same.py'},{tmp_path / 'b' / 'same.py'}"
    for name in ("first-r2", "second-r2"):
        loaded = load(plan("--plugin-file", files, "--reasoning-parser", name)[1], "api")
        assert loaded.get("reasoning_parser", name).__name__ == name.title().replace("-", "")
    (tmp_path / "b" / "same.py").write_text((tmp_path / "a" / "same.py").read_text())
    with pytest.raises(
        PluginError, match=r"same\.py: reasoning_parser 'first-r2': already defined by .*/a/same\.py; give the sec"
    ):
        plan("--plugin-file", files)


def test_a_file_given_twice_is_one(tmp_path: Path) -> None:
    """By itself and in a folder of plugins, or by two names of one place: it is run and registered once."""
    folder = folder_of_plugins(tmp_path / "plugins")
    (tmp_path / "link").symlink_to(folder)
    given = f"{folder / 'plain.py'},{tmp_path / 'link' / 'plain.py'}"
    registry, _ = plan("--plugin-file", given, "--plugins-dir", f"{folder},{tmp_path / 'link'}")
    assert sorted(record.name for record in registry.records if record.distribution == "plain.py") == sorted(
        record.name for record in plan("--plugins-dir", str(folder))[0].records if record.distribution == "plain.py"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, r"--plugins-dir '.*': No such file or directory; give a folder of Python files"),
        (lambda folder: folder.write_text(""), r"--plugins-dir '.*': Not a directory; give a folder of Python files"),
        (lambda folder: folder.mkdir(), r"--plugins-dir '.*': holds no plugin; put Python files into it, or folders"),
        (
            lambda folder: (folder_of_plugins(folder) / "zero.py").write_text("1 / 0"),
            r"^--plugins-dir '.*plugins': zero\.py: running it raised ZeroDivisionError",
        ),
    ],
    ids=["none", "a file", "empty", "one of them fails"],
)
def test_a_bad_folder_stops_the_start(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    """The message names the folder or the file in it, the reason and the fix."""
    make(tmp_path / "plugins")
    with pytest.raises(PluginError, match=message):
        plan("--plugins-dir", str(tmp_path / "plugins"))


def test_plugins_that_others_may_change_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Everybody's file, folder or parent, a sticky folder that takes new files, another owner, a group not ours."""
    folder = folder_of_plugins(tmp_path / "open" / "plugins")
    file = next(path for path in folder.iterdir() if path.suffix == ".py")

    def warned() -> str:
        _warn_of_others.cache_clear()
        caplog.clear()
        given_files([], [str(folder)])
        return caplog.text

    for place in (tmp_path / "open", folder, file):
        place.chmod(place.stat().st_mode & ~0o022)
    assert warned() == ""
    for place, mode, text in (
        (file, 0o666, f"{file} may be written by everybody"),
        (folder, 0o777, f"{folder} may be written by everybody"),
        (folder, 0o1777, f"{folder} may be written by everybody"),
        (tmp_path / "open", 0o777, f"{tmp_path / 'open'} may be written by everybody"),
        (tmp_path / "open", 0o1777, ""),
    ):
        usual = place.stat().st_mode
        place.chmod(mode)
        found = warned()
        place.chmod(usual)
        assert (text in found) if text else found == ""
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "one").symlink_to(tmp_path / "links" / "two")
    (tmp_path / "links" / "two").symlink_to(folder)
    folder, direct = tmp_path / "links" / "one", folder
    assert warned() == ""
    (tmp_path / "links").chmod(0o777)
    assert f"{tmp_path / 'links'} may be written by everybody" in warned()
    folder = direct
    assert _others(file, takes_new=False) == ""
    if os.geteuid() == 0:  # only root gives files away
        os.chown(file, -1, 4321)
        file.chmod(0o664)
        assert _others(file, takes_new=False) == "may be written by group 4321"
        os.chown(file, 4321, -1)
        assert f"{file} belongs to user 4321" in warned()
