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
from dovetail.contracts.reasoning import FormatSpec
from dovetail.contracts.tools import ToolParser
from dovetail.errors import RequestError
from dovetail.grammar.fields import Asked
from dovetail.grammar.limits import check_spec
from dovetail.grammar.route import GrammarReport, Route, Router, report
from dovetail.grammar.tools import answer_message, other_messages
from dovetail.grammar.validate import FinalValidator
from dovetail.plugins import LoadedPlugins
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

    def either(self, asked: Asked, tools: Route, spec: FormatSpec) -> Route:
        """Allow a text of the grammar, or the tool calls: where a request has both and `tool_choice` is auto.

        Args:
            asked: The grammar of the text.
            tools: Of the calls, as for `tool_choice` required.
            spec: The output format. In one of messages the text is that of the answer's message.

        Raises:
            RequestError: The two cannot be put together.
        """
        content = _content(asked.spec)
        if content is None or tools.spec.kind is not Kind.STRUCTURAL:
            text = (
                f"{asked.param} together with tools is not supported for a {asked.spec.kind}; set tool_choice to none"
            )
            raise RequestError(text, param=asked.param, code="unsupported_parameter")
        if spec.messages is not None:
            elements = [other_messages(spec.messages), answer_message(spec.messages, content)]
            content = {"type": "sequence", "elements": elements}
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


def _content(spec: GrammarSpec) -> Mapping[str, Any] | None:
    """Return a grammar as a part of a structural one, None where its kind cannot be."""
    if spec.kind is Kind.REGEX:
        return {"type": "regex", "pattern": spec.source}
    if spec.kind is Kind.CHOICE:
        return {"type": "or", "elements": [{"type": "const_string", "value": v} for v in json.loads(spec.source)]}
    if spec.kind is Kind.JSON or spec.kind is Kind.JSON_OBJECT:
        return {"type": "json_schema", "json_schema": json.loads(spec.source) if spec.source else {"type": "object"}}
    return None


def _any_arguments(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool whose arguments are any object."""
    return {**tool, "function": {**tool["function"], "parameters": {"type": "object"}}}


def _as_approximate(route: Route) -> Route:
    ways = tuple(replace(way, enforcement="approximate", ignored=("/parameters",)) for way in route.ways)
    return replace(route, ways=ways)
