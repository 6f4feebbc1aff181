"""Shows which small faults the tests detect: `guard.py draw`, `cover MAP`, `check [MAP]`. CONTRIBUTING.md explains.

`mutants.json` lists mutants with the tests that killed each. After tests were removed or merged, `check` reports every
mutant that was killed and no longer is.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from mutants import Mutant, draw, files, mutants_of

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.json")
PLUGINS = ("models", "parsers", "backends", "grammar")
IMPORTS = ("framework", "server", *(f"plugins/{name}" for name in PLUGINS), "tests/mutation")
STAGES = ((8, 15.0, False), (24, 60.0, True), (40, 100.0, False))
"""Maximum tests, their estimated seconds, and whether those whose names resemble the mutant come first."""
HTTP_S = 0.004
KNOWN = ("framework/dovetail/engine/admission.py", "Admission._try", "false", "request.in_flight", 0)
"""No test killed it when the list was made; that is why it is on it."""
Entry = dict[str, Any]
"""A row of the list: a mutant's `key`, `state` and `killers`, which are tests with the digests of their sources.

States: `killed`, `survived`, `uncovered` (no test runs the code), `gone` (no such code any more), `new`.
"""


def digest(test: str) -> str:
    """Return a digest of a test's source, of its class if that inherits the test, or nothing if it is gone."""
    file, *names = test.partition("[")[0].split("::")
    node: ast.AST | None = ast.parse((ROOT / file).read_bytes()) if (ROOT / file).is_file() else None
    found = None
    for name in names:
        node = next((child for child in getattr(node, "body", []) if getattr(child, "name", "") == name), None)
        found = node or (found if isinstance(found, ast.ClassDef) else None)
    return hashlib.sha256(ast.unparse(found).encode()).hexdigest()[:8] if found is not None else ""


def is_kept(entry: Entry) -> bool:
    """Return whether all tests that killed a mutant stand as they did."""
    return bool(entry["killers"]) and all(was and digest(test) == was for test, was in entry["killers"].items())


def locate(key: list[Any]) -> Mutant | None:
    """Find a mutant; in another file, if exactly one has the same place in a function of the same name."""
    file, name = ROOT / key[0], f"def {key[1].rpartition('.')[2]}(".encode()
    found = mutants_of(key[0], file.read_bytes()) if file.is_file() else []
    if not (here := [mutant for mutant in found if list(mutant.key) == key]):
        texts = {file: source for file in files(ROOT) if name in (source := (ROOT / file).read_bytes())}
        found = [mutant for file, source in texts.items() for mutant in mutants_of(file, source)]
        here = [mutant for mutant in found if list(mutant.key[1:]) == key[1:]]
    return here[0] if len(here) == 1 else None


def instrumented(source: bytes, places: dict[int, Mutant]) -> bytes:
    """Return a file that has mutants, which `switch.active` turns on by number."""
    for number, mutant in sorted(places.items(), key=lambda place: -place[1].span[0]):
        (begin, end), new = mutant.span, mutant.new.encode()
        indent = source[source.rfind(b"\n", 0, begin) + 1 : begin]
        if mutant.is_statement:
            code = b"if _active('%d'): %b\n%belse: %b" % (number, new, indent, source[begin:end])
        else:
            code = b"((%b) if _active('%d') else (%b))" % (new, number, source[begin:end])
        source = source[:begin] + code + source[end:]
    # Functions may run while the module is imported: only its docstring and `__future__` come before this.
    head = rb'(\s*(#.*|r?"""(.|\n)*?"""|from __future__ .*)\n)*'
    end = re.match(head, source).end()  # type: ignore[union-attr]
    return source[:end] + b"from switch import active as _active\n" + source[end:]


def run(entries: list[Entry], folder: Path, *options: str) -> None:
    """Run tests in a copy of all files that git does not ignore, with the mutants in them; note where files moved."""
    tree, places = folder / "tree", defaultdict[str, dict[int, Mutant]](dict)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.check_output(command, cwd=ROOT, text=True).split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    for number, entry in enumerate(entries):
        if (mutant := locate(entry["key"])) is None:
            entry |= {"state": "gone", "killers": {}}
        else:
            entry["key"] = list(mutant.key)
            places[mutant.file][number] = mutant
    for file, found in places.items():
        (tree / file).write_bytes(instrumented((ROOT / file).read_bytes(), found))
    paths = os.pathsep.join(str(tree / name) for name in IMPORTS)
    env = os.environ | {"PYTHONPATH": paths, "MUTATION_FOLDER": str(folder)}
    command = [sys.executable, "-m", "pytest", "-p", "switch", "-p", "no:cacheprovider", "-q", *options]
    subprocess.run(command, cwd=tree, env=env, check=False)


def rows(file: Path) -> list[list[str]]:
    """Return the words of each line of what `switch` has noted."""
    return [line.split("\t") for line in file.read_text().splitlines()] if file.exists() else []


def coverage(hits: list[list[str]], times: list[list[str]]) -> dict[str, Any]:
    """Return the seconds of setup and of the rest of each test that passed, and the tests that reach each mutant.

    A server that starts in a test's setup may answer others of the file: those that take the time of an HTTP request
    count as reaching what the server reaches.
    """
    failed = {test for test, _, _, outcome in times if outcome != "passed"}
    seconds: dict[str, list[float]] = {test: [0.0, 0.0] for test, *_ in times if test not in failed}
    for test, phase, duration, _ in times:
        if test in seconds:
            seconds[test][phase != "setup"] += float(duration)
    reached, by_file = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for test, (_, rest) in seconds.items():
        if rest > HTTP_S:
            by_file[test.partition("::")[0]].add(test)
    for number, phase, test in (hit for hit in hits if len(hit) == 3):
        reached[number] |= {test} & seconds.keys() | (by_file[test.partition("::")[0]] if phase == "setup" else set())
    return {"seconds": seconds, "reached": {number: sorted(tests) for number, tests in reached.items()}}


def choose(
    seconds: dict[str, list[float]], reached: list[str], num: int, max_s: float, words: frozenset[str] = frozenset()
) -> list[str]:
    """Return fast tests of those that reach a mutant: with the rarest of some words in their names, from many files."""
    by_file = defaultdict[str, list[tuple[float, str]]](list)
    for test in reached:
        by_file[test.partition("::")[0]].append((seconds[test][1], test))
    shared = {file: max(seconds[test][0] for _, test in tests) for file, tests in by_file.items()}
    texts = {test: test.lower() for test in reached}
    rarity = {word: 1 / (1 + sum(word in text for text in texts.values())) for word in words}
    likeness = {test: sum(rarity[word] for word in words if word in text) for test, text in texts.items()}
    turns = [
        (-likeness[test], place, cost + shared[file] * (not place), cost, file, test)
        for file, tests in by_file.items()
        for place, (cost, test) in enumerate(sorted(tests))
    ]
    chosen: dict[str, str] = {}
    for *_, cost, file, test in sorted(turns):
        cost += 0 if file in chosen.values() else shared[file]
        if len(chosen) < num and (not chosen or cost <= max_s):
            chosen[test] = file
            max_s -= cost
    return list(chosen)


def check(entries: list[Entry], known: dict[str, Any], jobs: int, is_all: bool, folder: Path) -> list[Entry]:
    """Try all mutants whose killers changed; return those that were killed and no longer are."""
    before = {number for number, entry in enumerate(entries) if entry["state"] == "killed"}
    plan = []
    for number, entry in enumerate(entries):
        is_due = is_all or entry["state"] == "new" if known["seconds"] else is_all and entry["killers"]
        if is_due or (entry["killers"] and not is_kept(entry)):
            stages = [[test for test in entry["killers"] if digest(test)]]
            file, function, _, code, _ = entry["key"]
            words = frozenset(map(str.lower, re.findall("[A-Z]?[a-z]{3,}", f"{file} {function} {code}")))
            for num, max_s, by_name in STAGES:
                rest = [test for test in known["reached"].get(str(number), []) if all(test not in s for s in stages)]
                stages.append(choose(known["seconds"], rest, num, max_s, words if by_name else frozenset()))
            entry |= {"state": "survived" if any(stages) else "uncovered", "killers": {}}
            plan.append((str(number), stages))
    (folder / "plan").write_text(json.dumps({"jobs": jobs, "runs": plan}))
    os.environ["MUTATION_PLAN"] = str(folder / "plan")
    tests = sorted({test.partition("::")[0] for _, stages in plan for tests in stages for test in tests})
    if tests:
        run(entries, folder, "-n", "0", "--hypothesis-seed=0", *tests)
    found = rows(folder / "killers")
    if len(found) < len(plan) and tests:
        raise SystemExit(f"guard: pytest tried {len(found)} of {len(plan)} mutants; its output is above")
    for number, *killers in found:
        if killers:
            entries[int(number)] |= {"state": "killed", "killers": {test: digest(test) for test in killers}}
    return [entries[number] for number in before if entries[number]["state"] != "killed"]


def main() -> int:
    """Do what the command line says; return 1 if a mutant is no longer killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("draw", "cover", "check"))
    parser.add_argument(
        "map", nargs="?", type=Path, help="the coverage that `cover` writes; without it, `check` runs killers only"
    )
    parser.add_argument("--seed", type=int, default=39)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="try all mutants again, not only those with changed tests")
    args = parser.parse_args()
    if args.command == "draw":
        keys = [KNOWN, *(mutant.key for mutant in draw(ROOT, 199, args.seed))]
        entries = [{"key": list(key), "state": "new", "killers": {}} for key in keys]
    else:
        entries = json.loads(LIST.read_text())
        if args.map is None and args.command == "cover":
            parser.error("cover needs MAP, the file to write")
    lost: list[Entry] = []
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if args.command == "cover":
            run(entries, folder, "-n", "4", "--dist", "loadfile", "--no-loadscope-reorder")
            args.map.write_text(json.dumps(coverage(rows(folder / "hits"), rows(folder / "times"))))
            return 0
        if args.command == "check":
            known = json.loads(args.map.read_text()) if args.map else {"seconds": {}, "reached": {}}
            lost = check(entries, known, args.jobs, args.all, folder)
            for entry in lost:
                print("lost:", entry["state"], *entry["key"])
            print(f"{sum(entry['state'] == 'killed' for entry in entries)} of {len(entries)} killed, {len(lost)} lost")
    if not lost:
        LIST.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
