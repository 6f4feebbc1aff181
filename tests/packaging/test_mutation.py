"""The list of mutants says the truth: each is found, changed and judged as it should be (`tests/mutation`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "mutation"
FILE = "framework/dovetail/room.py"
SOURCE = b'''"""Rooms \xe2\x86\x92 doors."""
from __future__ import annotations
MOST = 3
class Room:
    def enter(self, who: list[int], most: int = 4) -> int | None:
        "Takes 5."
        if len(who) < most and not self.closed:
            self.inside = who  # \xe2\x86\x90 kept
            log.warning("%d of %d", 7, 8)
        raise ValueError(f"{9 + 1}")
    def fits(self):
        return self.at(1, size=2) == 0
@triton.jit
def kernel(a): return a + 1
'''


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The script, over a repository with one file of the product and one of tests."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import guard

    for name in ("guard", "mutants"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(guard, "ROOT", tmp_path)
    for file, text in ((FILE, SOURCE), ("tests/test_room.py", b"def test_fits():\n    assert Room().fits()\n")):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_bytes(text)
    return guard


def test_functions_have_mutants_and_texts_types_and_kernels_have_none(guard: Any) -> None:
    """Every operator has its place and its replacement, and the file still compiles."""
    found = guard.mutants_of(FILE, SOURCE)
    assert {(m.function, m.operator, m.code, m.new) for m in found} == {
        ("Room.enter", "false", "len(who) < most and (not self.closed)", "False"),
        ("Room.enter", "true", "len(who) < most and (not self.closed)", "True"),
        ("Room.enter", "and/or", "len(who) < most and (not self.closed)", "len(who) < most or not self.closed"),
        ("Room.enter", "negated", "len(who) < most", "len(who) >= most"),
        ("Room.enter", "edge", "len(who) < most", "len(who) <= most"),
        ("Room.enter", "no not", "not self.closed", "self.closed"),
        ("Room.enter", "deleted", "self.inside = who", "pass"),
        ("Room.fits", "no value", "return self.at(1, size=2) == 0", "return None"),
        ("Room.fits", "negated", "self.at(1, size=2) == 0", "self.at(1, size=2) != 0"),
        ("Room.fits", "no keyword", "self.at(1, size=2)", "self.at(1)"),
        ("Room.fits", "plus one", "0", "1"),
        ("Room.fits", "plus one", "1", "2"),
        ("Room.fits", "plus one", "2", "3"),
        ("Room.fits", "minus one", "1", "0"),
        ("Room.fits", "minus one", "2", "1"),
    }
    assert compile(guard.instrumented(SOURCE, {0: found[0], 1: found[-1]}), FILE, "exec")


def test_one_mutant_at_a_time_is_on(guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expressions and statements ask where they run; with none on, the file does what it did."""
    source = b"# f\ndef f(a):\n    if a > 2:\n        a += 5\n    return a\n"
    found = {m.operator: m for m in guard.mutants_of(FILE, source) if m.code != "5"}
    for operator, results in {
        "": [1, 2, 8], "false": [1, 2, 3], "true": [6, 7, 8], "negated": [6, 7, 3], "edge": [1, 7, 8],
        "plus one": [1, 2, 3], "minus one": [1, 7, 8], "deleted": [1, 2, 3], "no value": [None, None, None],
    }.items():  # fmt: skip
        number = str(list(found).index(operator)) if operator else ""
        monkeypatch.setitem(sys.modules, "switch", SimpleNamespace(active=number.__eq__))
        scope: dict[str, Any] = {}
        for place, mutant in enumerate(found.values()):
            if mutant.operator == operator or not operator:
                exec(guard.instrumented(source, {place: mutant}), scope)
                assert [scope["f"](a) for a in (1, 2, 3)] == results, mutant


def test_tests_are_chosen_by_time_from_many_files(guard: Any) -> None:
    """A fixture is paid once per file; failing tests are left out, and a server's file stands for it."""
    rows = [("a::1", 0, 0.1), ("a::2", 0, 0.2), ("b::1", 9, 0.001), ("b::2", 0, 0.5), ("c::1", 0, 3)]
    times = [
        [test, phase, str(s), "passed"]
        for test, *both in rows
        for phase, s in zip(("setup", "call"), both, strict=True)
    ]
    hits = [
        ["0", "call", "a::1"],
        ["0", "call", "a::2"],
        ["0", "call", "d::1"],
        ["0", "setup", "b::1"],
        ["0", "call", "c::1"],
    ]
    found = guard.coverage(hits, [*times, ["d::1", "call", "1", "failed"]])
    assert found["reached"] == {"0": ["a::1", "a::2", "b::1", "b::2", "c::1"]}
    assert guard.choose(found["seconds"], found["reached"]["0"], 4, 12.5) == ["a::1", "c::1", "b::1", "a::2"]
    assert guard.choose(found["seconds"], found["reached"]["0"], 4, 5) == ["a::1", "c::1", "a::2"]
    assert guard.choose(found["seconds"], found["reached"]["0"], 2, 99, frozenset(["b::"])) == ["b::1", "b::2"]


def test_a_kill_counts_until_its_test_changes(guard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant is found after its file has moved; a changed test is run again, and one that is gone kills nothing."""
    [mutant] = [m for m in guard.mutants_of(FILE, SOURCE) if m.operator == "negated" and "at" in m.code]
    test = "tests/test_room.py::test_fits"
    entry = {"key": list(mutant.key), "state": "killed", "killers": {test: guard.digest(test)}}
    assert guard.is_kept(entry)
    assert guard.digest(test.replace("fits", "other")) == guard.digest("tests/none.py::test_fits") == ""
    moved = tmp_path / FILE.replace("room", "rooms")
    (tmp_path / FILE).rename(moved)
    text = tmp_path / "tests/test_room.py"
    text.write_text(text.read_text().replace("assert", "assert not"))
    assert not guard.is_kept(entry)
    known = {
        "seconds": {test: [0, 0.1], "tests/test_room.py::other": [0, 0]},
        "reached": {"0": ["tests/test_room.py::other"]},
    }

    def run(entries: list[Any], folder: Path, *options: str) -> None:
        [[number, stages]] = json.loads((folder / "plan").read_text())["runs"]
        assert (number, stages, options[-1]) == (
            "0",
            [[test], ["tests/test_room.py::other"], [], []],
            "tests/test_room.py",
        )
        assert guard.locate(entries[0]["key"]).file == str(moved.relative_to(tmp_path))
        (folder / "killers").write_text(f"0{kills}\n")

    monkeypatch.setattr(guard, "run", run)
    monkeypatch.setenv("MUTATION_PLAN", "")
    kills = f"\t{test}"
    assert guard.check([entry], known, 1, False, tmp_path) == []
    assert guard.is_kept(entry)
    kills = ""
    assert guard.check([entry], known, 1, True, tmp_path) == [entry]
    assert entry["state"] == "survived"
    moved.unlink()
    assert guard.locate(entry["key"]) is None


def test_a_case_that_moved_is_looked_for_in_all_of_its_function(guard: Any) -> None:
    """The names of cases have their numbers; one that a neighbour's removal changed must not look like a loss."""
    import switch

    items: dict[str, Any] = {f"tests/t.py::{name}": name for name in ("a[0]", "a[1]", "b[0]", "b")}
    for names, found in (("a[1]", ["a[1]"]), ("a[2] a[0] a[1]", ["a[0]", "a[1]"]), ("b", ["b"]), ("c[1]", [])):
        assert switch.chosen(items, [f"tests/t.py::{name}" for name in names.split()]) == found
