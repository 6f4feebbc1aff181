"""Every built-in passes the kit that is offered to everybody."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dovetail.plugins import KINDS
from dovetail.testing import Sample, conformance_class

TABLE = Path(__file__).parents[1] / "parsers" / "samples.py"


def golden_table() -> Any:
    """Import the table of the parsers' own tests, which stands beside them."""
    spec = importlib.util.spec_from_file_location("parser_samples", TABLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLE_OF = golden_table()


def samples(rows: list[Any]) -> list[Sample]:
    """The golden table's rows as samples; a few of each format, for all stand in the parsers' own tests."""
    return [Sample(row.text, row.reasoning, row.content, row.calls, prompt_tail=row.tail) for row in rows[:2]]


ATTRS: dict[tuple[str, str], dict[str, Any]] = {
    **{("reasoning_parser", name): {"samples": samples(TABLE_OF.reasoning_rows(name))} for name in TABLE_OF.TAGS},
    ("reasoning_parser", "gpt-oss"): {
        "samples": samples([row for row in TABLE_OF.HARMONY if not row.calls and "to=" not in row.text])
    },
    **{
        ("tool_parser", name): {"samples": samples(TABLE_OF.tool_rows(name)), "tools": TABLE_OF.TOOLS}
        for name in TABLE_OF.CALLS
    },
    ("model", "LlamaForCausalLM"): {"configs": [{}, {"attention_bias": True, "mlp_bias": True}]},
    ("model", "Qwen3ForCausalLM"): {"configs": [{}, {"head_dim": 32}]},
}
"""What the kit cannot know of each."""

BUILTINS = [
    (kind.name, entry.name)
    for kind in KINDS.values()
    for entry in entry_points(group=kind.entry_point_group)
    if entry.dist is not None and entry.dist.name == "dovetail"
]


ABSENT = find_spec("flash_attn_interface") is None and os.path.exists("/dev/nvidiactl")
MARKS: dict[tuple[str, str], pytest.MarkDecorator] = {
    ("attention_backend", "fa3"): pytest.mark.skipif(
        ABSENT, reason="FlashAttention-3 is not installed; tests/backends/test_fa3.py runs the kit on a stand-in"
    ),
}
"""Built-ins that cannot run everywhere."""


CUT = "a call that is cut inside a part of its own markup shows that part in its arguments"
BARE = "its section has an empty marker, which the kit takes for a mistake"
KNOWN: dict[tuple[str, str], dict[str, str]] = {
    ("tool_parser", "gemma4"): {"test_truncation_at_every_position": CUT},
    ("tool_parser", "minimax-m3"): {"test_truncation_at_every_position": CUT},
    ("tool_parser", "minicpm5"): {
        "test_truncation_at_every_position": CUT,
        "test_spec_is_well_formed": BARE,
        "test_work_is_linear": "calls that are begun again and again cost 2.4 times as much at twice the length",
    },
    ("tool_parser", "xlam"): {"test_spec_is_well_formed": BARE},
    ("tool_parser", "template"): {"test_extend_keeps_the_reasoning_format": "it has no format without a template"},
}
"""Faults of built-ins that the kit found, by test; each entry goes with its fault."""


def expected_to_fail(cls: type, test: str, reason: str) -> Any:
    """Return a standard test, marked."""
    original = getattr(cls, test)

    def wrapper(self: Any) -> None:
        original(self)

    return pytest.mark.xfail(reason=reason, strict=True)(wrapper)


def builtin_class(kind: str, name: str) -> type:
    """Return the conformance class of a built-in."""
    cls = conformance_class(kind, name, **ATTRS.get((kind, name), {}))
    overridden = {test: expected_to_fail(cls, test, why) for test, why in KNOWN.get((kind, name), {}).items()}
    made = type(cls.__name__, (cls,), {**overridden, "__module__": __name__})
    mark = MARKS.get((kind, name))
    return made if mark is None else mark(made)


for kind, name in BUILTINS:
    globals()[f"Test_{kind}_{name}"] = builtin_class(kind, name)


def test_every_builtin_is_tested() -> None:
    """A plugin cannot be added to the distribution without passing the kit, and a parser not without samples."""
    tested = {(cls.kind, cls.name) for name, cls in globals().items() if name.startswith("Test")}
    assert set(BUILTINS) == tested
    derived = {
        ("tool_parser", "template"),
        ("reasoning_parser", "template"),
    }  # its samples are templates: tests/text/test_derive.py
    assert {key for key in tested if key[0].endswith("_parser")} <= ATTRS.keys() | derived
