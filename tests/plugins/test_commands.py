"""`dovetail plugin info`, `doctor`, `check` and `new`: what they print and what they find."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from dovetail.contracts import errors
from dovetail.plugins import KINDS, Registry
from dovetail.plugins.scan import parse_manifest
from dovetail_server.cli import plugin
from dovetail_server.cli.plugin import doctor
from dovetail_testing.site import FakeSite

PARSER = """
from dataclasses import dataclass, field
from dovetail.contracts import FormatSpec, ReasoningParser
{before}
@dataclass
class Options:
    top_k: int = field(default=4, metadata={{"help": "Candidates."}})

class Parser(ReasoningParser):
    '''Reads nothing.'''
    Options = Options
    def spec(self, tokenizer, template, request):
        return FormatSpec()
"""
PARSERS = "dovetail.reasoning_parsers.v1"


def add(site: FakeSite, name: str = "acme", before: str = "", **entries: str) -> None:
    names = entries or {"acme-r2": f"{name}_parser:Parser"}
    site.add(name, "1.0", {PARSERS: names}, {f"{name}_parser.py": PARSER.format(before=before)})


def run(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert plugin.main(list(argv)) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_info_shows_everything_about_one_plugin(site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    """Package, state, how to use it, what it says of itself, and its options."""
    add(site)
    lines = run(capsys, "info", "Acme_R2").splitlines()
    assert lines == [
        "plugin       reasoning_parser acme-r2",
        "package      acme 1.0",
        "use it       --reasoning-parser acme-r2",
        "also         acme:acme-r2",
        "state        found",
        "API          1",
        "target       acme_parser:Parser",
        f"location     {site.root}",
        "loaded in    api",
        "about        Reads nothing.",
        "options",
        "  --acme-r2.top-k (int)  Candidates. [4]",
    ]


def test_info_of_a_plugin_that_says_nothing_of_itself(site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    """What its contract says is no description of it."""
    source = (
        "from dovetail.contracts import FormatSpec, ReasoningParser\n"
        "class Parser(ReasoningParser):\n    def spec(self, *args):\n        return FormatSpec()\n"
    )
    site.add("plain", "1.0", {PARSERS: {"plain": "plain_parser:Parser"}}, {"plain_parser.py": source})
    assert "about" not in run(capsys, "info", "plain")


def test_info_shows_options_of_a_plugin_that_needs_another_package(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever wonders whether to install that reads what the plugin could do."""
    if find_spec("humming") is not None:
        pytest.skip("humming-kernels is installed")
    out = run(capsys, "info", "humming")
    assert "needs        humming-kernels\n" in out
    assert "  --humming.activations ({model,float8})  Dtype of more rows" in out


def test_info_of_an_unusable_plugin_imports_nothing(site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named with the reason, and no line of it runs."""
    site.add("acme", "1.0", {PARSERS.replace("v1", "v9"): {"acme-r2": "acme_parser:Parser"}}, {"acme_parser.py": "1/0"})
    out = run(capsys, "info", "acme-r2", code=2)
    assert "made for API 9 of reasoning_parser; this dovetail speaks 1; upgrade dovetail-llm" in out.splitlines()[-1]
    assert "ZeroDivisionError" not in out


def test_info_of_what_is_broken_unknown_or_ambiguous(site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    """A plugin that cannot be imported says why; an unknown name lists the known; one name of two kinds asks."""
    add(site, before="1 / 0")
    assert "problem      reasoning_parser 'acme-r2' of acme 1.0: importing" in run(capsys, "info", "acme-r2", code=1)
    assert "error: plugin 'nope': not installed; installed: " in run(capsys, "info", "nope", code=2)
    assert "--kind 'nope': unknown; possible: model, " in run(capsys, "info", "x", "--kind", "nope", code=2)
    site.add("two", "1.0", {PARSERS: {"both": "a:B"}, "dovetail.tool_parsers.v1": {"both": "a:B"}})
    out = run(capsys, "info", "both", code=2)
    assert "'both' is the name of reasoning_parser and tool_parser; add --kind reasoning_parser" in out


def test_doctor_explains_everything_that_is_wrong(
    site: FakeSite, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden installs, conflicts, missing packages, failures, hangs, monkeypatches: one line each with the package."""
    monkeypatch.setenv("PYTHONPATH", str(site.root))
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    add(FakeSite(tmp_path / "other"), "twice")
    add(site, "twice")
    add(site, "acme")
    add(site, "zeta", **{"acme-r2": "zeta_parser:Parser", "qwen3": "zeta_parser:Parser"})
    add(site, "broken", before="1 / 0", broken="broken_parser:Parser")
    add(site, "slow", before="import time; time.sleep(60)", slow="slow_parser:Parser")
    add(
        site,
        "drifty",
        before="import dovetail.contracts.errors; dovetail.contracts.errors.ModelError = 1",
        drifty="drifty_parser:Parser",
    )
    info = site.add("needy", "1.0", {PARSERS: {"needy": "acme_parser:Parser"}}, manifest={"model": {"gone": {}}})
    with (info / "METADATA").open("a") as file:
        file.write("Requires-Dist: no-such-thing>=2\nRequires-Dist: optional; extra == 'x'\n")
    lines = run(capsys, "doctor", "--timeout", "2.5", code=1).splitlines()
    problems = [line.removeprefix("problem: ") for line in lines[:-1]]
    expected = [
        "needy 1.0: manifest describes model 'gone', which has no entry point",
        f"reasoning_parser 'acme-r2' of twice 1.0 is shadowed: hidden by twice 1.0 at {tmp_path}/other; ",
        "--reasoning-parser 'acme-r2' is an error: 3 packages have the name; write acme:acme-r2 or twice:acme-r2 or ",
        "--reasoning-parser 'qwen3' means dovetail-llm:qwen3: 2 packages have the name; "
        "write dovetail-llm:qwen3 or zeta:qwen3",
        "needy needs no-such-thing>=2, which is not installed; run: pip install 'no-such-thing>=2'",
        "reasoning_parser 'broken' of broken 1.0: importing broken_parser raised ZeroDivisionError: division by zero; ",
        "reasoning_parser 'drifty' of drifty 1.0 changed dovetail.contracts.errors.ModelError of Dovetail itself",
        "reasoning_parser 'slow' of slow 1.0: importing slow_parser did not end within 2.5 s; ",
    ]
    for start in expected:
        assert [line for line in problems if line.startswith(start)], (start, "\n".join(problems))
    assert lines[-1].endswith("problems")


def test_doctor_is_content_with_the_built_ins(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is wrong with what Dovetail brings; `--no-load` imports nothing."""
    out = run(capsys, "doctor", "--no-load")
    assert out.endswith("plugins read; no problems\n")


def test_doctor_is_content_without_extras(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes with an extra of the package is left out on purpose: a clean install has no problems."""
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("xgrammar", "pyzmq") else version(name))
    assert run(capsys, "doctor", "--no-load").endswith("plugins read; no problems\n")


def test_new_writes_a_package_for_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind's package parses, registers its name in the kind's group, and has a short test and a README."""
    for kind in KINDS.values():
        name = "AcmeForCausalLM" if kind.name == "model" else "acme-r2"
        folder = tmp_path / kind.name
        run(capsys, "new", kind.name, name, "--dir", str(folder))
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        ((key, target),) = project["entry-points"][kind.entry_point_group].items()
        assert key == name
        module, _, attr = target.partition(":")
        assert f"dovetail {module}".replace("_", "-").endswith(project["name"])
        tree = ast.parse((folder / f"{module}.py").read_text())
        assert attr in {getattr(node, "name", "plugin") for node in tree.body}
        test = (folder / f"test_{module}.py").read_text()
        ast.parse(test)
        longer = ("quantization", "checkpoint", "reasoning_parser", "tool_parser")  # weights; a model's chat template
        most = 14 if kind.name in longer else 6
        assert len([line for line in test.splitlines() if line.strip()]) <= most
        written = [file for file in folder.rglob("*") if file.is_file()]
        assert re.search(r"\{\{\w", "".join(file.read_text() for file in written)) is None
        manifest = json.loads("".join(file.read_text() for file in written if file.suffix == ".json") or "null")
        assert (manifest is not None) == kind.name.endswith("_parser")
        assert manifest is None or parse_manifest(manifest)[kind.name, name].clues


def test_new_refuses_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown kind, a bad name and a folder that holds something are errors with the fix."""
    assert "kind 'parser': unknown; possible: model, " in run(capsys, "new", "parser", "x", code=2)
    assert "name '2x': use letters, digits, - and _" in run(capsys, "new", "hooks", "2x", code=2)
    (tmp_path / "file").write_text("")
    assert "is not empty; give another --dir" in run(capsys, "new", "hooks", "x", "--dir", str(tmp_path), code=2)


def test_new_says_whose_a_name_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name or alias that another package has gets a note, as the kit would look at that one; others get none."""
    said = run(capsys, "new", "reasoning_parser", "qwen3", "--dir", str(tmp_path / "a"))
    assert "note: qwen3 is dovetail-llm's, also in the test of this package; write dovetail-qwen3:qwen3, or" in said
    assert "note" in run(capsys, "new", "reasoning_parser", "interns1", "--dir", str(tmp_path / "b"))
    assert "note" not in run(capsys, "new", "tool_parser", "qwen3", "--dir", str(tmp_path / "c"))


def test_check_runs_the_kit(
    site: FakeSite, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dovetail plugin check` runs the conformance kit on what is installed and fails where it fails."""
    monkeypatch.setattr(
        errors, "ModelError", errors.ModelError
    )  # puts back what the plugin changes, in this process too
    monkeypatch.setenv("PYTHONPATH", str(site.root))
    add(site)
    assert "passed" in run(capsys, "check", "acme-r2")
    add(
        site,
        "drifty",
        before="import dovetail.contracts.errors; dovetail.contracts.errors.ModelError = 1",
        drifty="drifty_parser:Parser",
    )
    out = run(capsys, "check", "drifty", code=1)
    assert "loading it changed the core: dovetail.contracts.errors.ModelError" in out


def test_a_name_of_two_packages_is_checked_by_package(
    site: FakeSite, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check` asks which one is meant, and takes the qualified name."""
    monkeypatch.setenv("PYTHONPATH", str(site.root))
    add(site)
    add(site, "zeta", before="raise ValueError('zeta is broken')", **{"acme-r2": "zeta_parser:Parser"})
    said = run(capsys, "check", "acme-r2", code=2)
    assert "'acme-r2': provided by 2 packages; choose one: acme:acme-r2 or zeta:acme-r2" in said
    assert "0 failed" not in (out := run(capsys, "check", "acme:acme-r2"))
    assert "passed" in out
    assert "zeta is broken" in run(capsys, "check", "zeta:acme-r2", code=1)


KIT = """
from dovetail_testing import ReasoningParserConformance, Sample, ToolParserConformance

class TestRight(ReasoningParserConformance):
    name = "acme-r2"
    samples = [Sample("answer", content="answer")]

class TestWrong(ReasoningParserConformance):
    name = "acme:acme-r2"
    samples = [Sample("answer", content="another")]

class TestOther(ToolParserConformance):
    name = "acme-r2"

class Nameless(ReasoningParserConformance): ...
"""


def with_kit(site: FakeSite, **classes: str) -> None:
    add(site)
    groups = {PARSERS: {"acme-r2": "acme_parser:Parser"}, "dovetail.conformance": classes}
    site.add("acme", "1.0", groups, {"acme_kit.py": KIT})


def test_check_runs_what_a_package_brings_for_its_plugin(
    site: FakeSite, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each class of the plugin's kind and name is run, and one that fails is enough; others are not its business."""
    monkeypatch.setenv("PYTHONPATH", str(site.root))
    with_kit(site, a="acme_kit:TestRight", b="acme_kit:TestOther")
    out = run(capsys, "check", "acme-r2")
    assert "reasoning_parser acme:acme-r2 as TestRight" in out
    assert "TestOther" not in out
    assert "no samples declared" not in out
    with_kit(site, a="acme_kit:TestRight", b="acme_kit:TestWrong")
    out = run(capsys, "check", "acme-r2", code=1)
    assert "as TestRight" in out
    assert "as TestWrong" in out
    assert "it declares content='another'" in out
    assert {item["kind"] for item in json.loads(run(capsys, "list", "--json"))["data"] if item["name"] == "a"} == set()


def test_plugin_files_are_shown_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Alone and by their folder, as what is installed; without the flag there is no such plugin."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "one.py").write_text(PARSER.format(before="").replace("class Parser", "class AcmeR2"))
    for flag, place in {"--plugins-dir": folder, "--plugin-file": folder / "one.py"}.items():
        lines = run(capsys, "info", "acme-r2", flag, str(place)).splitlines()
        assert f"location     {folder / 'one.py'}" in lines
        assert "  --acme-r2.top-k (int)  Candidates. [4]" in lines
    report = run(capsys, "check", "acme-r2", "--plugins-dir", str(folder))
    assert report.startswith("reasoning_parser acme-r2\n")
    assert " passed, " in report.splitlines()[-1]
    (folder / "one.py").write_text(PARSER.format(before="").replace("FormatSpec()", "None").replace("Parser(", "Acme("))
    assert "failed" in run(capsys, "check", "acme", "--plugins-dir", str(folder), code=1)
    assert "'acme': not installed" in run(capsys, "check", "acme", code=2)


def test_doctor_loads_plugin_files(
    site: FakeSite, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be run, and one that fails in a process of its own; a folder that is not there ends it."""
    monkeypatch.setattr(doctor, "scan_as_configured", Registry)
    folder = tmp_path / "plugins"
    folder.mkdir()
    before = "import sys\nif 'dovetail_server.cli.plugin.probe' in sys.orig_argv: raise ValueError('only there')"
    (folder / "later.py").write_text(PARSER.format(before=before))
    (folder / "wrong.py").write_text("1 / 0\n")
    lines = run(capsys, "doctor", "--plugins-dir", str(folder), code=1).splitlines()
    where = f"problem: --plugins-dir {str(folder)!r}: wrong.py: running it raised ZeroDivisionError"
    assert any(line.startswith(where) for line in lines)
    assert any("later.py" in line and "ValueError: only there" in line for line in lines)
    assert lines[-1] == "1 plugins read and loaded; 2 problems"
    gone = run(capsys, "doctor", "--plugins-dir", str(folder / "none"), code=2)
    assert "none': No such file or directory; give a folder of Python files" in gone


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "gone_kit:Test",
            "importing gone_kit:Test raised ModuleNotFoundError: No module named 'gone_kit'; correct the",
        ),
        ("acme_kit:Sample", "acme_kit:Sample is no conformance class with a name; see dovetail_testing"),
        ("acme_kit:Nameless", "acme_kit:Nameless is no conformance class with a name; see dovetail_testing"),
    ],
)
def test_check_refuses_classes_that_cannot_be_used(
    site: FakeSite, capsys: pytest.CaptureFixture[str], target: str, message: str
) -> None:
    """A slip in the entry point is not passed over: the samples would never be run."""
    with_kit(site, mine=target)
    assert f"error: acme 1.0: dovetail.conformance 'mine': {message}" in run(capsys, "check", "acme-r2", code=2)


def test_validate_checks_a_project_that_is_not_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `new` writes passes as it is; a wrong sample, a crash and wrong metadata are found; nothing stays behind."""
    before = list(sys.path), os.environ.get("PYTHONPATH")
    folder = tmp_path / "acme"
    run(capsys, "new", "reasoning_parser", "acme-r2", "--dir", str(folder))
    out = run(capsys, "validate", str(folder))
    assert out.startswith("dovetail-acme-r2 0.1.0: reasoning_parser 'acme-r2'\n")
    assert "as TestAcmeR2" in out
    assert out.endswith("plugins: 1, problems: 0, kit failures: none\n")
    assert (list(sys.path), os.environ.get("PYTHONPATH")) == before
    assert "plugin 'acme-r2': not installed" in run(capsys, "info", "acme-r2", code=2)

    project = folder / "pyproject.toml"
    right = project.read_text()
    (folder / "dovetail_acme_r2.py").write_text("import os\nos.abort()\n")
    wrong = right.replace('"dovetail.conformance"]', '"dovetail.reasoning_parsers.v9"]\nnew = "a:B"\n[tool.x]')
    project.write_text(wrong.replace('acme-r2 = "dovetail_acme_r2_facts"', 'acme = "no_such_facts"'))
    out = run(capsys, "validate", str(folder), code=1)
    assert "problem: reasoning_parser 'new' is incompatible: made for API 9 of reasoning_parser; " in out
    assert "problem: dovetail-acme-r2 0.1.0: manifest of 'no_such_facts' ignored: package 'no_such_facts' is not" in out
    assert "plugins: 2, problems: 2, kit failures: dovetail-acme-r2:acme-r2\n" in out
    assert 'in pyproject.toml: [project.entry-points."dovetail.conformance"] NAME = "MODULE:CLASS"\n' in out
    project.write_text(right.replace(">=3.11", ">=9"))
    out = run(capsys, "validate", str(folder), code=1)
    assert "MODULE:CLASS" not in out
    assert "problem: reasoning_parser 'acme-r2' is incompatible: it requires Python >=9" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "pyproject.toml': No such file or directory; give the folder of a plugin's project"),
        ("[project\n", "pyproject.toml': Expected ']' at the end of a table declaration"),
        ("[tool.x]\n", "pyproject.toml': has no project.name; `dovetail plugin new` writes one to start from"),
        ("[project]\nname = 'x'\n", "pyproject.toml': has no entry point of Dovetail; groups: dovetail.models.v1, "),
        ("[project]\nname = 'x'\nentry-points = 3\n", "project.entry-points is no table of name ="),
        (
            "[project]\nname = 'x'\n[project.entry-points.'dovetail.hooks.v1']\na = 1\n",
            "'dovetail.hooks.v1' is no table",
        ),
    ],
)
def test_validate_says_what_is_wrong_with_a_project(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    """A folder that is no plugin's project is one line and exit code 2."""
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    out = run(capsys, "validate", str(tmp_path), code=2)
    assert message in out
    assert out.count("\n") == 1
