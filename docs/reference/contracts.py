"""The page `reference/plugins.md`: every hook and contract, from the code."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from dovetail import contracts
from dovetail.contracts.offered import homes_of
from dovetail.contracts.operations import OPS, Operation
from dovetail.plugins import KINDS
from dovetail.plugins.registry import KindRegistry

HERE = Path(__file__).parent
SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:")
HEAD = """\
# Hooks and contracts

Everything that a plugin may use, with what each part promises. The [tutorials](../tutorials/index.md) show how to
begin; [Plugins](../plugins.md) has the rules. Within one version of an API this page only grows: see
[compatibility](../plugins-compatibility.md).
"""


def load_public_api() -> Any:
    """Import `public_api.py` beside this file."""
    spec = importlib.util.spec_from_file_location("public_api", HERE / "public_api.py")
    if spec is None or spec.loader is None:
        raise SystemExit("docs/reference/public_api.py: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


API = load_public_api()


def page() -> str:
    """Return the whole page."""
    parts = [HEAD, "\n## Kinds\n", *kinds_table(), "\n## Hooks\n", *hooks(), "\n## What registration hooks are given\n"]
    parts += of_class("dovetail.plugins.registry.KindRegistry", KindRegistry)
    parts += ["\n## Contracts\n", "All of them can be imported from `dovetail.contracts`.\n"]
    homes = homes_of(contracts.__file__)
    for module in dict.fromkeys(homes[name] for name in contracts.__all__):
        parts += [f"\n## `{module}`\n", f"{prose(import_module(module))}\n"]
        for name in contracts.__all__:
            if homes[name] == module:
                parts += of_class(name, getattr(contracts, name))
        parts += operations() if module == Operation.__module__ else ()
    return joined(parts)


def joined(parts: Iterable[str]) -> str:
    """Return a page of its parts, without lines that are blank twice outside of code blocks."""
    fenced = "\n".join(parts).split("```")
    fenced[::2] = [re.sub(r"\n{3,}", "\n\n", text) for text in fenced[::2]]
    return "```".join(fenced).rstrip() + "\n"


def kinds_table() -> Iterator[str]:
    """Yield the table of kinds."""
    yield "| kind | entry-point group | API | subclass of | loaded in |"
    yield "|---|---|---|---|---|"
    for kind in KINDS.values():
        contract = f"`{kind.contract.partition(':')[2]}`" if kind.contract else "nothing: a module or an object"
        spoken = f"{kind.api}.{kind.minor}" + ("" if kind.api == kind.oldest_api else f", and {kind.oldest_api}")
        roles = ", ".join(kind.roles)
        yield f"| `{kind.name}` | `{kind.entry_point_group}` | {spoken} | {contract} | {roles} |"


def operations() -> Iterator[str]:
    """Yield the table of operations."""
    yield "### `OPS`\n"
    yield "The operations, by name; `meaning` is the function of plain torch that says what one computes.\n"
    yield "| operation | operands -> result | widths of an `Ask` | its options | may be overwritten | meaning |"
    yield "|---|---|---|---|---|---|"
    for row in OPS.values():
        listed = (", ".join(names) for names in (row.dims, row.options, sorted(row.may_overwrite)))
        signature = row.signature.replace("|", "\\|")
        yield f"| `{row.name}` | `{signature}` | {' | '.join(listed)} | `{row.meaning}` |"
    yield ""


def hooks() -> Iterator[str]:
    """Yield every hook."""
    for name, function in API.hook_functions().items():
        yield f"### `{name}`\n"
        yield f"```text\n{name}{API._signature(function)}\n```\n"
        yield prose(function) + "\n"


def of_class(name: str, value: Any) -> Iterator[str]:
    """Yield a class, an enumeration or a union."""
    yield f"### `{name}`\n"
    if inspect.isroutine(value):
        yield f"```text\n{name}{API._signature(value)}\n```\n"
        yield prose(value) + "\n"
        return
    if not isinstance(value, type):
        if callable(value):
            yield f"A `{type(value).__name__}`.\n"
            return
        yield f"One of {', '.join(f'`{part}`' for part in API._union(value).split(' | '))}.\n"
        return
    if not issubclass(value, enum.Enum) and API._has_own_init(value):
        yield f"```text\n{name}{API._signature(value)}\n```\n"
    yield prose(value) + "\n"
    if issubclass(value, enum.Enum):
        yield "\n".join(f"- `{member.name}`: `{member.value}`" for member in value) + "\n"
        return
    for key, member in API.public_members(value):
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if isinstance(member, property) or inspect.isfunction(function):
            abstract = " (to implement)" if getattr(function, "__isabstractmethod__", False) else ""
            yield f"**`{API.describe_member(key, member, value)}`**{abstract}\n"
            yield prose(member) + "\n"
        else:
            said = next((texts[key] for texts in map(attribute_texts, value.__mro__) if key in texts), "")
            yield f"- `{API.describe_member(key, member, value)}`{f': {said}' if said else ''}\n"


@functools.cache
def attribute_texts(value: type) -> dict[str, str]:
    """Return what stands below each attribute of a class, in its source, as one line."""
    try:
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # made by other means than a class statement
        return {}
    found: dict[str, str] = {}
    for one, below in pairwise(getattr(tree, "body", [])):
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(text, str):
            found[one.target.id] = " ".join(text.split())
    return found


def prose(value: Any) -> str:
    """Return a docstring as Markdown; its sections become lists."""
    text = inspect.getdoc(value) or ""
    if dataclasses.is_dataclass(value) and text.startswith(f"{value.__name__}("):
        return ""
    out: list[str] = []
    in_section = False
    for line in text.splitlines():
        if line.strip() in SECTIONS:
            out += [f"*{line.strip()[:-1]}:*", ""]
            in_section = True
        elif in_section and line.startswith("    ") and not line.startswith("     "):
            out.append("- " + re.sub(r"^(\*{0,2}\w+):", r"`\1`:", line.strip()))
        elif in_section and line.startswith("     "):
            out.append("  " + line.strip())
        else:
            in_section = in_section and not line.strip()
            out.append(line)
    return "\n".join(out).strip()
