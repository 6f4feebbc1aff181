"""`dovetail plugin check --next-minor`: what Dovetail's next minor version ends fails today, where it is asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import dovetail
from dovetail.plugins import Registry
from dovetail.plugins.kinds import KINDS
from dovetail_server.cli import plugin
from dovetail_testing import FakeSite, next_minor

SOURCE = """
import warnings
from dovetail.contracts import FormatSpec, Markers, ReasoningParser

class Parser(ReasoningParser):
    def spec(self, tokenizer, template, request):
        return FormatSpec(reasoning=Markers("<r>", "</r>"))
"""
GROUP = "dovetail.reasoning_parsers.v1"
MAJOR, MINOR = map(int, dovetail.__version__.split(".")[:2])
CLAIMS = [rule.claim for rule in next_minor.RULES]
WARN = "warnings.warn('old_name: use new_name', {})"


@pytest.fixture
def add(site: FakeSite, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Install a package whose module holds `SOURCE` with a line before it, or in its method."""
    monkeypatch.setenv("PYTHONPATH", str(site.root))

    def install(name: str, before: str = "", within: str = "", requires: str = "dovetail-llm") -> str:
        source = before + SOURCE.replace(
            "        return", f"        {within}\n        return" if within else "        return"
        )
        files = {
            f"{name}_parser.py": source,
            "other_library.py": f"import warnings\ndef f(): {WARN}".format("DeprecationWarning"),
        }
        site.add(name, "1.0", {GROUP: {name: f"{name}_parser:Parser"}}, files, requires=[f"Requires-Dist: {requires}"])
        return name

    return install


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = plugin.main(["check", *argv])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_what_is_right_passes_every_rule(add, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    """The same kit runs, and a line for each rule follows; without the flag there is neither line nor note."""
    code, said = run(capsys, add("clean"), "--next-minor")
    assert code == 0, said
    assert [line.strip().removeprefix("passed  ") for line in said.splitlines()][-len(CLAIMS) :] == CLAIMS
    code, plain = run(capsys, "clean")
    assert (code, plain.strip()) == (0, said.split("\n passed  " + CLAIMS[0])[0].strip())


@pytest.mark.parametrize(
    ("name", "given", "claim", "fault"),
    [
        (
            "bound",
            {"requires": f"dovetail-llm<{MAJOR}.{MINOR + 1}"},
            CLAIMS[0],
            f"it requires dovetail-llm <{MAJOR}.{MINOR + 1}, this is {MAJOR}.{MINOR + 1}.0; ",
        ),
        (
            "private",
            {"before": "from dovetail.text.parsing.stream import OutputStream"},
            CLAIMS[1],
            "it imports dovetail.text.parsing.stream (private_parser.py); use dovetail.contracts and dovetail.sdk",
        ),
        (
            "ending",
            {"within": "import dovetail.plugins.hookspecs"},
            CLAIMS[2],
            "it imports dovetail.plugins.hookspecs (ending_parser.py); import hookimpl and what hooks are given from",
        ),
    ],
)
def test_what_ends_is_a_note_today_and_fails_by_the_next_rules(  # type: ignore[no-untyped-def]
    name: str, given: dict[str, str], claim: str, fault: str, add, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, under the claim that does not hold; the other claims do."""
    code, said = run(capsys, add(name, **given))
    assert code == 0, said
    assert f"note: Dovetail's next minor version may break it: {fault}" in said
    code, said = run(capsys, name, "--next-minor")
    assert code == 1, said
    assert f" failed  {claim}\n         {fault}" in said
    assert all(f" passed  {other}" in said for other in CLAIMS if other != claim)


@pytest.mark.filterwarnings("default")  # as outside of this suite, where warnings are no errors
@pytest.mark.first(1)
@pytest.mark.parametrize("category", next_minor.DEPRECATIONS)
def test_what_is_deprecated_fails_where_the_plugin_uses_it(  # type: ignore[no-untyped-def]
    category: type[Warning], add, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is imported and within a test of the kit; today's kit lets both pass."""
    name = category.__name__.lower()
    early = add(f"early_{name}", before=f"import warnings\n{WARN.format(category.__name__)}")
    late = add(f"late_{name}", within=WARN.format(category.__name__))
    for given in (early, late):
        code, said = run(capsys, given)
        assert code == 0, said
    del sys.modules[f"{early}_parser"]  # else it is not imported again
    for given in (early, late):
        code, said = run(capsys, given, "--next-minor")
        assert (code, "old_name: use new_name" in said) == (1, True), said


@pytest.mark.filterwarnings("default")
def test_what_others_deprecate_fails_nothing(add, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    """A warning that another package causes is not the plugin's."""
    code, said = run(capsys, add("user", within="import other_library; other_library.f()"), "--next-minor")
    assert code == 0, said


def test_a_previous_api_version_may_end(add, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """It is spoken for one minor version, so a plugin that has only it is told where to register."""
    name = add("old")
    record = Registry.scan().resolve("reasoning_parser", name)
    assert next_minor.RULES[3].faults(record) == []
    monkeypatch.setitem(KINDS, "reasoning_parser", KINDS["reasoning_parser"]._replace(api=2))
    (fault,) = next_minor.RULES[3].faults(record)
    assert fault == "it is written for API 1 of reasoning_parser; register it in dovetail.reasoning_parsers.v2, too"


def test_a_plugin_file_is_checked_by_the_same_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own imports count; it has no requirements."""
    file = tmp_path / "mine.py"
    file.write_text("from dovetail.text.parsing.stream import OutputStream\n" + SOURCE)
    code, said = run(capsys, "parser", "--plugin-file", str(file), "--next-minor")
    assert code == 1, said
    assert "it imports dovetail.text.parsing.stream (mine.py)" in said


def test_the_built_in_plugins_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """One of them: they stand on contracts and SDK alone."""
    code, said = run(capsys, "dovetail-llm:seed-oss", "--kind", "reasoning_parser", "--next-minor")
    assert code == 0, said
