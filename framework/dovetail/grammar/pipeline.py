"""Structured outputs from a request's grammar to the report on its text, for the server and the offline `LLM` alike.

Each step in the module that takes it:

1. **Parse.** `spec.fields` reads every spelling (`response_format`, `regex`, …) into one `GrammarSpec`, and bounds its
   size and depth; `spec.tool_route` does the same for tools and a tool parser's format.
2. **Normalise.** `spec.normal` writes any draft in the newest one's keywords, every reference local. Places in the
   schema as given are kept.
3. **Choose.** `spec.route` asks backends what they enforce, and of which source of their own, and orders the options:
   in full, approximate with what is left out by name, any JSON. They travel to the engine in the request.
4. **Compile.** `compile.service` compiles the first option that works: threads where the cost is bounded, else a
   process that can be killed (`compile.compiling`). It tries the result out (`try_out`), keeps it
   (`compile.cache`), and leaves out keywords that fail (`spec.relax`).
5. **Mask.** `matching.constraint` follows one request, past its thinking (`matching.reasoning_gate`), and fills a row
   of bits for each step; `runtime` masks the logits.
6. **Validate.** `StructuredOutputs.report` says what was enforced; where that was not all, `FinalValidator` validates
   the finished text by the schema as given, in a process of its own.

Steps 1 to 3 and 6 run where the request is read, 4 and 5 in the engine's process:

```python
front = StructuredOutputs.load(plugins, tokenizer, vocab_size)
route = front.route(read_grammar({"regex": "[0-9]+"}))      # how it will be enforced; goes out with `Submit`
report = front.report(route, GrammarOutcome(option=delta.grammar_option, text=text, ended=True))
```
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarBackend, Kind, Vocabulary
from dovetail.contracts.output import FormatSpec
from dovetail.contracts.tools import ToolParser
from dovetail.grammar.compile.memory import Trimmer
from dovetail.grammar.compile.pool import FinalValidator
from dovetail.grammar.spec.fields import RequestedGrammar
from dovetail.grammar.spec.route import Enforcement, GrammarReport, GrammarRoute, GrammarRouter, ToolReport
from dovetail.grammar.spec.tool_route import ToolRouter, join
from dovetail.plugins import LoadedPlugins
from dovetail.text.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, Any]]
LARGE_SOURCE = 64 * 1024
"""Characters of a grammar from which on memory is looked at behind it."""
MAX_ROUTES = 64
"""Routes of tool calls that are kept."""
MAX_JOINED = 4
"""Options to enforce a text or calls: each travels with its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOutcome:
    """What came of a request with a grammar.

    Attributes:
        option: The option that the engine enforced, by its index.
        left_out: What it left out of it (`TokenDelta.grammar_ignored`).
        text: The finished content.
        calls: Names and arguments of the tools that were called.
        ended: The model ended it; False where it was cut off.
    """

    option: int
    left_out: tuple[str, ...] = ()
    text: str = ""
    calls: Sequence[tuple[str, str]] = ()
    ended: bool


def log_unserved(backends: Mapping[str, GrammarBackend]) -> None:
    """Say in the log, before the first request, what kinds of grammar no backend reads."""
    served = frozenset(kind for backend in backends.values() for kind in backend.kinds)
    if unserved := [kind.value for kind in Kind if backends and kind not in served]:
        logger.warning(
            "--grammar-backend %s does not serve %s: a request with such a grammar is refused; auto serves all.",
            ", ".join(backends),
            ", ".join(unserved),
        )


class StructuredOutputs:
    """One per process. Thread-safe."""

    def __init__(self, backends: Mapping[str, GrammarBackend], **options: bool) -> None:
        """Keep the backends, in the plan's order; see `GrammarRouter` for the options."""
        self._router = GrammarRouter(backends, **options)
        self._validator = FinalValidator()
        self._trimmer = Trimmer(_collect)
        self._alone: dict[str, StructuredOutputs] = {}
        self._routes: dict[tuple[ToolParser, str, str, bool, str], GrammarRoute] = {}
        """Of calls: applications send the same tools again, and to route them is a third of preparing a request."""
        for name, backend in backends.items() if len(backends) > 1 else ():
            self._alone[name] = StructuredOutputs({name: backend}, **options)

    @classmethod
    def load(cls, plugins: LoadedPlugins, tokenizer: Tokenizer, vocab_size: int, **options: bool) -> StructuredOutputs:
        """Make the planned backends, for `supports` only: they get a vocabulary without tokens.

        Args:
            plugins: Of this process.
            tokenizer: The model's.
            vocab_size: The logits' width.
            options: See `GrammarRouter`.
        """
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
            with plugins.watched(planned):
                backends[planned.name] = backend(vocabulary)
        log_unserved(backends)
        return cls(backends, **options)

    def only(self, name: str | None, param: str = "grammar_backend") -> StructuredOutputs:
        """Return what routes to one backend only; this where no name is given, or `auto`.

        Args:
            name: As in `--grammar-backend`.
            param: The request's field.

        Raises:
            RequestError: This process does not have it.
        """
        if name is None or name == "auto":
            return self
        if name not in self._router.backends:
            possible = ", ".join(("auto", *self._router.backends))
            text = f"{param} {name!r} is not loaded here; possible: {possible} (serve --grammar-backend loads them)"
            raise RequestError(text, param=param, code="invalid_value")
        return self._alone.get(name, self)

    def route(self, asked: RequestedGrammar) -> GrammarRoute:
        """Choose the options to enforce a request's grammar.

        Raises:
            RequestError: There is none.
        """
        if len(asked.spec.source) >= LARGE_SOURCE:
            self._trimmer.soon()
        return self._router.route(asked.spec, asked.param)

    def tools(
        self, parser: ToolParser, name: str, tools: Tools, choice: Any, *, parallel: bool, param: str
    ) -> GrammarRoute:
        """Choose the options to enforce tool calls in the model's own format.

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
        router = ToolRouter(self._router, parser, name, param, tools, choice, parallel)
        try:
            key = parser, name, param, parallel, json.dumps([tools, choice])
            route = self._routes.get(key)
        except (TypeError, ValueError, RecursionError):  # tools of a program, not of a body
            return router.route()
        if route is None:
            route = router.route()
            self._routes = {} if len(self._routes) >= MAX_ROUTES else self._routes
            if len(key[-1]) <= LARGE_SOURCE:
                self._routes[key] = route
        return route

    def either(self, asked: RequestedGrammar, tools: GrammarRoute, spec: FormatSpec) -> GrammarRoute:
        """Allow a text of the grammar, or the tool calls: where a request has both and `tool_choice` is auto.

        Args:
            asked: The grammar of the text.
            tools: Of the calls, as for `tool_choice` required.
            spec: The output format. In one of messages the text is that of the answer's message.

        Raises:
            RequestError: The two cannot be put together.
        """
        route = self._router.route(asked.spec, asked.param, asks_all=True)
        options = [
            joined for text in route.options for calls in tools.options if (joined := join(text, calls, asked, spec))
        ]
        if not options:
            text = (
                f"{asked.param} together with tools is not supported for a {asked.spec.kind}; set tool_choice to none"
            )
            raise RequestError(text, param=asked.param, code="unsupported_parameter")
        options.sort(key=lambda option: (option.enforcement != "full", len(option.ignored)))
        return GrammarRoute(asked.spec, tuple(options[:MAX_JOINED]), asked.param, tools.tools)

    def report(self, route: GrammarRoute, outcome: GrammarOutcome) -> GrammarReport:
        """Say what came of a grammar; judges what came where enforcement was not full, which blocks.

        Args:
            route: The request's.
            outcome: What came.
        """
        option = route.options[outcome.option]
        enforcement, ignored = option.with_left_out(outcome.left_out)
        made = GrammarReport(option.grammar.backend, enforcement, ignored, None)
        if route.tools:
            made = replace(made, tools=self._tool_reports(route, made, outcome))
        if not outcome.ended:
            return made
        if enforcement == "full":
            return replace(made, valid=True)
        if outcome.calls and route.tools:
            validity = [tool.valid for tool in made.tools if tool.name in {name for name, _ in outcome.calls}]
            return replace(made, valid=None if None in validity else all(validity))
        if route.spec.kind is Kind.JSON:
            [valid] = self._validator.validate(route.spec.source, [outcome.text])
            return replace(made, valid=valid)
        return made

    def _tool_reports(
        self, route: GrammarRoute, whole: GrammarReport, outcome: GrammarOutcome
    ) -> tuple[ToolReport, ...]:
        made = []
        for tool in route.tools:
            ignored = tuple(place for place in whole.ignored if place.startswith(f"{tool.place}/") or place == "/")
            enforcement: Enforcement = "full" if not ignored else "approximate"
            texts = [text for name, text in outcome.calls if name == tool.name]
            valid: bool | None = None
            if texts and outcome.ended:
                validity = [True] if enforcement == "full" else self._validator.validate(tool.source, texts)
                valid = None if None in validity else all(validity)
            made.append(ToolReport(tool.name, enforcement, ignored, valid))
        return tuple(made)

    def warm_up(self) -> None:
        """Begin to start the process that judges texts, where there are backends."""
        if self._router.backends:
            self._validator.warm_up()

    def close(self) -> None:
        """End the process that judges texts, if it was started."""
        self._trimmer.close()
        self._validator.close()
        for outputs in self._alone.values():
            outputs.close()


def _collect() -> bool:
    """Free what routing large schemas left behind in circles, which the rare rounds of a server come to late."""
    gc.collect()
    return False
