"""The demo model with grammar backends, and small vocabularies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.base.settings import EngineSettings
from dovetail.client.inprocess import InProcessClient
from dovetail.contracts.grammar import GrammarSpec, Kind
from dovetail.demo import MODEL_DIR
from dovetail.messages import Finish, GrammarOption, MarkedThinking, Marker, SamplerParams, Submit, TokenDelta
from dovetail.plugins import Registry, make_plan
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.tokenizer.tokenizer import Tokenizer


@dataclass
class Result:
    """One request's outcome."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    deltas: list[TokenDelta] = field(default_factory=list)


@dataclass(frozen=True)
class Jump:
    """Tokens that a request took at once."""

    rid: str
    num_retractions: int
    num: int


def fixed(text: str) -> GrammarOption:
    """A grammar of one text."""
    return GrammarOption(backend="llguidance", kind="choice", source=json.dumps([text]))


def json_option(schema: Any, **changes: Any) -> GrammarOption:
    """An option for llguidance."""
    return GrammarOption(backend="llguidance", kind="json", source=json.dumps(schema), **changes)


class Demo:
    """A client of the demo model on an event loop of its own."""

    def __init__(self, **settings: Any) -> None:
        self.tokenizer = Tokenizer.load(MODEL_DIR)
        self.template = ChatTemplate.load(self.tokenizer.files)
        self.settings = EngineSettings(
            **{"model_path": str(MODEL_DIR), "device": "cpu", "max_total_tokens": 16384, **settings}
        )
        plan = make_plan(
            Registry.scan(), model="Qwen3ForCausalLM", attention_backend="auto", grammar_backend="auto", device="cpu"
        )
        self.client = InProcessClient(self.settings, plan)
        self.loop = asyncio.new_event_loop()
        self.run(self.client.start())
        self._count = 0

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run on the loop."""
        return self.loop.run_until_complete(work)

    def prompt(self, text: str, *, thinking: bool = False) -> list[int]:
        """Render a question."""
        chat = self.template.render([{"role": "user", "content": text}], template_kwargs={"enable_thinking": thinking})
        return self.tokenizer.encode(chat.text, add_special_tokens=False)

    def marker(self, text: str) -> Marker:
        """A marker that is one token."""
        return Marker(text, (self.tokenizer.added_tokens[text],))

    def thinking(self, state: Any, budget: int | None = None) -> MarkedThinking:
        """What the engine is told of thinking."""
        return MarkedThinking(state=state, start=self.marker("<think>"), end=self.marker("</think>"), budget=budget)

    async def one(self, *steps: GrammarOption, prompt: list[int] | None = None, **options: Any) -> Result:
        """Submit a request and collect it."""
        self._count += 1
        thinking = options.pop("thinking", None)
        params = SamplerParams(**{"max_tokens": 200, "temperature": 1.0, "seed": 1, **options})
        ids = prompt if prompt is not None else self.prompt("Tell me about France as JSON.")
        submit = Submit(rid=f"r{self._count}", prompt_ids=ids, params=params, grammar=steps, thinking=thinking)
        result = Result()
        async for delta in self.client.submit(submit):
            result.deltas.append(delta)
            result.ids += delta.ids
            result.finish = delta.finish
        result.text = self.tokenizer.decode(result.ids, skip_special_tokens=True)
        return result

    def generate(self, *steps: GrammarOption, **options: Any) -> Result:
        """Run one request."""
        result: Result = self.run(self.one(*steps, **options))
        return result

    def together(self, requests: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
        """Run several at once."""

        async def main() -> list[Result]:
            return list(await asyncio.gather(*requests))

        results: list[Result] = self.run(main())
        return results

    def close(self) -> None:
        """Stop."""
        self.run(self.client.close())
        self.loop.close()


def json_spec(schema: Any) -> GrammarSpec:
    """A JSON schema's spec."""
    return GrammarSpec(kind=Kind.JSON, source=json.dumps(schema))
