"""Parsers made ready for a model: bound to its chat template, and fitted to what the template itself writes.

Families share their markers and differ in newlines: two before a call here, one behind a thought there. What the
template writes wins, so that a reply that comes back as history renders to the tokens that were generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.output import FormatSpec, State, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.contracts.tools import ToolParser
from dovetail.text.chat.template import BeginThinking
from dovetail.text.detection.derive import Derived, derive
from dovetail.text.parsing.output import make_parser


class FittedReasoning(ReasoningParser):
    """A reasoning parser whose newlines are the template's."""

    def __init__(self, parser: ReasoningParser, derived: Derived) -> None:
        self._parser, self._derived = parser, derived

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the parser's format with the template's newlines."""
        return fit_reasoning(self._parser.spec(tokenizer, template, request), self._derived)


class FittedTools(ToolParser):
    """A tool parser whose newlines are the template's."""

    def __init__(self, parser: ToolParser, derived: Derived) -> None:
        self._parser, self._derived = parser, derived

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the parser's format with the template's newlines."""
        return fit_tools(self._parser.extend(spec, tools), self._derived)

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """Ask the parser."""
        return self._parser.grammar(tools, choice, strict, parallel)


class GuardedReasoning(ReasoningParser):
    """A stranger's reasoning parser, which gets the request's arguments as a copy: what it changes stays its own."""

    def __init__(self, parser: ReasoningParser) -> None:
        self._parser = parser

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Ask the parser."""
        return self._parser.spec(tokenizer, template, ParserRequest(template_kwargs=_copied(request.template_kwargs)))


class GuardedTools(ToolParser):
    """A stranger's tool parser, which gets copies of the tools: clients, prompts and other choices see those sent."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Ask the parser."""
        return self._parser.extend(spec, _copied(tools))

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """Ask the parser."""
        return self._parser.grammar(_copied(tools), _copied(choice), strict, parallel)


def _copied(value: Any) -> Any:
    """Copy what JSON can say, five times as fast as `deepcopy`; a bound of the body's depth is one of this."""
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list | tuple) else value


def bound_reasoning(parser: ReasoningParser, template: TemplateView, *, is_ours: bool = True) -> ReasoningParser:
    """Return a reasoning parser made ready for a model."""
    found, derived = parser.for_template(template), derive(template)
    found = found if is_ours else GuardedReasoning(found)
    if derived.reasoning is None and derived.answer is None:
        return found
    return FittedReasoning(found, derived)


def thinking_behind(parser: ReasoningParser, tokenizer: TokenizerView, template: TemplateView) -> BeginThinking:
    """Return what says how thinking begins behind a prompt; see `ChatTemplate.begin_thinking`."""

    def begin(tail: str, template_kwargs: Mapping[str, Any]) -> str | None:
        spec = parser.spec(tokenizer, template, ParserRequest(template_kwargs=template_kwargs))
        if spec.reasoning is None and spec.messages is None:
            return None
        state = make_parser(spec).prime(tail)
        if state is State.IN:
            return ""
        if (messages := spec.messages) is not None and messages.thinking:
            is_whole = bool(messages.bodies) and messages.thinking.endswith(messages.bodies)
            return messages.thinking + ("" if is_whole else messages.body)
        if state is State.OUT or spec.reasoning is None:
            return None
        return spec.reasoning.start + spec.reasoning.after_start

    return begin


def bound_tools(parser: ToolParser, template: TemplateView, *, is_ours: bool = True) -> ToolParser:
    """Return a tool-call parser made ready for a model."""
    found, derived = parser.for_template(template), derive(template)
    found = found if is_ours else GuardedTools(found)
    return found if derived.calls is None else FittedTools(found, derived)


def fit_reasoning(spec: FormatSpec, derived: Derived) -> FormatSpec:
    """Take the newlines around thinking, and the markers around an answer, from the template."""
    theirs = derived.reasoning
    if spec.machine is not None:
        return spec
    if spec.answer is None:
        spec = replace(spec, answer=derived.answer)
    if spec.reasoning is None or theirs is None:
        return spec
    if (spec.reasoning.start, spec.reasoning.end) != (theirs.start, theirs.end):
        return spec
    markers = replace(
        spec.reasoning,
        after_start=theirs.after_start,
        before_end=theirs.before_end,
        after_end=theirs.after_end,
    )
    return replace(spec, reasoning=markers)


def fit_tools(spec: FormatSpec, derived: Derived) -> FormatSpec:
    """Take the newlines before a call from the template."""
    if spec.machine is not None or spec.tools is None or derived.calls is None:
        return spec
    if spec.tools.start != derived.calls.start:
        return spec
    return replace(spec, tools=replace(spec.tools, before_start=derived.calls.before))
