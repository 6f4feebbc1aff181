"""The public signatures are those of the golden file: what plugins rely on changes on purpose only."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

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
    golden = (HERE / "public_api.txt").read_text("utf-8").splitlines()
    gone, added, bumped = module.differences(golden, module.public_api().lines())
    assert bumped or not gone, "changed without a version bump; see tests/plugins/golden/update.py:\n" + "\n".join(gone)
    changed = [*gone, *added, *(["the version"] if bumped else [])]
    assert not changed, "run python tests/plugins/golden/update.py for:\n" + "\n".join(changed)


def test_a_changed_signature_needs_a_bump() -> None:
    """A vanished line without a new header is a break; an added line is none."""
    differences = update().differences
    old = ["dovetail 1", "api model 1-1", "a(x)", "b"]
    assert differences(old, ["dovetail 1", "api model 1-1", "a(y)", "b"]) == (["a(x)"], ["a(y)"], False)
    assert differences(old, ["dovetail 1", "api model 1-1", "a(x)", "b", "c"]) == ([], ["c"], False)
    assert differences(old, ["dovetail 1", "api model 1-2", "b"]) == (["a(x)"], [], True)


def test_the_golden_file_holds_every_contract_and_hook() -> None:
    """Each public name of the contracts, each hook and each conformance class has a line."""
    from dovetail import contracts, testing
    from dovetail.plugins import hookspecs

    text = (HERE / "public_api.txt").read_text("utf-8")
    names = [f"contracts.{name}" for name in contracts.__all__]
    names += [f"hooks.{name}(" for name in vars(hookspecs) if name.startswith("dovetail_")]
    names += [f"testing.{name}." for name in testing.__all__ if name.endswith("Conformance")]
    assert [name for name in names if f"\n{name}" not in text] == []
