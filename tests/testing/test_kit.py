"""The kit itself: complete, light to import, strict about overriding, and readable when run by hand."""

from __future__ import annotations

import inspect
import io
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dovetail_testing as kit
from dovetail.contracts import FormatSpec, GrammarSpec, ToolFormat, ToolParser
from dovetail.contracts.errors import ConfigError
from dovetail.plugins import KINDS, hookspecs
from dovetail.sdk.formats.call_grammar import calls_grammar, name_of
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail_testing import (
    ReasoningParserConformance,
    ToolParserConformance,
    check_class,
    conformance_class,
    run_conformance,
)

ROOT = Path(__file__).parents[2]
HOOKS = [name for name, f in vars(hookspecs).items() if inspect.isfunction(f) and name.startswith("dovetail_")]
CONFORMANCE = {kind: conformance_class(kind, "any") for kind in KINDS}
STANDARD = sorted({name for cls in CONFORMANCE.values() for name in dir(cls) if name.startswith("test_")})
NEEDS_A_GPU = {"test_grid_on_a_gpu", "test_capture_and_replay"}


def test_every_kind_has_a_conformance_class() -> None:
    """A kind cannot be added without one; each is offered by `dovetail_testing` and says which kind it is for."""
    for kind, cls in CONFORMANCE.items():
        assert cls.kind == kind
        assert cls.__mro__[1].__name__ in kit.__all__


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_tells_what_each_class_can_be_given(kind: str) -> None:
    """Every class of the kit and every attribute that is its own stands in the table of `docs/testing.md`."""
    cls = CONFORMANCE[kind].__mro__[1]
    page = (ROOT / "docs/testing.md").read_text(encoding="utf-8")
    row = next((line for line in page.splitlines() if line.startswith("| ") and f"`{cls.__name__}`" in line), "")
    own = {name for name in vars(cls).get("__annotations__", {}) if not name.startswith("_")}
    missing = sorted(name for name in own if f"`{name}`" not in row)
    assert (bool(row), missing) == (True, [])


def test_every_hook_is_tested_and_documented() -> None:
    """A hook cannot be added without a conformance test, a page that names it, and a test with an installed package."""
    source = (ROOT / "framework/dovetail_testing/conformance/hooks.py").read_text(encoding="utf-8")
    page = (ROOT / "docs/plugins-hooks.md").read_text(encoding="utf-8")
    test = (ROOT / "tests/plugins/test_server_hooks.py").read_text(encoding="utf-8")
    registering = {kind.hook for kind in KINDS.values()}  # test_server_hooks.py goes over the table
    missing = [hook for hook in HOOKS if f'"{hook}"' not in source or hook not in test]
    assert [hook for hook in missing if hook not in registering] == []
    assert [hook for hook in HOOKS if f"`{hook}`" not in page or not inspect.getdoc(getattr(hookspecs, hook))] == []


def test_every_standard_test_states_its_claim_and_catches_a_fault() -> None:
    """A standard test has a docstring, which the reference shows, and a seeded fault unless only a GPU shows it."""
    claimed = {name for cls in CONFORMANCE.values() for name in STANDARD if inspect.getdoc(getattr(cls, name, None))}
    assert claimed == set(STANDARD)
    files = sorted((ROOT / "tests/testing/broken").glob("*.py"))
    broken = "".join(path.read_text(encoding="utf-8") for path in files)
    assert [name for name in STANDARD if f'"{name}"' not in broken and name not in NEEDS_A_GPU] == []


@pytest.mark.full
def test_pytest_is_optional() -> None:
    """Without pytest, everything but the conformance classes and fixtures can be imported; checkpoints need torch."""
    code = "import sys; sys.modules['pytest'] = None\n"
    code += "import dovetail, dovetail_testing, dovetail_testing.run; print('torch' in sys.modules)\n"
    code += "import dovetail_testing.models; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\nTrue\n", "")


def test_overriding_a_standard_test_needs_a_reason() -> None:
    """A subclass that silently drops a standard test fails when it is defined: at collection."""
    with pytest.raises(
        TypeError, match=r"Sly.test_never_raises overrides a standard test .* mark it @pytest.mark.xfail"
    ):

        class Sly(ReasoningParserConformance):
            def test_never_raises(self) -> None:
                return

    with pytest.raises(TypeError, match=r"Hasty.test_random_splits overrides"):

        class Hasty(ReasoningParserConformance):
            test_random_splits = None  # type: ignore[assignment]


def test_an_override_with_a_reason_is_reported() -> None:
    """An overridden test that is marked runs, and its reason is shown."""

    class Honest(ReasoningParserConformance):
        name = "qwen3"

        @pytest.mark.xfail(reason="the model writes no end marker")
        def test_never_raises(self) -> None:
            raise AssertionError

        def test_of_my_own(self) -> None:
            """One more claim."""

    report = check_class(Honest, "never_raises or my_own")
    assert [outcome.state for outcome in report.outcomes] == ["xfailed", "passed"]
    assert report.outcomes[0].message == "the model writes no end marker"


def test_running_by_hand_prints_one_line_per_test() -> None:
    """`run_conformance` says what was claimed and what came out; nothing failing is exit code 0."""
    stream = io.StringIO()
    assert run_conformance("reasoning_parser", "qwen3", stream=stream) == 0
    lines = stream.getvalue().splitlines()
    assert lines[0] == "reasoning_parser qwen3"
    assert " passed  An output cut in two at any place gives the result of the whole." in lines
    assert "no samples declared" in stream.getvalue()
    assert "no templates declared" in stream.getvalue()
    assert lines[-1].endswith("passed, 2 skipped")


def test_running_by_hand_names_what_is_wrong() -> None:
    """A plugin that is not installed fails with the reason; the exit code is 1."""
    stream = io.StringIO()
    assert run_conformance("tool_parser", "hermes-9", stream=stream) == 1
    lines = stream.getvalue().splitlines()
    assert len([line for line in lines if "--tool-call-parser 'hermes-9': not installed; installed:" in line]) == 1
    assert len([line for line in lines if line.endswith(": for the same reason")]) > 1


class Own(ToolParser):
    """One whose grammar is made of the request's tools."""

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        return replace(spec, tools=ToolFormat("<do>", "</do>", body=JsonCalls))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool) -> GrammarSpec:
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (f"<do>{name_of(tool)}", {"type": "any_text"}, "</do>"),
            trigger="<do>",
        )


def test_a_choice_names_one_of_the_tools_that_a_class_gives() -> None:
    """A parser is not asked for a tool that the request does not have."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    attributes = {"plugin_class": Own, "tools": (tool,), "samples": []}
    cls = type("TestOwn", (ToolParserConformance,), {**attributes, "__module__": __name__})
    report = check_class(cls, "every_tool_choice")
    assert report.passed, report.text()


def test_wrong_arguments_are_named() -> None:
    """An unknown kind or attribute is an error that says what is possible."""
    with pytest.raises(ConfigError, match="kind 'parser': unknown; possible: model, attention_backend"):
        conformance_class("parser", "qwen3")
    with pytest.raises(ConfigError, match="ReasoningParserConformance has no attribute 'sample'"):
        conformance_class("reasoning_parser", "qwen3", sample=[])
