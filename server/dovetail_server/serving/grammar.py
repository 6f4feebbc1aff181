"""Structured outputs of a request: from its fields to what the engine enforces, and to what the reply says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.contracts.reasoning import FormatSpec, ParserRequest
from dovetail.grammar.fields import NAMES, Asked, read_grammar
from dovetail.grammar.route import Route
from dovetail.grammar.structured_outputs import StructuredOutputs
from dovetail.grammar.thinking import Use, thinking_of
from dovetail.messages import GrammarStep, Thinking
from dovetail_server import errors

if TYPE_CHECKING:
    from dovetail_server.serving.text import TextTools

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the engine is told beside the prompt, and the route that explains the reply."""

    route: Route | None = None
    thinking: Thinking | None = None

    @property
    def steps(self) -> tuple[GrammarStep, ...]:
        """`Submit.grammar`."""
        return () if self.route is None else self.route.steps


NONE = Constraints()


def grammar_of(request: Any) -> Asked | None:
    """Read the grammar fields that a request body has.

    Raises:
        RequestError: See `read_grammar`.
    """
    return read_grammar({name: getattr(request, name, None) for name in NAMES})


def plain_constraints(request: Any, text: TextTools) -> Constraints:
    """Return the constraints of a request without a conversation: the grammar holds from the first token.

    Raises:
        RequestError: See `read_grammar` and `StructuredOutputs`.
    """
    asked = grammar_of(request)
    front = text.grammar.only(request.grammar_backend)
    return NONE if asked is None else Constraints(route=front.route(asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolWish:
    """What a chat request wants of tools.

    Attributes:
        tools: Those that the model may call.
        choice: `auto`, `required`, or OpenAI's object that names one.
        param: Name of the field that says so.
        parallel: Whether several calls may be made.
        strict: Calls must conform to the tools' schemas.
    """

    tools: Tools
    choice: Any
    param: str
    parallel: bool
    strict: bool

    @property
    def needs_grammar(self) -> bool:
        """Whether the wish can only be kept by a grammar."""
        return self.choice != "auto" or self.strict


def chat_constraints(
    asked: Asked | None,
    wish: ToolWish | None,
    text: TextTools,
    front: StructuredOutputs,
    *,
    budget: int | None,
    template_kwargs: Mapping[str, Any],
    tail: str,
) -> Constraints:
    """Return the constraints of a chat request; `front` routes its grammars.

    Raises:
        RequestError: They contradict each other, or nothing here can enforce them.
    """
    spec = _format(wish, text, template_kwargs)
    route = None if asked is None else front.route(asked)
    calls = None
    if wish is not None and (wish.needs_grammar or asked is not None):
        # Beside a grammar of the content, calls are the alternative, not something within free text.
        calls = _tool_route(
            wish, text, front, "required" if asked is not None and wish.choice == "auto" else wish.choice
        )
    if asked is not None and calls is not None and wish is not None:
        # A call that must come leaves no content for the grammar to describe.
        route = calls if wish.choice != "auto" else front.either(asked, calls, spec)
    route = route or calls
    if route is None and budget is None:
        return NONE
    param = route.param if route is not None else "thinking_budget"
    param = "thinking_budget" if budget is not None else param
    use = Use(constrained=route is not None, calls=calls is not None, budget=budget, param=param)
    thinking = thinking_of(spec, text.tokenizer, tail, use)
    return Constraints(route=route, thinking=thinking)


def _tool_route(wish: ToolWish, text: TextTools, front: StructuredOutputs, choice: Any) -> Route:
    if text.tools is None:
        why = "the server was started without --tool-call-parser, so it does not know the model's format of calls"
        raise errors.unsupported(wish.param, why)
    return front.tools(text.tools, text.tools_name, wish.tools, choice, parallel=wish.parallel, param=wish.param)


def _format(wish: ToolWish | None, text: TextTools, template_kwargs: Mapping[str, Any]) -> FormatSpec:
    """The format that the output parser reads the reply with."""
    spec = FormatSpec()
    if text.reasoning is not None:
        spec = text.reasoning.spec(text.tokenizer, text.template, ParserRequest(template_kwargs=template_kwargs))
    if text.tools is not None and wish is not None:
        spec = text.tools.extend(spec, wish.tools)
    return spec
