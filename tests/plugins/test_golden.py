"""The public signatures are those of the golden file: what plugins rely on changes on purpose only."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent / "golden"


def update() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_update", HERE / "update.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_public_signatures_are_the_golden_ones() -> None:
    """Contracts, hooks and the kit's classes have the recorded signatures; else the message says what to do."""
    module = update()
    golden, now = (HERE / "public_api.txt").read_text("utf-8").splitlines(), module.public_api().lines()
    refused = module.refused(golden, now)
    assert not refused, "changed without a raised version; see tests/plugins/golden/update.py:\n" + "\n".join(refused)
    assert golden == now, "run python tests/plugins/golden/update.py"


OLD = ["dovetail 1", "api model 1-1.0, hooks 1-1.3", "[model]", "a(x)", "b", "[hooks]", "h(x)", "[all kinds]", "o: int"]
KIT = ["[sdk]", "s(x)", "[kit]", "k(x)"]


@pytest.mark.parametrize(
    ("header", "change", "refused"),
    [
        ("api model 1-1.0, hooks 1-1.3", {"b": "b\nc"}, ["c: raise minor of model"]),
        ("api model 1-1.1, hooks 1-1.3", {"b": "b\nc"}, []),
        ("api model 1-1.0, hooks 1-1.4", {"b": "b\nc"}, ["c: raise minor of model"]),
        ("api model 1-1.1, hooks 1-1.3", {"a(x)": "a(x, y=1)"}, []),
        (
            "api model 1-1.0, hooks 1-1.3",
            {"h(x)": "h(y)"},
            ["h(x): raise minor of hooks", "h(y): raise minor of hooks"],
        ),
        ("api model 1-1.1, hooks 1-1.3", {"b": ""}, ["b: raise api of model"]),
        ("api model 1-2.0, hooks 1-1.3", {"b": ""}, []),
        ("api model 1-1.1, hooks 1-1.3", {"o: int": "o: int\np: int"}, ["p: int: raise minor of hooks"]),
        ("api model 1-1.0, hooks 1-1.3", {"k(x)": "k(x)\nl"}, []),
        ("api model 1-1.0, hooks 1-1.3", {"k(x)": ""}, ["k(x): raise Dovetail's version"]),
        ("api model 1-1.0, hooks 1-1.3", {"s(x)": "s(x)\nt"}, ["t: raise minor of sdk"]),
        ("api model 1-1.0, hooks 1-1.3, sdk 1-1.1", {"s(x)": "s(x)\nt"}, []),
        ("api model 1-1.1, hooks 1-1.4, sdk 1-1.0", {"o: int": "o: int\np: int"}, []),
    ],
)
def test_each_change_needs_its_own_version(header: str, change: dict[str, str], refused: list[str]) -> None:
    """Growth and changes need the minor version of their kind, losses its API version, of the kit Dovetail's."""
    now = [line for old in [OLD[0], header, *OLD[2:], *KIT] for line in change.get(old, old).split("\n") if line]
    assert update().unraised([*OLD, *KIT], now) == refused


def test_version_1_is_frozen_by_the_first_publication(tmp_path: Path) -> None:
    """A section of the changelog with a date is a published version; only then a change needs a version."""
    module = update()
    module.CHANGELOG = tmp_path / "CHANGELOG.md"
    now = [line for line in [*OLD, *KIT] if line != "b"]
    module.CHANGELOG.write_text("# Changelog\n\n## 0.1.0 (unreleased)\n", "utf-8")
    assert module.refused([*OLD, *KIT], now) == []
    module.CHANGELOG.write_text("# Changelog\n\n## 0.1.0 (2027-01-31)\n", "utf-8")
    assert module.refused([*OLD, *KIT], now) == ["b: raise api of model"]


def test_the_golden_file_holds_every_contract_and_hook() -> None:
    """Each public name of the contracts, each hook and each conformance class has a line."""
    import dovetail_testing as testing
    from dovetail import contracts
    from dovetail.plugins import hookspecs

    text = (HERE / "public_api.txt").read_text("utf-8")
    names = [f"contracts.{name}" for name in contracts.__all__]
    names += [f"hooks.{name}(" for name in vars(hookspecs) if name.startswith("dovetail_")]
    names += [f"testing.{name}." for name in testing.__all__ if name.endswith("Conformance")]
    assert [name for name in names if f"\n{name}" not in text] == []
