"""The pages that are generated say something of everything that they are of."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from stage import load

ROOT = Path(__file__).parents[2]


def test_every_hook_and_contract_is_described() -> None:
    """No hook, contract or method to implement is without words of its own."""
    from dovetail import contracts

    module = load(ROOT / "docs/reference/contracts.py")
    for name, function in module.API.hook_functions().items():
        assert module.prose(function), name
    for name in contracts.__all__:
        value = getattr(contracts, name)
        if isinstance(value, type):
            assert value.__doc__, name
            for key, member in module.API.public_members(value):
                function = member.__func__ if isinstance(member, classmethod) else member
                if getattr(function, "__isabstractmethod__", False) and key != "__init__":
                    assert module.prose(member), f"{name}.{key}"


def test_every_operation_stands_in_the_reference() -> None:
    """With operands and result, and with the function that says what it computes."""
    from dovetail.contracts.kernels import OPS

    page = load(ROOT / "docs/reference/contracts.py").page()
    for name, row in OPS.items():
        [line] = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert row.signature in line.replace("\\|", "|")
        assert row.meaning in line


def test_members_are_shown_as_they_are_written() -> None:
    """Types in the author's words, defaults, and what stands below an attribute."""
    page = load(ROOT / "docs/reference/contracts.py").page()
    assert "ForwardRef" not in page
    assert "- `overwrites: frozenset[str] = frozenset()`\n" in page
    assert "- `devices: ClassVar[frozenset[str]]`: Kinds of devices that it has kernels for;" in page


def test_every_name_of_the_sdk_is_described() -> None:
    """Each class, method and function that plugins are built with has words of its own, and a place on the page."""
    sdk = load(ROOT / "docs/reference/sdk.py")
    api, page = sdk.CONTRACTS.API, sdk.page()
    for home, name, value in api.sdk_names():
        assert value.__doc__, f"{home}.{name}"
        assert f"### `{name}`" in page, f"{home}.{name}"
        for key, member in api.public_members(value) if isinstance(value, type) else ():
            if isinstance(member, property) or callable(member):
                assert inspect.getdoc(getattr(value, key)), f"{home}.{name}.{key}"


@pytest.fixture
def directory() -> Any:
    """The module that writes the plugin directory."""
    return load(ROOT / "docs/reference/directory.py")


def install(folder: Path, metadata: str, entry_points: str) -> None:
    """Put a distribution's metadata on a path, as an installer would."""
    info = folder / "acme_pack-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")


def test_an_installed_package_is_in_the_plugin_directory(
    directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its summary, the start of its README, its licence, its links and its plugins by kind."""
    metadata = """Metadata-Version: 2.4
Name: acme-pack
Version: 2.1
Summary: Parsers for Acme's models
License-Expression: MIT
Project-URL: Source, https://example.org/acme
Project-URL: Bad, javascript:alert(1)

# acme-pack

[![build](https://example.org/badge.svg)](https://example.org)

It reads what [Acme's](https://example.org/a) models write.
"""
    install(
        tmp_path, metadata, "[dovetail.reasoning_parsers.v1]\nr2 = acme:R2\nr1 = acme:R1\n[console_scripts]\nx = y:z\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    part = directory.page().partition("## acme-pack\n")[2].partition("\n## ")[0]
    assert "Parsers for Acme's models." in part
    assert "It reads what Acme's models write." in part
    assert "Version 2.1, MIT, [Source](https://example.org/acme)." in part
    assert "| `reasoning_parser` | `r1`, `r2` |" in part
    assert "javascript" not in part


def test_what_a_package_says_of_itself_is_shown_as_text(
    directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its markup does nothing on our page."""
    metadata = "Metadata-Version: 2.1\nName: acme-pack\nVersion: 2.1\nSummary: <script>x</script> [a](b) | c\n"
    install(tmp_path, metadata, "[dovetail.hooks.v1]\ndesk = acme:plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert r"\<script\>x\</script\> \[a\](b) \| c." in directory.page()


def test_every_example_is_in_the_plugin_directory(directory: Any) -> None:
    """They are read from the tree, installed or not."""
    page = directory.page()
    for path in (ROOT / "docs/examples").glob("*/pyproject.toml"):
        assert f"\n## {path.parent.name}\n" in page


FORBIDDEN = ("AGPL", "GPL-2", "GPL-3", "GPLv", "SSPL", "BUSL", "Proprietary", "Commercial", "NC-", "not stated")


@pytest.mark.full
def test_no_dependency_has_a_licence_that_forbids() -> None:
    """Every package that users install states a licence, and none keeps Dovetail from being passed on."""
    licences = load(ROOT / "docs/reference/licences.py")
    programs = [one for one in licences.dependencies() if one.name in licences.PROGRAMS]
    assert all(one.extra == licences.PROGRAMS[one.name] for one in programs)
    found = [one for one in licences.dependencies() if one not in programs]
    names = {dependency.name for dependency in found}
    assert {"torch", "transformers", "fastapi", "pluggy", "psycopg"} <= names
    assert not names & {"pytest", "mypy", "ruff"}
    words = [(found_one.name, found_one.licence.replace("LGPL-3.0", "")) for found_one in found]
    assert [(name, licence) for name, licence in words if any(word in licence for word in FORBIDDEN)] == []
