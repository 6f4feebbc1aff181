"""`dovetail plugin list`: what it prints and what it must not import."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.base.distribution import DISTRIBUTION
from dovetail.contracts.errors import PluginError
from dovetail.demo import MODEL_DIR
from dovetail.plugins.registry import Registry
from dovetail.processing.plan import plan_plugins
from dovetail_server.cli import plugin
from dovetail_server.cli.options import load_settings, parse_flags
from dovetail_testing.folder import unread_model
from dovetail_testing.site import FakeSite

HEAVY = ("torch", "pydantic", "fastapi", "transformers", "numpy", "pluggy", "rich")
BUILTIN_PACKAGES = ("dovetail_models", "dovetail_parsers", "dovetail_backends", "dovetail_grammar")


def run(code: str) -> str:
    """Run Python code in a fresh process and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_list_imports_no_plugin_and_nothing_heavy() -> None:
    """The command lists the built-ins without importing torch, pydantic, fastapi or any plugin."""
    out = run(
        "import sys\nfrom dovetail_server.cli import main\nmain(['plugin', 'list'])\n"
        f"print('IMPORTED', sorted(set({(*HEAVY, *BUILTIN_PACKAGES)!r}) & set(sys.modules)))"
    )
    assert "qwen3" in out
    assert out.splitlines()[-1] == "IMPORTED []"


def test_table_has_one_aligned_line_per_plugin(site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    """Kind, name, state, distribution, version, and aliases or the reason, in columns."""
    site.add(
        "acme",
        "2.0",
        {"dovetail.tool_parsers.v1": {"t1": "a:B"}},
        manifest={"tool_parser": {"t1": {"aliases": ["t-one"]}}},
    )
    site.add("old-acme", "0.1", {"dovetail.models.v0": {"OldForCausalLM": "a:B"}})
    print(plugin.table(Registry.scan(path=[str(site.root)]).sorted()))
    assert capsys.readouterr().out.splitlines() == [
        "KIND         NAME            STATE         DISTRIBUTION  VERSION  NOTES",
        "model        OldForCausalLM  incompatible  old-acme      0.1      made for API 0 of model; "
        "this dovetail speaks 1; upgrade old-acme",
        "tool_parser  t1              found         acme          2.0      also: t-one",
    ]


def test_json_is_the_registry_listing(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints what GET /v1/plugins returns, built-ins included."""
    assert plugin.main(["list", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing == Registry.scan().listing()
    assert {"qwen3", "deepseek-r1"} <= {item["name"] for item in listing["data"]}


def test_manifest_problems_go_to_stderr(site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest that cannot be used is a warning beside the table."""
    site.add("acme", entry_points={"dovetail.manifest": {"acme": "no_such_package"}})
    assert plugin.main(["list"]) == 0
    assert "warning: acme 1.0: manifest of 'no_such_package' ignored" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["lst"], ["list", "--jsn"]])
def test_wrong_arguments_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong arguments print usage and exit with code 2."""
    with pytest.raises(SystemExit) as caught:
        plugin.main(argv)
    assert caught.value.code == 2
    assert "usage: dovetail plugin" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "name"), {r.kind: r.name for r in Registry.scan().records if r.builtin}.items())
def test_every_builtin_can_be_removed(tmp_path: Path, kind: str, name: str) -> None:
    """With its entry point gone a built-in, one of each kind, is "not installed; installed: …"."""
    distribution = importlib.metadata.distribution(DISTRIBUTION)
    ours = (
        Path(str(distribution.locate_file(""))) / f"{DISTRIBUTION.replace('-', '_')}-{distribution.version}.dist-info"
    )
    copy = tmp_path / ours.name
    shutil.copytree(ours, copy)
    lines = (ours / "entry_points.txt").read_text().splitlines()
    copy.joinpath("entry_points.txt").write_text("\n".join(ln for ln in lines if not ln.startswith(f"{name} =")))
    rest = sorted(r.name for r in Registry.scan().of_kind(kind) if r.builtin and r.name != name)
    with pytest.raises(PluginError) as caught:
        Registry.scan(path=[str(tmp_path)]).resolve(kind, name)
    assert f"{name!r}: not installed; installed: {', '.join(rest) or 'none'}; " in str(caught.value)


FORMS = {
    "repeated": lambda a, b: [a, b],
    "with a comma": lambda a, b: [f"{a}, {b}"],
    "JSON": lambda a, b: [f'["{a}", "{b}"]'],
}


@pytest.mark.parametrize("form", FORMS)
def test_plugin_files_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    """Alone and by their folder, in each form of a list that `dovetail serve` reads; what cannot be used is said."""
    code = "from dovetail.contracts.reasoning import ReasoningParser\nclass {0}(ReasoningParser):\n    spec = None\n"
    names = {"plugin-file": ("one", "two"), "plugins-dir": ("three", "four")}
    given = []
    for flag, pair in names.items():
        files = [tmp_path / name / f"{name}.py" for name in pair]
        for file in files:
            file.parent.mkdir()
            file.write_text(code.format(file.stem.title()))
        places = files if flag == "plugin-file" else [file.parent for file in files]
        given += [word for value in FORMS[form](*places) for word in (f"--{flag}", str(value))]
    flags = parse_flags([str(MODEL_DIR), *given])
    assert isinstance(flags, dict)
    registry = plan_plugins(load_settings(flags), unread_model())[1]
    served = {record.name for record in registry.records if record.file}
    assert plugin.main(["list", *given]) == 0
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    for name in (name for pair in names.values() for name in pair):
        assert name in served
        assert ["reasoning_parser", name, "found"] in lines


def test_a_folder_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `dovetail serve` says it, also as the second of a list."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "one.py").write_text(
        "from dovetail.contracts import hookimpl\n@hookimpl\ndef dovetail_health(ctx): ...\n"
    )
    assert plugin.main(["list", "--plugins-dir", f"{tmp_path / 'one'},{tmp_path / 'none'}"]) == 2
    assert "none': No such file or directory; give a folder of Python files" in capsys.readouterr().err
