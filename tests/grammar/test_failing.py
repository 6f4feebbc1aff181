"""Grammars that fail while they are in force: the next way takes over, behind what has been said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from dovetail.contracts.grammar import CompiledGrammar, GrammarMatcher
from dovetail.demo import MODEL_DIR
from dovetail.engine.core import EngineCore
from dovetail.grammar.compile.cache import Enforced
from dovetail.grammar.compile.jobs import CompileFuture
from dovetail.messages import GrammarOption, SamplerParams, Submit, TokenDelta
from dovetail_testing.engine import make_core


def step(schema: Any, **changes: Any) -> GrammarOption:
    return GrammarOption(backend="llguidance", kind="json", source=json.dumps(schema), max_whitespace=0, **changes)


WORDS = ["one long text", "one long word", "two"]
STEP = step({"enum": WORDS})
WEAKER = step({"type": "string"})
FREE = step({"type": ["string", "number"]})
OTHER = step({"type": "object"})


class Failing:
    """A matcher that fails after some tokens: when it fills a mask, or when it takes one."""

    def __init__(self, inner: GrammarMatcher, num: int, *, at_fill: bool) -> None:
        self._inner, self._left, self._at_fill = inner, num, at_fill
        self._failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def error(self) -> str | None:
        return "too many expressions" if self._failed else None

    def fill(self, mask: Any, row: int) -> bool:
        if self._at_fill and self._left == 0:
            self._failed = True
            mask[row] = 0
            return True
        return self._inner.fill(mask, row)

    def accept(self, token_ids: Sequence[int]) -> int:
        self._failed = self._failed or (not self._at_fill and self._left == 0)
        if self._failed:
            return 0
        self._left -= len(token_ids)
        return self._inner.accept(token_ids)

    def forced(self) -> list[int]:
        return []


class FailingGrammar:
    """Its matchers fail after some tokens."""

    num_bytes = 0

    def __init__(self, inner: CompiledGrammar, num: int, *, at_fill: bool) -> None:
        self._inner, self._num, self._at_fill = inner, num, at_fill

    def matcher(self) -> Failing:
        return Failing(self._inner.matcher(), self._num, at_fill=self._at_fill)


@pytest.fixture(params=[False, True], ids=["in turn", "overlapping"])
def core(request: pytest.FixtureRequest) -> EngineCore:
    """An engine of the demo model with small pages."""
    return make_core(
        MODEL_DIR, grammar_backend="auto", overlap_on_cpu=request.param, page_size=4, max_total_tokens=2000
    )


def failing(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, bad: Sequence[GrammarOption], num: int, at_fill: bool
) -> None:
    """Have the grammars of some ways fail after `num` tokens."""
    assert core.grammars is not None
    service, request = core.grammars.service, core.grammars.service.request

    def made(steps: Any, owner: str = "", **options: Any) -> CompileFuture:
        future = request(steps, owner, **options)
        while not future.is_ready:
            service.wait(1)
        outcome = future.outcome
        if isinstance(outcome, Enforced) and steps[outcome.option] in bad:
            grammar = FailingGrammar(outcome.compiled, num, at_fill=at_fill)
            return CompileFuture(Enforced(outcome.option, grammar, outcome.backend, outcome.ignored))
        return future

    monkeypatch.setattr(service, "request", made)


def run(core: EngineCore, *steps: GrammarOption, company: int = 2) -> list[TokenDelta]:
    """A request with a grammar and some without; its deltas. The books are right after every step."""
    for handle in range(company + 1):
        params = SamplerParams(max_tokens=40, temperature=0.0, ignore_eos=handle > 0, seed=1)
        ids = [(7 * i + handle) % 90 + 4 for i in range(9 + handle)]
        core.handle(Submit(rid="", handle=handle, prompt_ids=ids, params=params, grammar=() if handle else steps))
    deltas = []
    for _ in range(500):
        if not core.has_work:
            break
        deltas += [delta for delta in core.step().deltas if delta.handle == 0]
        assert core.pages.check_counts(core.scheduler.running)
        assert core.pages.check_ownership(core.scheduler.running)
    return deltas


def text_of(core: EngineCore, deltas: Sequence[TokenDelta]) -> str:
    from dovetail.text.tokenizer.tokenizer import Tokenizer

    return Tokenizer.load(MODEL_DIR).decode([i for delta in deltas for i in delta.ids], skip_special_tokens=True)


@pytest.mark.sampled
@pytest.mark.parametrize("at_fill", [True, False], ids=["at a mask", "at a token"])
@pytest.mark.parametrize("num", [0, 3])
def test_the_next_way_goes_on_behind_what_was_said(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, num: int, at_fill: bool
) -> None:
    """The reply conforms to the second way, and says which way that is."""
    failing(core, monkeypatch, [STEP], num, at_fill)
    deltas = run(core, STEP, WEAKER)
    last = deltas[-1]
    assert last.finish is not None
    assert last.finish.reason in ("stop", "length")
    assert last.grammar_option == 1
    text = text_of(core, deltas)
    assert text.startswith('"')
    if last.finish.reason == "stop":
        assert isinstance(json.loads(text), str)


def test_two_ways_may_fail_one_behind_the_other(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third is enforced from there on."""
    failing(core, monkeypatch, [STEP, WEAKER], 2, True)
    assert run(core, STEP, WEAKER, FREE)[-1].grammar_option == 2


def test_the_same_grammar_is_not_tried_again(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that differs only in what may be left out of it would fail in the same place."""
    again = step({"enum": WORDS}, relax_schema=True)
    failing(core, monkeypatch, [STEP, again], 2, True)
    assert run(core, STEP, again, WEAKER)[-1].grammar_option == 2


@pytest.mark.sampled
@pytest.mark.parametrize("others", [(), (OTHER,)], ids=["no other way", "what was said does not fit"])
def test_without_a_way_that_fits_the_error_is_the_grammars(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, others: tuple[GrammarOption, ...]
) -> None:
    """The request ends with what went wrong first; the others go on."""
    failing(core, monkeypatch, [STEP], 2, True)
    finish = run(core, STEP, *others)[-1].finish
    assert finish is not None
    assert (finish.reason, finish.code) == ("abort", "grammar_failed")
    assert "too many expressions" in str(finish.message)
    assert not core.scheduler.running
