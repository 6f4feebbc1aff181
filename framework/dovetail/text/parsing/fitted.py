"""Parsers made ready for a model: bound to its chat template, and fitted to what the template itself writes.

Families share their markers and differ in newlines: two before a call here, one behind a thought there. What the
template writes wins, so that a reply that comes back as history renders to the tokens that were generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from dovetail.contracts.errors import PluginError, RequestError
from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.output import FormatSpec, State, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.contracts.tools import ToolParser
from dovetail.sdk.formats.output import make_parser
from dovetail.sdk.formats.reply_markers import ReplyMarkers, reply_markers
from dovetail.sdk.formats.samples import ANSWER, CALLED, CALLED_BEHIND, NAMES, tools_of
from dovetail.text.chat.template import BeginThinking


class FittedReasoning(ReasoningParser):
    """A reasoning parser whose newlines are the template's."""

    def __init__(self, parser: ReasoningParser, markers: ReplyMarkers) -> None:
        self._parser, self._markers = parser, markers

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the parser's format with the template's newlines."""
        return fit_reasoning(self._parser.spec(tokenizer, template, request), self._markers)


class FittedTools(ToolParser):
    """A tool parser whose newlines are the template's."""

    def __init__(self, parser: ToolParser, template: TemplateView) -> None:
        self._parser, self._template = parser, template

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the parser's format with the template's newlines."""
        return fit_tools(self._parser.extend(spec, tools), self._template)

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """Ask the parser."""
        return self._parser.grammar(tools, choice, strict, parallel)


class GuardedReasoning(ReasoningParser):
    """A stranger's reasoning parser: it gets the request's arguments as a copy, and its faults are told by its name."""

    def __init__(self, parser: ReasoningParser, name: str) -> None:
        self._parser, self._name = parser, name

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Ask the parser."""
        copy = ParserRequest(template_kwargs=_copied(request.template_kwargs))
        return _declared(f"{self._name}: spec()", partial(self._parser.spec, tokenizer, template, copy))


class GuardedTools(ToolParser):
    """A stranger's tool parser: as `GuardedReasoning`; clients, prompts and other choices see the tools as sent."""

    def __init__(self, parser: ToolParser, name: str) -> None:
        self._parser, self._name = parser, name
        self.extend(FormatSpec(), tools_of(CALLED[:1]) or ())  # what fails here would fail each request

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Ask the parser."""
        return _declared(f"{self._name}: extend()", partial(self._parser.extend, spec, _copied(tools)))

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """Ask the parser."""
        return self._parser.grammar(_copied(tools), _copied(choice), strict, parallel)


def _declared(what: str, ask: Callable[[], FormatSpec]) -> FormatSpec:
    """Return the format that a stranger's parser declares.

    Raises:
        PluginError: It fails, or declares something else.
        RequestError: The parser's own.
    """
    try:
        found = ask()
    except RequestError:
        raise
    except Exception as error:
        raise PluginError(f"{what} failed: {type(error).__name__}: {error}") from error
    if isinstance(found, FormatSpec):
        return found
    raise PluginError(f"{what} returned {found!r:.80}, not a FormatSpec")


def _copied(value: Any) -> Any:
    """Copy what JSON can say, five times as fast as `deepcopy`; a bound of the body's depth is one of this."""
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list | tuple) else value


def bound_reasoning(parser: ReasoningParser, template: TemplateView, stranger: str = "") -> ReasoningParser:
    """Return a reasoning parser made ready for a model; `stranger` names a package's, for messages."""
    found, markers = parser.for_template(template), reply_markers(template)
    found = GuardedReasoning(found, stranger) if stranger else found
    if markers.reasoning is None and markers.answer is None:
        return found
    return FittedReasoning(found, markers)


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


def bound_tools(parser: ToolParser, template: TemplateView, stranger: str = "") -> ToolParser:
    """Return a tool-call parser made ready for a model; `stranger` as of `bound_reasoning`."""
    found = parser.for_template(template)
    found = GuardedTools(found, stranger) if stranger else found
    return FittedTools(found, template) if called_behind(template) else found


def fit_reasoning(spec: FormatSpec, shown: ReplyMarkers) -> FormatSpec:
    """Take the newlines around thinking, and the markers around an answer, from the template."""
    theirs = shown.reasoning
    if spec.machine is not None:
        return spec
    if spec.answer is None:
        spec = replace(spec, answer=shown.answer)
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


def fit_tools(spec: FormatSpec, template: TemplateView) -> FormatSpec:
    """Take the newlines before a call from the template."""
    if spec.machine is not None or spec.tools is None:
        return spec
    tools = spec.tools
    before = newlines_before(template, tools.start or next(iter(tools.also), ""))
    return spec if before is None else replace(spec, tools=replace(tools, before_start=before))


@lru_cache(maxsize=64)
def newlines_before(template: TemplateView, start: str) -> str | None:
    """Return the newlines that a template puts between an answer and a call's marker; None where it shows none."""
    for text in called_behind(template) if start else ():
        before, found, rest = text.partition(start)
        if found and NAMES[0] in rest:
            return before[len(before.rstrip("\n")) :]
    return None


@lru_cache(maxsize=8)
def called_behind(template: TemplateView) -> tuple[str, ...]:
    """Return what a template writes behind an answer with two calls, and with one, as far as it shows both."""
    texts = []
    for reply in CALLED_BEHIND if template.source else ():
        shown = template.written(reply)
        _, found, text = ("", "", "") if shown is None else shown.whole.rpartition(ANSWER)
        if found and NAMES[0] in text:
            texts.append(text)
    return tuple(texts)
