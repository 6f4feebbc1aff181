"""What a request's reply is held to: from its grammar, tools and budget of thinking to what the engine enforces."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from dovetail.contracts.errors import RequestError
from dovetail.contracts.output import FormatSpec, Markers, Messages, State
from dovetail.contracts.reasoning import ParserRequest
from dovetail.grammar.pipeline import GrammarOutcome
from dovetail.grammar.spec.fields import RequestedGrammar
from dovetail.grammar.spec.route import GrammarRoute
from dovetail.messages import GrammarOption, MarkedThinking, Marker, MessageThinking, Thinking
from dovetail.processing.processor import Processor
from dovetail.processing.tools import ToolOptions
from dovetail.sdk.formats.output import make_parser
from dovetail.text.parsing.stream import OutputStream
from dovetail.text.tokenizer.tokenizer import Tokenizer

# What the engine's gate must know of a request's thinking, read from the format that the output parser uses, too.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """What a request wants of the gate.

    Attributes:
        calls: It has a grammar, which is one of tool calls.
        budget: Most tokens of thinking.
        param: The request's field, for errors.
    """

    calls: bool = False
    budget: int | None = None
    param: str = "a grammar"


def thinking_of(
    spec: FormatSpec, tokenizer: Tokenizer, prompt_tail: str | None, use: ReasoningOptions
) -> Thinking | None:
    """Return what the engine must know of a choice's thinking; None where it need not follow any.

    Args:
        spec: The output format, as the output parser gets it.
        tokenizer: The model's.
        prompt_tail: What the template appended to the prompt; None where no template rendered it.
        use: What it is for.

    Raises:
        RequestError: The format does not say where thinking stands, or there is none to keep a budget for.
    """
    if spec.machine is not None and use.calls and use.budget is None:
        return None  # such a format's grammar of calls describes the whole reply
    if spec.machine is not None and spec.messages is None:
        text = f"{use.param} is not supported with this model's output format, which does not say where thinking stands"
        raise RequestError(text, param=use.param, code="unsupported_parameter")
    if prompt_tail is None or (spec.messages is None and spec.reasoning is None):
        if use.budget is not None:
            text = f"{use.param} needs a model that thinks, and a reasoning parser that reads it (--reasoning-parser)"
            raise RequestError(text, param=use.param, code="unsupported_parameter")
        return None
    state = make_parser(spec, tokenizer).prime(prompt_tail)
    if state is State.OUT:
        return None
    if spec.messages is not None:
        return _in_messages(spec, spec.messages, tokenizer, state, prompt_tail, use)
    return _between_markers(spec, cast("Markers", spec.reasoning), tokenizer, state, use)


def _between_markers(
    spec: FormatSpec, markers: Markers, tokenizer: Tokenizer, state: State, use: ReasoningOptions
) -> MarkedThinking:
    added = tokenizer.added_tokens
    calls = () if spec.tools is None else (spec.tools.start, *spec.tools.also)
    breaks = markers.ended_by if spec.tools is None else ()
    breaks += (spec.answer.start, *spec.dropped) if spec.answer is not None and markers.ended_by_answer else ()
    answers = () if spec.answer is None else (spec.answer.start,)
    texts = (*(calls if markers.ended_by_tools else ()), *breaks)
    return MarkedThinking(
        state=state.value,
        start=_marker(markers.start, tokenizer),
        end=_marker(markers.end, tokenizer),
        after=markers.after_end,
        tools=tuple(added[text] for text in calls if text in added),
        breaks=tuple(added[text] for text in breaks if text in added),
        answers=tuple(added[text] for text in answers if text in added),
        break_texts=tuple(text for text in texts if text and text not in added),
        ended_by_tools=markers.ended_by_tools,
        calls=use.calls,
        budget=use.budget,
    )


def _in_messages(
    spec: FormatSpec, messages: Messages, tokenizer: Tokenizer, state: State, prompt_tail: str, use: ReasoningOptions
) -> MessageThinking:
    marks = (messages.start, *messages.parts, *messages.inner, messages.body, *messages.bodies, *messages.ends)
    missing = [mark for mark in marks if mark not in tokenizer.added_tokens]
    if missing:
        text = f"{use.param} is not supported: {missing[0]} is no token of this model's vocabulary, as its format wants"
        raise RequestError(text, param=use.param, code="unsupported_parameter")
    header = prompt_tail[max(prompt_tail.rfind(messages.start), 0) :] if state is State.OPEN else ""
    return MessageThinking(
        state=state.value,
        header=header,
        start=_marker(messages.start, tokenizer),
        parts=tuple(_marker(text, tokenizer) for text in messages.parts),
        inner=tuple(_marker(text, tokenizer) for text in messages.inner),
        body=_marker(messages.body, tokenizer),
        ends=tuple(tokenizer.added_tokens[text] for text in messages.ends),
        thinks=messages.thinks,
        answers=messages.answers,
        first=_headers(messages, tokenizer, header),
        next=_headers(messages, tokenizer, ""),
        calls=spec.tools is not None,
        whole=use.calls,
        budget=use.budget,
        bodies=tuple(_marker(text, tokenizer) for text in messages.bodies),
        bare=messages.bare,
    )


def _headers(messages: Messages, tokenizer: Tokenizer, begun: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of the canonical headers behind what has begun of them; none of one that begins in another way."""

    def rest(header: str) -> tuple[int, ...]:
        text = messages.start + messages.role + header
        text += "" if header.endswith(messages.bodies or ("\0",)) else messages.body
        if not text.startswith(begun):
            return ()
        return tuple(tokenizer.encode(text[len(begun) :], add_special_tokens=False))

    return rest(messages.thinking), rest(messages.answer)


def _marker(text: str, tokenizer: Tokenizer) -> Marker:
    token_id = tokenizer.added_tokens.get(text)
    return Marker(
        text, (token_id,) if token_id is not None else tuple(tokenizer.encode(text, add_special_tokens=False))
    )


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


def constraints_of(
    asked: RequestedGrammar | None,
    backend: str | None,
    processor: Processor,
    *,
    budget: int | None,
    tools: ToolOptions | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    tail: str | None = None,
) -> Constraints:
    """Return the constraints of a request. What is only preferred is left where it cannot be had.

    Without a conversation, which the last three are of, the grammar holds from the first token.

    Args:
        asked: The grammar of the content.
        backend: The only one that may enforce, where the request names one.
        processor: The model's format, and what enforces grammars.
        budget: Most tokens of thinking.
        tools: Those that the model may call.
        template_kwargs: The template's variables.
        tail: What the template appended to the prompt.

    Raises:
        RequestError: They contradict each other, or nothing here can enforce them.
    """
    if tools is not None and tools.prefers_grammar and not tools.needs_grammar:
        with suppress(RequestError):
            held_to = replace(tools, strict=True, prefers_grammar=False)
            return constraints_of(
                asked, backend, processor, budget=budget, tools=held_to, template_kwargs=template_kwargs, tail=tail
            )
    structured = processor.grammar if backend is None else processor.grammar.only(backend)
    if asked is None and budget is None and not (tools is not None and tools.needs_grammar):
        return NONE
    spec = FormatSpec()
    if tail is not None and processor.reasoning is not None:
        request = ParserRequest(template_kwargs=template_kwargs or {})
        spec = processor.reasoning.spec(processor.tokenizer, processor.template, request)
    if tools is not None:
        spec = tools.parser.extend(spec, tools.tools)
    route = None if asked is None else structured.route(asked)
    calls = None
    if tools is not None and (tools.needs_grammar or asked is not None):
        # Beside a grammar of the content, calls are the alternative, not something within free text.
        choice = "required" if asked is not None and tools.choice == "auto" else tools.choice
        calls = structured.tools(
            tools.parser, processor.tools_name, tools.tools, choice, parallel=tools.parallel, param=tools.param
        )
        # A call that must come leaves no content for the grammar to describe.
        route = calls if asked is None or tools.choice != "auto" else structured.either(asked, calls, spec)
    if route is None and budget is None:
        return NONE
    param = "thinking_budget" if route is None or budget is not None else route.param
    use = ReasoningOptions(calls=calls is not None, budget=budget, param=param)
    return Constraints(route=route, thinking=thinking_of(spec, processor.tokenizer, tail, use))


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
