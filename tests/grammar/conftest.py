"""Fixtures of the grammar tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file

from grammar_demo import Demo, Jump
from served import Served

from dovetail.contracts.grammar import Vocabulary
from dovetail.engine import replies
from dovetail.engine.request import EngineRequest
from dovetail.grammar.compile.vocabulary import make_vocabulary
from dovetail_testing.vocabularies import byte_level


@pytest.fixture(scope="session", params=[False, pytest.param(True, marks=pytest.mark.full)], ids=["steps", "overlap"])
def demo(request: pytest.FixtureRequest) -> Iterator[Demo]:
    """The demo model, one engine for all tests; its steps one after another, and overlapped."""
    made = Demo(overlap_on_cpu=request.param)
    yield made
    made.close()


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """The demo model over HTTP, one server for all tests; in float32: draws hardly depend on how steps are cut.

    Without blanks between the tokens of JSON, of which the model writes a hundred where it may.
    """
    made = Served(dtype="float32", compact_json=True, grammar_compile_timeout=120.0)  # the first process may start late
    yield made
    made.close()


@pytest.fixture
def make_demo() -> Iterator[Callable[..., Demo]]:
    """Make engines with other settings."""
    made: list[Demo] = []

    def make(**settings: Any) -> Demo:
        made.append(Demo(**settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def jumps(monkeypatch: pytest.MonkeyPatch) -> list[Jump]:
    """Grows with every jump of any engine."""
    seen: list[Jump] = []
    original = replies.jump

    def noted(request: EngineRequest, tokens: list[int], step: int) -> list[int]:
        taken = original(request, tokens, step)
        seen.append(Jump(request.rid, request.num_retractions, len(taken)))
        return taken

    monkeypatch.setattr("dovetail.engine.replies.jump", noted)
    return seen


@pytest.fixture(scope="session")
def small() -> Vocabulary:
    """A byte-level vocabulary of about 430 tokens."""
    tokenizer = byte_level()
    return make_vocabulary(tokenizer, tokenizer.vocab_size + 21, tokenizer.eos_token_ids)
