"""What a request's reply is held to: from its grammar, tools and budget of thinking to what the engine enforces."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.output import FormatSpec
from dovetail.contracts.reasoning import ParserRequest
from dovetail.grammar.pipeline import GrammarOutcome, StructuredOutputs
from dovetail.grammar.spec.fields import RequestedGrammar
from dovetail.grammar.spec.route import GrammarRoute
from dovetail.grammar.spec.thinking import ReasoningOptions, thinking_of
from dovetail.messages import GrammarOption, Thinking
from dovetail.processing.processor import Processor
from dovetail.processing.tools import ToolOptions
from dovetail.text.parsing.stream import OutputStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the engine is told beside the prompt, and the route that explains the reply."""

    route: GrammarRoute | None = None
    thinking: Thinking | None = None

    @property
    def options(self) -> tuple[GrammarOption, ...]:
        """`Submit.grammar`."""
        return () if self.route is None else self.route.engine_options


NONE = Constraints()


def text_constraints(
    asked: RequestedGrammar | None, backend: str | None, processor: Processor, *, budget: int | None = None
) -> Constraints:
    """Return the constraints of a request without a conversation: the grammar holds from the first token.

    Raises:
        RequestError: See `StructuredOutputs`; or there is a budget, and nothing that thinks.
    """
    structured = processor.grammar if backend is None else processor.grammar.only(backend)
    route = None if asked is None else structured.route(asked)
    if budget is not None:
        use = ReasoningOptions(constrained=route is not None, budget=budget, param="thinking_budget")
        thinking_of(FormatSpec(), processor.tokenizer, None, use)
    return NONE if route is None else Constraints(route=route)


def chat_constraints(
    asked: RequestedGrammar | None,
    backend: str | None,
    processor: Processor,
    *,
    tools: ToolOptions | None,
    budget: int | None,
    template_kwargs: Mapping[str, Any],
    tail: str,
) -> Constraints:
    """As `_chat_constraints`. What is only preferred is left where it cannot be had."""
    if tools is not None and tools.prefers_grammar and not tools.needs_grammar:
        with suppress(RequestError):
            return _chat_constraints(
                asked,
                backend,
                processor,
                tools=replace(tools, strict=True),
                budget=budget,
                template_kwargs=template_kwargs,
                tail=tail,
            )
    return _chat_constraints(
        asked, backend, processor, tools=tools, budget=budget, template_kwargs=template_kwargs, tail=tail
    )


def _chat_constraints(
    asked: RequestedGrammar | None,
    backend: str | None,
    processor: Processor,
    *,
    tools: ToolOptions | None,
    budget: int | None,
    template_kwargs: Mapping[str, Any],
    tail: str,
) -> Constraints:
    """Return the constraints of a conversation.

    Args:
        asked: The grammar of the content.
        backend: The only one that may enforce, where the request names one.
        processor: The model's format, and what enforces grammars.
        tools: Those that the model may call.
        budget: Most tokens of thinking.
        template_kwargs: The template's variables.
        tail: What the template appended to the prompt.

    Raises:
        RequestError: They contradict each other, or nothing here can enforce them.
    """
    structured = processor.grammar if backend is None else processor.grammar.only(backend)
    if asked is None and budget is None and not (tools is not None and tools.needs_grammar):
        return NONE
    spec = _format(tools, processor, template_kwargs)
    route = None if asked is None else structured.route(asked)
    calls = None
    if tools is not None and (tools.needs_grammar or asked is not None):
        # Beside a grammar of the content, calls are the alternative, not something within free text.
        choice = "required" if asked is not None and tools.choice == "auto" else tools.choice
        calls = _calls(tools, processor, structured, choice)
    if asked is not None and calls is not None and tools is not None:
        # A call that must come leaves no content for the grammar to describe.
        route = calls if tools.choice != "auto" else structured.either(asked, calls, spec)
    route = route or calls
    if route is None and budget is None:
        return NONE
    param = "thinking_budget" if route is None or budget is not None else route.param
    use = ReasoningOptions(constrained=route is not None, calls=calls is not None, budget=budget, param=param)
    return Constraints(route=route, thinking=thinking_of(spec, processor.tokenizer, tail, use))


def _calls(tools: ToolOptions, processor: Processor, structured: StructuredOutputs, choice: Any) -> GrammarRoute:
    name = processor.tools_name
    return structured.tools(tools.parser, name, tools.tools, choice, parallel=tools.parallel, param=tools.param)


def _format(tools: ToolOptions | None, processor: Processor, template_kwargs: Mapping[str, Any]) -> FormatSpec:
    """The format that the output parser reads the reply with."""
    spec = FormatSpec()
    if processor.reasoning is not None:
        request = ParserRequest(template_kwargs=template_kwargs)
        spec = processor.reasoning.spec(processor.tokenizer, processor.template, request)
    return spec if tools is None else tools.parser.extend(spec, tools.tools)


def outcome_of(
    output: OutputStream, option: int, left_out: tuple[str, ...], *, is_dropped: bool = False
) -> GrammarOutcome:
    """Return what came of a grammar, now that its reply has ended.

    Args:
        output: The reply.
        option: The option that the engine enforced, by its index.
        left_out: What it left out of it.
        is_dropped: Nobody wanted the reply.
    """
    finish = output.finish
    is_whole = finish is not None and finish.reason in ("stop", "tool_calls") and not isinstance(finish.matched, str)
    calls = [(call.name, call.arguments) for call in output.tool_calls]
    return GrammarOutcome(
        option=option, left_out=left_out, text=output.text, calls=calls, ended=is_whole and not is_dropped
    )
