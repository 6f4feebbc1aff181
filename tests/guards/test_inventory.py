"""What others rely on by name is what is on record, and nothing of it goes without being named in the changelog."""

from __future__ import annotations

import inventory
import pytest
from schema_lines import lines


@pytest.mark.parametrize("name", inventory.PAGES)
def test_names_and_bounds_are_those_on_record(name: str) -> None:
    """Every flag, variable, route, field with its bounds, metric, plugin and public name is as it was."""
    now = "".join(f"{line}\n" for line in inventory.PAGES[name]())
    found = inventory.differences((inventory.GOLDEN / name).read_text("utf-8"), now)
    assert not found, f"{inventory.HOW}\n{found}"


OLD = "# Flags\nserve --port: a value\nfield POST /x n: integer 1..128\n"


@pytest.mark.parametrize(
    ("new", "fragments", "unsigned"),
    [
        (OLD, "", []),
        (OLD + "serve --more: a value\n", "", []),
        ("# Flags\nfield POST /x n: integer 1..128\n", "", ["serve --port: a value"]),
        ("# Flags\nfield POST /x n: integer 1..128\n", "The flag `--port` is gone.", []),
        ("# Flags\nfield POST /x n: integer 1..128\n", "The port is gone.", ["serve --port: a value"]),
        ("# Flags\nfield POST /x n: integer 1..128\n", "``Say `a`.`` stays; `--port` is gone.", []),
        (OLD.replace("128", "64"), "`--port`", ["field POST /x n: integer 1..128"]),
        (OLD.replace("128", "64"), "`POST /x` takes an `n` up to 64.", []),
    ],
)
def test_what_goes_or_changes_has_to_be_named(new: str, fragments: str, unsigned: list[str]) -> None:
    """Growth is free; a name that goes, or whose bounds change, stands in backticks in a fragment."""
    assert inventory.unsigned(inventory.gone(OLD, new), fragments) == unsigned


def test_a_schema_is_told_to_its_last_bound() -> None:
    """Unions, nested lists, names of objects, constants that tell branches apart, and definitions within themselves."""
    node = {
        "properties": {"kind": {"const": "a"}, "more": {"type": "array", "maxItems": 3, "items": {"$ref": "#/Node"}}}
    }
    leaf = {"properties": {"kind": {"const": "b"}, "x": {"type": "number", "exclusiveMinimum": 0, "maximum": 2}}}
    schema = {
        "required": ["tree"],
        "properties": {
            "tree": {"anyOf": [{"$ref": "#/Node"}, {"$ref": "#/Leaf"}]},
            "bias": {
                "anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "null"}],
                "default": None,
            },
        },
    }
    assert dict(lines(schema, {"Node": node, "Leaf": leaf})) == {
        "tree": "any, required",
        "tree<a>.kind": '"a"',
        "tree<a>.more": "array len ..3",
        "tree<a>.more[]": "as around it",
        "tree<b>.kind": '"b"',
        "tree<b>.x": "number >0..2",
        "bias": "object | null = null",
        "bias.*": "integer",
    }
