"""Names of the product: no package has two classes of one name, and no identifier has a word of the list.

Where a name has such a word, name the thing in the field's terms; the docstring of `AVOIDED` has them.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from code_lines import PACKAGES, ROOT

MAX_SHARED = 5
"""Class names that two packages have: what a form of weights and its plugin, or a result of `LLM` and of HTTP, is."""
AVOIDED = frozenset(
    (
        *("told", "tell", "tells", "telling"),
        *("way", "ways", "asking", "verdict", "verdicts", "judge", "judged", "weaken", "weakened"),
        *("culprit", "guilty", "suspect", "suspects", "blame", "heart", "silence", "death", "deaths", "life", "lives"),
        *("rival", "rivals", "liked", "lots", "vain", "pace", "fewest", "stretch", "moment", "apart", "already"),
        *("rider", "riders", "lookout", "outlet", "rooms", "stands", "came", "race"),
        *("nobody", "somebody", "whoever", "everybody"),
    )
)
"""Write: report, record, send; option, requested, result, validate, relax; cause, poisoned, watchdog, stall, crash,
process; alternatives, preferred, deferred, rate, min, scale, state, disjoint, batch-invariant; pending fields, health,
response, sizes, headers, sample; user, caller, operator."""
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@cache
def definitions() -> tuple[tuple[str, str, str, int, bool], ...]:
    """Return package, file, name, line and whether it is a class, of everything that the product defines."""
    return tuple(
        (package, str(path.relative_to(ROOT)), name, line, is_class)
        for package, folder in PACKAGES.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, line, is_class in names(ast.parse(path.read_bytes()))
    )


def names(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """Yield name, line and whether it is a class: of classes, functions, arguments, variables and attributes.

    Tests of the kit are sentences, so that their names are not meant.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("test_"):
                yield node.name, node.lineno, isinstance(node, ast.ClassDef)
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno, False
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno, False


def test_a_class_has_its_name_to_itself() -> None:
    """No package has two classes of one name, and few names are those of classes of two packages."""
    classes: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for package, file, name, line, is_class in definitions():
        if is_class:
            classes[name].append((package, f"{file}:{line}"))
    shared = {name: found for name, found in classes.items() if len(found) > 1}
    within = {name: found for name, found in shared.items() if len({package for package, _ in found}) < len(found)}
    assert not within, f"put the noun of the folder first: {within}"
    assert len(shared) <= MAX_SHARED, f"at most {MAX_SHARED} names of classes of two packages: {shared}"


def test_no_identifier_has_a_word_to_avoid() -> None:
    """Identifiers have the field's terms."""
    found = [
        f"{file}:{line} {name}"
        for _, file, name, line, _ in definitions()
        if not AVOIDED.isdisjoint(part.lower() for part in PART.findall(name))
    ]
    assert not found, f"see AVOIDED: {found}"


def test_names_are_read() -> None:
    """Of arguments, targets, attributes and classes; words of a name are found in either spelling."""
    tree = ast.parse(
        "class OneOf:\n    def f(self, way, *, k=1):\n        self.told = x = y\n    def test_way(self): ...\n"
    )
    assert sorted(name for name, _, _ in names(tree)) == ["OneOf", "f", "k", "self", "self", "told", "way", "x"]
    assert [PART.findall(name) for name in ("_num_told", "ToldHTTPWay", "MAX_WAYS", "f16_way")] == [
        ["num", "told"],
        ["Told", "HTTP", "Way"],
        ["MAX", "WAYS"],
        ["f", "way"],
    ]
