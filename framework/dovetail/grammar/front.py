"""`GrammarFront`: structured outputs as the API side sees them, for the server and the offline `LLM` alike.

```python
front = GrammarFront.load(plugins, tokenizer, vocab_size)
route = front.route(read_grammar({"regex": "[0-9]+"}))      # how it will be enforced; goes out with `Submit`
report = front.report(route, delta.grammar_step, text, ended=True)
```
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.grammar import GrammarBackend, GrammarSpec, Kind, Vocabulary
from dovetail.contracts.reasoning import FormatSpec, State
from dovetail.contracts.tools import ToolParser
from dovetail.engine.messages import Marker, Thinking
from dovetail.errors import RequestError
from dovetail.grammar.fields import Asked
from dovetail.grammar.limits import check_spec
from dovetail.grammar.route import GrammarReport, Route, Router, report
from dovetail.grammar.validate import FinalValidator
from dovetail.plugins import LoadedPlugins
from dovetail.text.output import make_parser
from dovetail.text.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]


class GrammarFront:
    """One per process. Thread-safe."""

    def __init__(self, backends: Mapping[str, GrammarBackend], *, strict_schema: bool = False) -> None:
        """Keep the backends, in the plan's order; see `Router` for `strict_schema`."""
        self._router = Router(backends, strict_schema=strict_schema)
        self._validator = FinalValidator()

    @classmethod
    def load(
        cls, plugins: LoadedPlugins, tokenizer: Tokenizer, vocab_size: int, *, strict_schema: bool = False
    ) -> GrammarFront:
        """Make the planned backends, for `supports` only: they get a vocabulary without tokens."""
        vocabulary = Vocabulary(
            tokens=(),
            size=vocab_size,
            eos_ids=frozenset(tokenizer.eos_token_ids),
            special_ids=frozenset(),
            fingerprint="",
            added={text: i for text, i in tokenizer.added_tokens.items() if text.strip()},
        )
        backends: dict[str, GrammarBackend] = {}
        for planned, backend in plugins.candidates("grammar_backend"):
            backends[planned.name] = backend(vocabulary)
        return cls(backends, strict_schema=strict_schema)

    def route(self, asked: Asked) -> Route:
        """Choose the ways to enforce a request's grammar.

        Raises:
            RequestError: There is none.
        """
        return self._router.route(asked.spec, asked.param)

    def tools(self, parser: ToolParser, name: str, tools: Tools, choice: Any, *, parallel: bool, param: str) -> Route:
        """Choose the ways to enforce tool calls in the model's own format.

        Args:
            parser: The tool parser.
            name: Its name, for errors.
            tools: As OpenAI writes them.
            choice: `required`, `auto`, or OpenAI's object that names a function.
            parallel: Whether there may be more than one call.
            param: The request's field.

        Raises:
            RequestError: The format has no grammar, or a strict tool's schema cannot be enforced.
        """
        strict = any(tool["function"].get("strict") for tool in tools)
        spec = parser.grammar(tools, choice, strict, parallel)
        if spec is None:
            text = f"{param}: the tool format {name!r} has no grammar, so this cannot be enforced; use tool_choice auto"
            raise RequestError(text, param=param, code="unsupported_parameter")
        check_spec(spec, param)
        loose = parser.grammar([_any_arguments(tool) for tool in tools], choice, strict, parallel)
        try:
            route = self._router.route(replace(spec, strict=strict), param)
        except RequestError:
            if strict or loose is None:
                raise
            return _as_approximate(self._router.route(loose, param))
        if loose is None or loose == spec or strict:
            return route
        weaker = _as_approximate(self._router.route(loose, param))
        return replace(route, ways=route.ways + weaker.ways)

    def either(self, asked: Asked, tools: Route) -> Route:
        """Allow a text of the grammar, or the tool calls: where a request has both and `tool_choice` is auto.

        Raises:
            RequestError: The two cannot be put together.
        """
        if asked.spec.kind not in (Kind.JSON, Kind.JSON_OBJECT, Kind.REGEX) or tools.spec.kind is not Kind.STRUCTURAL:
            text = (
                f"{asked.param} together with tools is not supported for a {asked.spec.kind}; set tool_choice to none"
            )
            raise RequestError(text, param=asked.param, code="unsupported_parameter")
        content: dict[str, Any] = {"type": "regex", "pattern": asked.spec.source}
        if asked.spec.kind is not Kind.REGEX:
            schema = json.loads(asked.spec.source) if asked.spec.source else {"type": "object"}
            content = {"type": "json_schema", "json_schema": schema}
        calls = json.loads(tools.spec.source)["format"]
        source = json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": [content, calls]}})
        return self._router.route(GrammarSpec(kind=Kind.STRUCTURAL, source=source), asked.param)

    def report(self, route: Route, step: int, text: str, *, ended: bool) -> GrammarReport:
        """Say what came of a grammar; judges the text where enforcement was not full, which blocks.

        Args:
            route: The request's.
            step: The way that the engine enforced.
            text: The finished content.
            ended: The model ended it; False where it was cut off.
        """
        if not ended:
            return report(route, step, None)
        if route.ways[step].enforcement == "full":
            return report(route, step, True)
        if not route.needs_validation(step):
            return report(route, step, None)
        [valid] = self._validator.judge(route.spec.source, [text])
        return report(route, step, valid)

    def close(self) -> None:
        """End the process that judges texts, if it was started."""
        self._validator.close()


def thinking_of(
    spec: FormatSpec,
    tokenizer: Tokenizer,
    prompt_tail: str | None,
    *,
    budget: int | None = None,
    calls_tools: bool = False,
    param: str | None = None,
) -> Thinking | None:
    """Return what the engine must know of a choice's thinking; None where a grammar can start at once.

    Args:
        spec: The output format, as the output parser gets it.
        tokenizer: The model's.
        prompt_tail: What the template appended to the prompt; None where no template rendered it.
        budget: Most tokens of thinking.
        calls_tools: The grammar is one of tool calls, which may end thinking.
        param: The request's field, for the error.

    Raises:
        RequestError: The format is not one of markers around thinking.
    """
    if spec.machine is not None and calls_tools and budget is None:
        return None  # the format's own grammar of calls describes the thinking before them, too
    if spec.machine is not None:
        text = f"{param or 'a grammar'} is not supported with this model's output format, whose parts are not marked"
        raise RequestError(text, param=param, code="unsupported_parameter")
    markers = spec.reasoning
    if markers is None or prompt_tail is None:
        if budget is not None and param is not None:
            text = f"{param} needs a model that thinks, and a reasoning parser that reads it (--reasoning-parser)"
            raise RequestError(text, param=param, code="unsupported_parameter")
        return None
    state = make_parser(spec, tokenizer).prime(prompt_tail)
    if state is State.OUT:
        return None
    tools: tuple[int, ...] = ()
    if calls_tools and spec.tools is not None and markers.ended_by_tools:
        tools = tuple(i for text, i in tokenizer.added_tokens.items() if text == spec.tools.start)
    return Thinking(
        state=state.value,
        start=_marker(markers.start, tokenizer),
        end=_marker(markers.end, tokenizer),
        tools=tools,
        budget=budget,
    )


def _marker(text: str, tokenizer: Tokenizer) -> Marker:
    token_id = tokenizer.added_tokens.get(text)
    return Marker(
        text, (token_id,) if token_id is not None else tuple(tokenizer.encode(text, add_special_tokens=False))
    )


def _any_arguments(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool whose arguments are any object."""
    return {**tool, "function": {**tool["function"], "parameters": {"type": "object"}}}


def _as_approximate(route: Route) -> Route:
    ways = tuple(replace(way, enforcement="approximate", ignored=("/parameters",)) for way in route.ways)
    return replace(route, ways=ways)
