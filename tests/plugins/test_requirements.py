"""What a package requires of Dovetail, of Python and of an API's minor version is held, whoever installed it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.contracts.errors import PluginError
from dovetail.plugins import Registry, load, make_plan
from dovetail.plugins.files import add_file
from dovetail.plugins.kinds import KINDS, SDK_MINOR, PluginKind
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.plugins.records import PluginState
from dovetail_server.cli import serve
from dovetail_testing import FakeSite

PARSER = """
from dovetail.contracts import FormatSpec, Markers, ReasoningParser

class Acme(ReasoningParser):
    needs_minor = 0

    def spec(self, tokenizer, template, request):
        return FormatSpec(reasoning=Markers("<r>", "</r>"))
"""
GROUP = "dovetail.reasoning_parsers.v1"
OLD = "it requires 'dovetail', another project's package; take a version that requires 'dovetail-llm'"


def add(site: FakeSite, *requires: str, source: str = PARSER) -> Registry:
    """A package with a parser, and what is found of it."""
    site.add("acme", "1.2", {GROUP: {"acme": "acme_parser:Acme"}}, {"acme_parser.py": source}, requires=requires)
    return Registry.scan(path=[str(site.root)])


@pytest.mark.parametrize(
    ("requires", "reason"),
    [
        ("Requires-Dist: dovetail-llm>=99", "it requires dovetail-llm >=99, this is "),
        ("Requires-Dist: Dovetail_LLM<0.0.1", "it requires dovetail-llm <0.0.1, this is "),
        ("Requires-Dist: dovetail-llm>=99; python_version >= '3'", "it requires dovetail-llm >=99, this is "),
        ("Requires-Python: >=4", "it requires Python >=4, this is 3."),
        ("Requires-Dist: dovetail-llm>>=1", "its requirements cannot be read: "),
        ("Requires-Python: new", None),
        ("Requires-Python: >=new", "its requirements cannot be read: "),
        ("Requires-Dist: dovetail-llm>=0.0.1", None),
        ("Requires-Dist: dovetail-llm", None),
        ("Requires-Dist: dovetail", OLD),
        ("Requires-Dist: dovetail >=0.0.1", OLD),
        ("Requires-Dist: dovetail; extra == 'later'", None),
        ("Requires-Dist: dovetail-llm>=99; extra == 'later'", None),
        ("Requires-Dist: dovetail-extras>=99", None),
        ("Requires-Dist: torch>=99", None),
        ("Requires-Python: >=3.9", None),
    ],
)
def test_a_package_installed_against_its_requirements_is_refused(
    site: FakeSite, requires: str, reason: str | None
) -> None:
    """It is listed with the reason and the fix, and using its name says so; other packages are none of our business."""
    registry = add(site, requires)
    (record,) = registry.records
    if reason is None:
        assert (record.state, record.reason) == (PluginState.FOUND, "")
        return
    assert record.state is PluginState.INCOMPATIBLE
    assert record.reason.startswith(reason)
    with pytest.raises(PluginError, match=r"--reasoning-parser 'acme': installed but not usable: acme 1.2 is incompat"):
        make_plan(registry, reasoning_parser="acme")


def test_a_class_that_needs_a_later_minor_version_is_refused(site: FakeSite) -> None:
    """One line, when it is loaded: what it needs, what is spoken, what to do."""
    registry = add(site, source=PARSER.replace("needs_minor = 0", "needs_minor = 7"))
    with pytest.raises(PluginError) as error:
        load(make_plan(registry, reasoning_parser="acme"), "api")
    assert str(error.value) == (
        "reasoning_parser 'acme' of acme 1.2: it needs API 1.7 of reasoning_parser, this dovetail speaks 1.0; "
        "upgrade dovetail-llm"
    )


@pytest.mark.parametrize(
    ("requires", "source", "said"),
    [
        (["Requires-Dist: dovetail-llm>=99"], PARSER, "it requires dovetail-llm >=99, this is "),
        (["Requires-Dist: dovetail>=0.1"], PARSER, OLD),
        (["Requires-Python: >=4"], PARSER, "it requires Python >=4, this is 3."),
        ([], PARSER.replace("needs_minor = 0", "needs_minor = 7"), "it needs API 1.7 of reasoning_parser"),
    ],
)
def test_the_start_ends_with_one_line(
    site: FakeSite, requires: list[str], source: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dovetail serve` with such a plugin: exit code 2, and one line that says why, before anything is loaded."""
    add(site, *requires, source=source)
    assert serve.main(["--reasoning-parser", "acme", "--port", "0"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert errors[0].count(said) == 1


def late(kind: PluginKind, name: str, needed: int) -> tuple[str, str]:
    """A module whose plugin of a kind says what it needs, and the attribute that holds it."""
    if kind.contract is None:
        text = "import sys\nfrom dovetail.contracts import hookimpl\n@hookimpl\ndef dovetail_process_stop(ctx): ...\n"
        return f"{text}{name} = {needed}\nplugin = sys.modules[__name__]\n", ":plugin"
    home, _, contract = kind.contract.partition(":")
    text = f"from {home} import {contract} as Base\nclass Acme(Base):\n    plugin_name = 'acme'\n"
    text += f"    architectures = ('acme',)\n    {name} = {needed}\nAcme.__abstractmethods__ = frozenset()\n"
    return text, ":Acme"


def spoken(kind: PluginKind, name: str) -> tuple[str, int]:
    """What a later version is said to be of, and the minor version that there is."""
    return (kind.name, kind.minor) if name == "needs_minor" else ("dovetail.sdk", SDK_MINOR)


@pytest.mark.parametrize("name", ["needs_minor", "needs_sdk"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_a_file_that_needs_a_later_minor_version_is_refused(tmp_path: Path, kind: PluginKind, name: str) -> None:
    """Of every kind, where the file is read: nobody has named it, and `auto` has not looked at it."""
    what, minor = spoken(kind, name)
    (tmp_path / "fits.py").write_text(late(kind, name, minor)[0])
    (tmp_path / "acme.py").write_text(late(kind, name, 99)[0])
    registry = Registry()
    add_file(registry, tmp_path / "fits.py")
    with pytest.raises(PluginError) as error:
        add_file(registry, tmp_path / "acme.py")
    assert str(error.value) == (
        f"--plugin-file {str(tmp_path / 'acme.py')!r}: {kind.name} 'acme': it needs API 1.99 of {what}, "
        f"this dovetail speaks 1.{minor}; upgrade dovetail-llm"
    )
    assert [(record.kind, record.distribution) for record in registry.records] == [(kind.name, "fits.py")]


@pytest.mark.parametrize("name", ["needs_minor", "needs_sdk"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_an_installed_plugin_that_needs_a_later_minor_version_is_refused(
    site: FakeSite, kind: PluginKind, name: str
) -> None:
    """Of every kind, where it is imported; one that needs what there is is not refused for that."""
    what, minor = spoken(kind, name)
    for needed in (minor, 99):
        source, attr = late(kind, name, needed)
        module = f"acme_{kind.name}_{name}_{needed}"
        site.add(
            f"acme-{needed}", "1.0", {kind.entry_point_group: {f"a{needed}": module + attr}}, {f"{module}.py": source}
        )
    records = {record.name: record for record in Registry.scan(path=[str(site.root)]).of_kind(kind.name)}
    import_planned(as_planned(records[f"a{minor}"]))
    with pytest.raises(PluginError) as error:
        import_planned(as_planned(records["a99"]))
    assert str(error.value) == (
        f"{kind.name} 'a99' of acme-99 1.0: it needs API 1.99 of {what}, this dovetail speaks 1.{minor}; "
        "upgrade dovetail-llm"
    )


def test_a_minor_version_in_words_is_the_authors_to_mend(site: FakeSite) -> None:
    """The line says what to write; no other version of Dovetail would read it."""
    source = {"worded.py": PARSER.replace("needs_minor = 0", "needs_minor = 'two'")}
    site.add("worded", "1.0", {"dovetail.reasoning_parsers.v1": {"worded": "worded:Acme"}}, source)
    with pytest.raises(
        PluginError, match=r"needs_minor = 'two' is no number of a minor version; give one, such as \d+$"
    ):
        import_planned(as_planned(Registry.scan(path=[str(site.root)]).of_kind("reasoning_parser")[0]))


@pytest.mark.parametrize("by_folder", [False, True])
def test_such_a_file_ends_the_start_with_one_line(
    tmp_path: Path, by_folder: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dovetail serve` with it, unnamed: exit code 2 and nothing on standard error beside the line."""
    file = tmp_path / "late.py"
    file.write_text(PARSER.replace("needs_minor = 0", "needs_minor = 99"))
    given = ["--plugins-dir", str(tmp_path)] if by_folder else ["--plugin-file", str(file)]
    assert serve.main([*given, "--port", "0"]) == 2
    where = f"--plugins-dir {str(tmp_path)!r}: late.py" if by_folder else f"--plugin-file {str(file)!r}"
    said = f"{where}: reasoning_parser 'acme': it needs API 1.99 of reasoning_parser, "
    assert [said in line for line in capsys.readouterr().err.splitlines()] == [True]
