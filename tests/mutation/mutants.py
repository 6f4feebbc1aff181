"""Small faults ("mutants") that the product's functions can have, one at a time, and how each is found again."""

from __future__ import annotations

import ast
import copy
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

ROOTS = ("framework/dovetail", "framework/dovetail_offline", "plugins/*/*", "server/dovetail_server")
PAIRS = (
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),  # codespell:ignore notin
    (ast.Lt, ast.GtE),
    (ast.Gt, ast.LtE),
)
NEGATED = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}
EDGE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
UNORDERED = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast"}
"""Functions that crash on swapped arguments: any test that calls them would do."""
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
"""Error texts; and f-strings, whose parts have no positions in Python 3.11."""
TEXTS = (str, bytes, ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
LOGS = {"debug", "info", "warning", "error", "exception", "critical", "log", "warn"}
Change = tuple[ast.expr | ast.stmt, str, ast.AST]


@dataclass(frozen=True)
class Mutant:
    """One change in one place. The first five fields find it again after lines have moved."""

    file: str
    function: str
    operator: str
    code: str
    nth: int
    """Index among the places of the function with the same code and operator."""
    new: str
    span: tuple[int, int]
    """Bytes of the file that `new` replaces."""
    is_statement: bool

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.file, self.function, self.operator, self.code, self.nth


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """Return all mutants of a file's functions, in the order of the source."""
    starts, found = [0, *accumulate(map(len, source.splitlines(keepends=True)))], []
    times = Counter[tuple[str, str, str]]()
    for function, (node, operator, new) in _walk(ast.parse(source), (), is_inside=False):
        key = function, operator, ast.unparse(node)
        span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        if isinstance(node, ast.expr) or not source[starts[node.lineno - 1] : span[0]].strip():
            found.append(Mutant(file, *key, times[key], ast.unparse(new), span, isinstance(node, ast.stmt)))
        times[key] += 1
    return found


def draw(root: Path, number: int, seed: int) -> list[Mutant]:
    """Choose mutants, at most one per function, as many per package as its share of the lines of code."""
    rng = random.Random(seed)
    lines, found = Counter[str](), defaultdict[str, list[Mutant]](list)
    for file in files(root):
        source = (root / file).read_bytes()
        package = "/".join(Path(file).parts[:3])
        lines[package] += sum(bool(line.strip()) for line in source.splitlines())
        found[package] += mutants_of(file, source)
    chosen: list[Mutant] = []
    for package in sorted(found):
        rest = found[package]
        for _ in range(-(-number * lines[package] // lines.total())):
            if rest:
                operator = rng.choice(sorted({mutant.operator for mutant in rest}))
                chosen.append(rng.choice([mutant for mutant in rest if mutant.operator == operator]))
                rest = [mutant for mutant in rest if mutant.key[:2] != chosen[-1].key[:2]]
    return sorted(rng.sample(chosen, number), key=lambda mutant: mutant.key)


def files(root: Path) -> list[str]:
    """Return the product's Python files, relative to the root of the repository."""
    return sorted(str(path.relative_to(root)) for pattern in ROOTS for path in root.glob(f"{pattern}/**/*.py"))


def _walk(node: ast.AST, names: tuple[str, ...], is_inside: bool) -> Iterator[tuple[str, Change]]:
    """Yield what can change in code that runs when a function is called; Triton kernels run elsewhere."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        marks = " ".join(map(ast.unparse, node.decorator_list))
        if "jit" not in marks and "overload" not in marks and node.name not in ("__repr__", "__str__"):
            for child in node.body:
                yield from _walk(child, (*names, node.name), not isinstance(node, ast.ClassDef))
        return
    if is_inside:
        if isinstance(node, SKIPPED) or _is_log(node):
            return
        yield from ((".".join(names), change) for change in _changes(node))
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "pattern", "guard"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _walk(child, names, is_inside)


def _is_log(node: ast.AST) -> bool:
    call = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    is_log = isinstance(call, ast.Attribute) and call.attr in LOGS
    return is_log and ast.unparse(call.value).endswith(("log", "logger", "warnings"))


def _changes(node: ast.AST) -> Iterator[Change]:
    def other(**fields: object) -> ast.AST:
        new = copy.copy(node)
        new.__dict__.update(fields)
        return new

    match node:
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.Constant):
            yield node.test, "false", ast.Constant(False)
            if not isinstance(node, ast.While):
                yield node.test, "true", ast.Constant(True)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield node, "no value", ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield node, "deleted", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield node, "deleted", ast.Pass()
        case ast.Compare(ops=[operator]):
            for name, table in (("negated", NEGATED), ("edge", EDGE)):
                if type(operator) in table:
                    yield node, name, other(ops=[table[type(operator)]()])
        case ast.BoolOp():
            yield node, "and/or", other(op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not()):
            yield node, "no not", node.operand
        case ast.Constant(value=int(number)) if type(number) is int:
            yield node, "plus one", ast.Constant(number + 1)
            if number:
                yield node, "minus one", ast.Constant(number - 1)
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            values = [getattr(side, "value", side) for side in (node.left, node.right)]
            if not any(isinstance(value, TEXTS) for value in values):
                yield node, "arithmetic", other(op=ARITHMETIC[type(node.op)]())
        case ast.Call(keywords=[*rest, ast.keyword(arg=str(name))]) if name not in ("timeout", "stacklevel"):
            yield node, "no keyword", other(keywords=rest)
        case ast.Call(args=[one, two, *rest]) if ast.unparse(node.func) not in UNORDERED:
            if not any(isinstance(arg, (ast.Starred, ast.Constant)) for arg in (one, two)):
                yield node, "swapped", other(args=[two, one, *rest])
