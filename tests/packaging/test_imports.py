"""What may import what, and what must not be imported at all."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dovetail
import dovetail_backends
import dovetail_grammar
import dovetail_models
import dovetail_offline
import dovetail_parsers
import dovetail_server
import dovetail_testing

ROOT = Path(__file__).parents[2]
PACKAGES = [
    Path(package.__path__[0])
    for package in (
        *(dovetail, dovetail_server, dovetail_models, dovetail_parsers, dovetail_backends),
        *(dovetail_grammar, dovetail_offline, dovetail_testing),
    )
]
SOURCES = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]


def modules_below(package: str) -> list[str]:
    """Return the modules of a package of ours, by its files."""
    (folder,) = [path for path in PACKAGES if path.name == package.partition(".")[0]]
    base = folder.parent / Path(*package.split("."))
    paths = [base.with_suffix(".py")] if base.with_suffix(".py").exists() else sorted(base.rglob("*.py"))
    parts = [path.relative_to(folder.parent).with_suffix("").parts for path in paths]
    return [".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts]


LIGHT = (
    "dovetail.contracts",
    "dovetail.plugins",
    "dovetail_testing.site",
    "dovetail_testing.parsers",
    "dovetail_parsers",
)


def test_light_packages_import_neither_torch_nor_pydantic() -> None:
    """A parser author's imports take no torch, transformers, pydantic or fastapi."""
    heavy = {"torch", "transformers", "pydantic", "fastapi", "numpy"}
    modules = [module for package in LIGHT for module in modules_below(package)]
    code = f"import sys, importlib\n[importlib.import_module(m) for m in {modules!r}]\n"
    code += f"print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_import_contracts_hold() -> None:
    """The core and the server import no built-in plugin, and the layers hold (import-linter)."""
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {"torch.load", "torch.jit.load", "torch.hub.load", "numpy.load", "np.load", "yaml.load"}
ALLOWED: set[tuple[str, str]] = set()
"""(file, what): stays empty."""


def forbidden_in(tree: ast.AST) -> set[str]:
    """Return the forbidden imports and calls in a module."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] in FORBIDDEN_MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} if node.module.partition(".")[0] in FORBIDDEN_MODULES else set()
            found |= {f"{node.module}.{a.name}" for a in node.names} & FORBIDDEN_ATTRIBUTES
        elif isinstance(node, ast.Name) and node.id in FORBIDDEN_CALLS:
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node) in FORBIDDEN_ATTRIBUTES:
            found.add(ast.unparse(node))
    return found


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """All sources; a test for each file would cost a second for a hundred of them."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def test_nothing_that_executes_data(trees: dict[Path, ast.Module]) -> None:
    """No pickle, marshal, shelve, torch.load or eval anywhere in the core, the server or a built-in."""
    found = {path: {(path.name, what) for what in forbidden_in(tree)} - ALLOWED for path, tree in trees.items()}
    assert [(path, some) for path, some in found.items() if some] == []


def test_the_search_finds_what_it_should() -> None:
    """The walk above sees each way of writing what is forbidden, and no method that merely shares a name."""
    source = (
        "import pickle\nfrom shelve import open\nfrom torch import load\neval('1')\nx = torch.load\nre.compile('a')"
    )
    assert forbidden_in(ast.parse(source)) == {"pickle", "shelve", "torch.load", "eval"}


def test_no_asserts_and_no_silenced_exceptions(trees: dict[Path, ast.Module]) -> None:
    """Validation is never an assert, and no `except Exception` has an empty body."""
    for path, node in ((path, node) for path, tree in trees.items() for node in ast.walk(tree)):
        assert not isinstance(node, ast.Assert), f"{path.name}:{node.lineno}"
        if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) in BROAD):
            silent = all(isinstance(statement, ast.Pass) for statement in node.body)
            assert not silent, f"{path.name}:{node.lineno} drops every error"


BROAD = {"Exception", "BaseException"}


def test_contracts_package_offers_every_public_class() -> None:
    """`dovetail.contracts` offers each public class of its modules under its own name."""
    import dovetail.contracts as contracts

    defined = {
        node.name
        for path in (ROOT / "framework/dovetail/contracts").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    assert defined <= set(contracts.__all__)
    assert all(getattr(contracts, name) is not None for name in contracts.__all__)
