"""Parsers with one fault each: the kit names every fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from dovetail.contracts.output import (
    ContentDelta,
    Event,
    FormatSpec,
    Malformed,
    Markers,
    NewCall,
    ReasoningDelta,
    State,
    ToolArgs,
    ToolBody,
    ToolEnd,
    ToolEvent,
    ToolFormat,
    ToolStart,
)
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.contracts.tools import ToolParser
from dovetail.plugins import Registry, load, make_plan
from dovetail.processing.processor import bound_parser
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail.sdk.formats.output import FormatParser
from dovetail.text.parsing.fitted import bound_reasoning, bound_tools
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_testing import FakeSite, Sample, check_class, conformance_class
from dovetail_testing.parsers import PlainTemplate

SPEC = FormatSpec(reasoning=Markers("<r>", "</r>", after_start="", before_end="", after_end=""))
SAMPLES = [Sample("<r>think</r>answer", reasoning="think", content="answer")]
CALL = '{"name": "f", "arguments": {"a": [1, "}"]}}'
CALLS = [Sample(f"so\n<call>{CALL}</call>", content="so", tool_calls=[("f", '{"a": [1, "}"]}')])]


class Right(ReasoningParser):
    machine: Any = FormatParser

    def spec(self, tokenizer: Any, template: Any, request: Any) -> FormatSpec:
        return replace(SPEC, machine=self.machine)


def machine(**methods: Any) -> type[Right]:
    """Return a reasoning parser that brings a machine whose methods differ from the right one's."""
    made = type("BrokenMachine", (FormatParser,), methods)
    return type("Broken", (Right,), {"machine": made, "__module__": __name__})


class RightCalls(ToolParser):
    body: Any = JsonCalls

    def extend(self, spec: FormatSpec, tools: Any) -> FormatSpec:
        return replace(spec, tools=ToolFormat("<call>", "</call>", body=self.body))


def body(**methods: Any) -> type[RightCalls]:
    """Return a tool parser whose reader of a section differs from the right one."""
    made = type("BrokenBody", (JsonCalls,), methods)
    return type("Broken", (RightCalls,), {"body": made, "__module__": __name__})


def dropping_feed(self: Any, token_ids: Sequence[int], text: str | None = None) -> list[Event]:
    if text is not None and text.startswith("sw"):
        text = text[2:]
    return FormatParser.feed(self, token_ids, text)


def duplicating_feed(self: Any, token_ids: Sequence[int], text: str | None = None) -> list[Event]:
    events = FormatParser.feed(self, token_ids, text)
    return [*events, ContentDelta("answer")] if text == "answer" else events


def raising_finish(self: Any, reason: str) -> list[Event]:
    if self._held:
        raise IndexError("pop from an empty stack")
    return FormatParser.finish(self, reason)


def swallowing_finish(self: Any, reason: str) -> list[Event]:
    self._held = ""
    return FormatParser.finish(self, reason)


SHARED: list[str] = []


class Leaking:
    """Collects reasoning in a list that all streams share."""

    def __init__(self, spec: FormatSpec, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        self.inner = FormatParser(replace(spec, machine=None), tokenizer, **options)
        SHARED.clear()

    @property
    def reasoning_tokens(self) -> int:
        return self.inner.reasoning_tokens

    def prime(self, tail: str) -> State:
        return self.inner.prime(tail)

    def feed(self, ids: Sequence[int], text: str | None = None) -> list[Event]:
        events = self.inner.feed(ids, text)
        SHARED.extend(e.text for e in events if isinstance(e, ReasoningDelta))
        return [e for e in events if not isinstance(e, ReasoningDelta)]

    def finish(self, reason: str) -> list[Event]:
        events = self.inner.finish(reason)
        text = "".join(SHARED)
        SHARED.clear()
        return [*([ReasoningDelta(text)] if text else []), *events]


class Quadratic(Leaking):
    """Goes over all text again with every piece, in Python."""

    def __init__(self, spec: FormatSpec, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        super().__init__(spec, tokenizer, **options)
        self.seen = ""

    def feed(self, ids: Sequence[int], text: str | None = None) -> list[Event]:
        self.seen += text or ""
        for char in self.seen:
            if char == "\0":
                return []
        return self.inner.feed(ids, text)


class SearchesAgain(Quadratic):
    """Searches all text again with every piece, inside one call."""

    def feed(self, ids: Sequence[int], text: str | None = None) -> list[Event]:
        self.seen = self.seen + (text or "")
        if "<|q|>" in self.seen:
            return []
        return self.inner.feed(ids, text)


class CountsWrong(Leaking):
    @property
    def reasoning_tokens(self) -> int:
        return self.inner.reasoning_tokens + self.pieces

    pieces = 0

    def feed(self, ids: Sequence[int], text: str | None = None) -> list[Event]:
        self.pieces += 1
        return self.inner.feed(ids, text)


class Unprimed(Leaking):
    def prime(self, tail: str) -> State:
        return self.inner.prime("")


def with_machine(made: type) -> type[Right]:
    return type("Broken", (Right,), {"machine": made, "__module__": __name__})


class StatefulSpec(Right):
    calls = 0

    def spec(self, tokenizer: Any, template: Any, request: Any) -> FormatSpec:
        type(self).calls += 1
        return replace(SPEC, initial=State.IN if self.calls % 2 else State.OPEN)


class KeepsRequests(Right):
    seen: list[Any] = []

    def spec(self, tokenizer: Any, template: Any, request: Any) -> FormatSpec:
        self.seen.append(request)
        return SPEC


class KeepsText(Leaking):
    """Keeps what was said, by what was said: text, which no garbage collector lists."""

    heard: set[str] = set()

    def feed(self, ids: Sequence[int], text: str | None = None) -> list[Event]:
        self.heard.add(text or "")
        return self.inner.feed(ids, text)


class KeepsTools(RightCalls):
    seen: list[Any] = []

    def grammar(self, tools: Any, choice: Any, strict: bool, parallel: bool) -> Any:
        self.seen.append(tools)
        return None


class EmptyMarker(Right):
    def spec(self, tokenizer: Any, template: Any, request: Any) -> FormatSpec:
        return FormatSpec(reasoning=Markers("<r>", ""))


class RaisesOnArguments(Right):
    def spec(self, tokenizer: Any, template: Any, request: Any) -> FormatSpec:
        if request.template_kwargs.get("enable_thinking", True) not in (True, False):
            raise KeyError("enable_thinking")
        return SPEC


class ChangesArguments(Right):
    def spec(self, tokenizer: Any, template: Any, request: Any) -> FormatSpec:
        request.template_kwargs.setdefault("thinking", True)
        return SPEC


class Detects(Right):
    def detect(self, template: Any) -> float:
        return float(template.source.count("<"))


class WrongTrim(Right):
    def spec(self, tokenizer: Any, template: Any, request: Any) -> FormatSpec:
        return FormatSpec(reasoning=Markers("<r>", "</r>", after_end="ans"))


class LosesReasoning(RightCalls):
    def extend(self, spec: FormatSpec, tools: Any) -> FormatSpec:
        return FormatSpec(tools=ToolFormat("<call>", "</call>", body=JsonCalls))


def single_quotes(self: Any, text: str) -> list[ToolEvent]:
    events = JsonCalls.feed(self, text)
    return [ToolArgs(e.index, e.json.replace('"', "'")) if isinstance(e, ToolArgs) else e for e in events]


def wrong_index(self: Any, text: str) -> list[ToolEvent]:
    events = JsonCalls.feed(self, text)
    return [ToolArgs(e.index + 1, e.json) if isinstance(e, ToolArgs) else e for e in events]


def ends_twice(self: Any, text: str) -> list[ToolEvent]:
    events = JsonCalls.feed(self, text)
    return [twin for e in events for twin in ([e, e] if isinstance(e, ToolEnd) else [e])]


def never_ends(self: Any, text: str) -> list[ToolEvent]:
    return [e for e in JsonCalls.feed(self, text) if not isinstance(e, ToolEnd)]


def empty_malformed(self: Any) -> list[ToolEvent]:
    return [*JsonCalls.close(self), Malformed("tool_call", "")]


def filling_feed(self: Any, token_ids: Sequence[int], text: str | None = None) -> list[Event]:
    events = FormatParser.feed(self, token_ids, text)
    return [*events, ContentDelta("…")] if text == "" else events


class RaisesOnNamedTool(RightCalls):
    def grammar(self, tools: Any, choice: Any, strict: bool, parallel: bool) -> Any:
        return {"none": None, "auto": None, "required": None}[str(choice)]


class ChangesTools(RightCalls):
    def extend(self, spec: FormatSpec, tools: Any) -> FormatSpec:
        for tool in tools:
            tool["function"].setdefault("strict", True)
        return super().extend(spec, tools)


class ChangesChoice(RightCalls):
    def grammar(self, tools: Any, choice: Any, strict: bool, parallel: bool) -> Any:
        if isinstance(choice, dict):
            choice["function"].pop("name")
        return None


class WholeCalls(ToolBody):
    """Keeps the pieces of all sections in one list: another reply's section takes them along."""

    pieces: list[str] = []

    def __init__(self, new_call: NewCall) -> None:
        self.new_call = new_call

    def feed(self, text: str) -> list[ToolEvent]:
        self.pieces.append(text)
        return []

    def close(self) -> list[ToolEvent]:
        inner = JsonCalls(self.new_call)
        events = [*inner.feed("".join(self.pieces)), *inner.close()]
        self.pieces.clear()
        return events


class DropsMalformed(WholeCalls):
    def __init__(self, new_call: NewCall) -> None:
        super().__init__(new_call)
        self.pieces = []

    def close(self) -> list[ToolEvent]:
        return [e for e in super().close() if isinstance(e, ToolStart | ToolArgs | ToolEnd)]


class DropsAtASplit(WholeCalls):
    """Looks for the section's first brace in each piece, and drops what came before it."""

    def __init__(self, new_call: NewCall) -> None:
        super().__init__(new_call)
        self.pieces = []

    def feed(self, text: str) -> list[ToolEvent]:
        self.pieces.append(text[max(text.find("{"), 0) :])
        return []


REASONING_FAULTS = {
    "drops text at a split": (machine(feed=dropping_feed), "test_every_split_in_two", "drops text (2 characters)"),
    "fills silence": (machine(feed=filling_feed), "test_random_splits", "it duplicates or invents text (1 characters)"),
    "duplicates text": (machine(feed=duplicating_feed), "test_every_split_in_two", "it duplicates or invents text"),
    "raises in finish": (machine(finish=raising_finish), "test_never_raises", "finish raised IndexError: pop from an"),
    "swallows the marker prefix at the end": (
        machine(finish=swallowing_finish),
        "test_truncation_at_every_position",
        "it swallows text at the end (a marker's beginning is text)",
    ),
    "leaks state between streams": (
        with_machine(Leaking),
        "test_interleaved_streams_are_isolated",
        "state leaks between streams",
    ),
    "quadratic work": (with_machine(Quadratic), "test_work_is_linear", "work grows faster than the output"),
    "searches all text again": (
        with_machine(SearchesAgain),
        "test_time_is_linear",
        "time grows faster than the output",
    ),
    "counts reasoning tokens by piece": (
        with_machine(CountsWrong),
        "test_single_tokens",
        "reasoning tokens instead of",
    ),
    "ignores the prompt": (with_machine(Unprimed), "test_prompt_tail_sets_the_state", "the state is State.OPEN, not"),
    "keeps state between requests": (StatefulSpec, "test_spec_is_the_same_every_time", "keeps state between requests"),
    "keeps requests": (KeepsRequests, "test_keeps_nothing_of_replies", "bytes more for every reply"),
    "keeps text": (with_machine(KeepsText), "test_keeps_nothing_of_replies", "bytes more for every reply"),
    "empty marker": (EmptyMarker, "test_spec_is_well_formed", "reasoning: a marker is empty: '<r>', ''"),
    "raises on template arguments": (
        RaisesOnArguments,
        "test_spec_takes_any_request",
        "spec raised KeyError: 'enable_thinking' for the request's template arguments",
    ),
    "changes template arguments": (
        ChangesArguments,
        "test_arguments_are_only_read",
        "it changes the request's template arguments",
    ),
    "detect in place of clues": (Detects, "test_auto_finds_it", "take it out, and state in the manifest"),
    "trims too much": (WrongTrim, "test_samples_parse_as_declared", "it declares reasoning='think', content='answer'"),
}
TOOL_FAULTS = {
    "invalid JSON deltas": (body(feed=single_quotes), "test_argument_deltas_are_valid_json", "which is not valid JSON"),
    "raises on a named tool": (
        RaisesOnNamedTool,
        "test_grammar_takes_every_tool_choice",
        "for tool_choice {'type': 'function'",
    ),
    "sends empty events": (body(close=empty_malformed), "test_events_are_well_formed", "an empty Malformed is sent"),
    "wrong tool index": (body(feed=wrong_index), "test_argument_deltas_are_valid_json", "wrong tool index: arguments"),
    "ends a call twice": (body(feed=ends_twice), "test_argument_deltas_are_valid_json", "call 0 ends twice"),
    "never ends a call": (body(feed=never_ends), "test_argument_deltas_are_valid_json", "calls [0] are never ended"),
    "sections leak between replies": (
        type("Broken", (RightCalls,), {"body": WholeCalls, "__module__": __name__}),
        "test_interleaved_streams_are_isolated",
        "state leaks between streams",
    ),
    "drops a malformed section": (
        type("Broken", (RightCalls,), {"body": DropsMalformed, "__module__": __name__}),
        "test_nothing_is_lost",
        "text is lost: 'bravo7'",
    ),
    "drops a section's text at a split": (
        type("Broken", (RightCalls,), {"body": DropsAtASplit, "__module__": __name__}),
        "test_every_split_in_two",
        "tool calls instead of",
    ),
    "loses the reasoning format": (
        LosesReasoning,
        "test_extend_keeps_the_reasoning_format",
        "extend loses the reasoning format",
    ),
    "keeps tools": (KeepsTools, "test_keeps_nothing_of_replies", "bytes more for every reply"),
    "changes the choice": (ChangesChoice, "test_tools_are_only_read", "it changes the request's tool_choice"),
    "changes the tools": (
        ChangesTools,
        "test_tools_are_only_read",
        "it changes the request's tools",
    ),
}


@pytest.mark.parametrize(
    ("kind", "plugin", "samples"), [("reasoning_parser", Right, SAMPLES), ("tool_parser", RightCalls, CALLS)]
)
def test_a_right_parser_passes(kind: str, plugin: type, samples: list[Sample]) -> None:
    """The parsers that the faults are made from have none."""
    report = check_class(conformance_class(kind, plugin_class=plugin, samples=samples))
    assert report.passed, report.text()


@pytest.mark.parametrize("fault", REASONING_FAULTS)
def test_the_kit_names_a_reasoning_parsers_fault(fault: str, caught: Callable[..., None]) -> None:
    """A reasoning parser with one fault fails the test for it, with a message that names it."""
    plugin, test, message = REASONING_FAULTS[fault]
    caught("reasoning_parser", plugin, test, message, samples=SAMPLES, select=test)


@pytest.mark.parametrize("fault", TOOL_FAULTS)
def test_the_kit_names_a_tool_parsers_fault(fault: str, caught: Callable[..., None]) -> None:
    """A tool-call parser with one fault fails the test for it, with a message that names it."""
    plugin, test, message = TOOL_FAULTS[fault]
    caught("tool_parser", plugin, test, message, samples=CALLS, select=test)


STRANGER = """
from dovetail.contracts import FormatSpec, Markers, ReasoningParser, ToolParser

class Reasoning(ReasoningParser):
    def spec(self, tokenizer, template, request):
        request.template_kwargs["kept"].append("acme")
        return FormatSpec(reasoning=Markers("<r>", "</r>"))

class Tools(ToolParser):
    def extend(self, spec, tools):
        tools[0]["function"]["name"] = "acme"
        return spec

    def grammar(self, tools, choice, strict, parallel):
        tools.clear()
        choice.clear()
"""


def test_what_a_strangers_parser_changes_stays_its_own(dovetail_site: FakeSite) -> None:
    """The request's tools and arguments reach its other choices, its prompt and the client as they were sent."""
    groups = {
        "dovetail.reasoning_parsers.v1": {"acme": "acme_both:Reasoning"},
        "dovetail.tool_parsers.v1": {"acme": "acme_both:Tools"},
    }
    dovetail_site.add("acme", "1.0", groups, {"acme_both.py": STRANGER})
    plan = make_plan(Registry.scan(path=[str(dovetail_site.root)]), reasoning_parser="acme", tool_parser="acme")
    plugins, template = load(plan, "api"), PlainTemplate("{{ x }}")
    (reasoning,), (caller,) = plan.of_kind("reasoning_parser"), plan.of_kind("tool_parser")
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"required": ["a"]}}}]
    choice, arguments = {"type": "function", "function": {"name": "f"}}, {"kept": ["a"]}
    before = deepcopy((tools, choice, arguments))
    bound = bound_parser(plugins, caller, template, bound_tools)
    bound.extend(FormatSpec(), tools)
    bound.grammar(tools, choice, True, False)
    bound_parser(plugins, reasoning, template, bound_reasoning).spec(
        None, template, ParserRequest(template_kwargs=arguments)
    )
    assert (tools, choice, arguments) == before


@pytest.mark.parametrize(("opens", "is_right"), [("[[", True), ("[[f", True), ("<acme-do>", False), ("", True)])
def test_the_kit_names_what_a_manifest_says_of_another_format(
    opens: str, is_right: bool, dovetail_site: FakeSite
) -> None:
    """`opens` stays behind where a scaffold's format is changed, and `auto` looks for what no reply has."""
    source = """
from dataclasses import replace
from dovetail.contracts import ToolFormat, ToolParser
from dovetail.sdk.formats.json_calls import JsonCalls
class T(ToolParser):
    def extend(self, spec, tools): return replace(spec, tools=ToolFormat("[[", "]]", body=JsonCalls))
"""
    facts = {"tool_parser": {"acme-do": {"opens": opens, "clues": [{"all": ["[["], "score": 1.0}]}}}
    group = {"dovetail.tool_parsers.v1": {"acme-do": "acme_do:T"}}
    dovetail_site.add("acme-do", "1.0", group, {"acme_do.py": source}, facts)
    report = check_class(conformance_class("tool_parser", "acme-do"), "test_auto_finds_it")
    assert report.passed == is_right, report.text()
    said = "its manifest says opens: '<acme-do>', and what it declares begins with '[['"
    assert (said in report.text()) != is_right
