"""The reference of hooks and contracts is what the code says, and the new pages hold together."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "docs/reference").glob("*.md"), *(ROOT / "docs/tutorials").glob("*.md")]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs/reference/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date() -> None:
    """The page on disk is the one that the code gives; `make docs` writes it."""
    assert (ROOT / "docs/reference/plugins.md").read_text("utf-8") == generator().page(), "run make docs"


def test_every_hook_and_contract_is_described() -> None:
    """No hook, contract or method to implement is without words of its own."""
    from dovetail import contracts

    module = generator()
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_code(page: Path) -> None:
    """Relative links lead to files, and Python blocks parse."""
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
        assert re.match(r"[a-z]+:", target) or (page.parent / target).exists(), target
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
        ast.parse(block)
