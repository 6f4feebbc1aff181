"""`template`: calls as the model's chat template writes them.

The format is not written down here: it is read off the template, see `dovetail_parsers.derived.derive`. `auto` takes
this parser where no other one reads back what the template writes. Without a template that shows calls, none are looked
for.

Defined by the model's own `chat_template`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.output import FormatSpec, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.contracts.tools import ToolParser
from dovetail_parsers.derived.derive import Derived, call_lines, derive, thinking_lines

# `template`: whatever the model's chat template writes around thinking.


class TemplateReasoning(ReasoningParser):
    """Thinking where the template has it."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare what was derived."""
        found = derive(template)
        is_silent = found.regions is not None and not found.regions.has("thinking")
        return FormatSpec() if is_silent else found.spec()

    def described(self, template: TemplateView) -> Mapping[str, str]:
        """Say what was derived."""
        return thinking_lines(derive(template))


class TemplateTools(ToolParser):
    """Calls where the template has them."""

    def __init__(self, derived: Derived | None = None) -> None:
        """Prepare; without what was derived, no calls are known."""
        self._derived = derived or Derived()

    def for_template(self, template: TemplateView) -> TemplateTools:
        """Return a parser of what the template writes."""
        return TemplateTools(derive(template))

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers, or read all of the reply in regions."""
        calls, regions = self._derived.calls, self._derived.regions
        if regions is not None:
            return regions.spec(tools) if regions.has("tool_calls") else spec
        return spec if calls is None else replace(spec, tools=calls.tool_format(tools))

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """Calls as the template writes them."""
        calls = self._derived.calls
        return None if calls is None else calls.grammar(tools, choice, parallel)

    def described(self, template: TemplateView) -> Mapping[str, str]:
        """Say what was derived."""
        return call_lines(derive(template))
