"""Drafts beside grammars, budgets and words: the same tokens, and every state is where it would be without them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from grammar_demo import Demo, Result, json_option

from dovetail.base.settings import EngineSettings
from dovetail.client.launch import make_engine
from dovetail.contracts.grammar import GrammarMatcher, Vocabulary
from dovetail.engine.core import EngineCore
from dovetail.engine.request import EngineRequest
from dovetail.engine.speculation import Speculation
from dovetail.grammar.matching.bitmask import fill_masks
from dovetail.grammar.matching.constraint import Constraint, TokenSets, WordRules
from dovetail.messages import GrammarOption, SamplerParams
from dovetail.plugins import LoadedPlugins
from dovetail.sdk.masks import has_bit

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "tags": {"type": "array", "items": {"enum": [1, 2]}}},
    "required": ["name", "tags"],
}
REGEX = GrammarOption(backend="llguidance", kind="regex", source=r"[a-z]{3,9} (and|or) [a-z ]{20}[.]")


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[Demo, EngineCore]]:
    """An engine, and what is inside it."""
    cores: list[EngineCore] = []

    def noted(settings: EngineSettings, plugins: LoadedPlugins) -> EngineCore:
        cores.append(make_engine(settings, plugins))
        return cores[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dovetail.client.launch.make_engine", noted)
        made = Demo(max_total_tokens=4096, dtype="float32")  # in bfloat16 several rows may round otherwise than one
    yield made, cores[0]
    made.close()


def asked(demo: Demo) -> list[Any]:
    """Requests of all kinds that have a constraint, beside a free one."""
    thinking: dict[str, Any] = {
        "prompt": demo.prompt("Hello", thinking=True),
        "thinking": demo.thinking("open", budget=9),
    }
    words = tuple(tuple(demo.tokenizer.encode(word, add_special_tokens=False)) for word in (" the", " Paris", " is a"))
    return [
        *(demo.one(json_option(SCHEMA), seed=i, max_tokens=90) for i in range(3)),
        demo.one(json_option(SCHEMA), temperature=0, max_tokens=90, logprobs=2),
        *(demo.one(REGEX, seed=i, max_tokens=60, min_tokens=40) for i in range(2)),
        *(demo.one(seed=i, max_tokens=60, bad_words=words) for i in range(2)),
        demo.one(json_option(SCHEMA), seed=5, max_tokens=120, **thinking),
        demo.one(seed=6, max_tokens=60, **thinking),
        demo.one(seed=7, max_tokens=50, ignore_eos=True),
    ]


def seen(result: Result) -> tuple[Any, ...]:
    """What a client gets."""
    logprobs = [(p.token_id, round(p.logprob or 0, 2)) for d in result.deltas for p in d.logprobs or ()]
    return result.ids, result.finish, logprobs


def test_tokens_are_those_without_drafts(engine: tuple[Demo, EngineCore]) -> None:
    """JSON, a pattern with a minimum length, banned words and a budget: right and wrong drafts change no token."""
    demo, core = engine
    plain = demo.together(asked(demo))
    texts = [(result.ids, rid) for rid, result in enumerate(plain)]
    rng, first = random.Random(1), demo._count + 1

    def guess(requests: Sequence[EngineRequest]) -> list[list[int]]:
        made = []
        for request in requests:
            ids, _ = texts[int(request.rid[1:]) - first]
            found = ids[request.num_output :][: rng.randrange(9)]
            if found and rng.random() < 0.5:
                found[rng.randrange(len(found))] = rng.randrange(300)
            made.append(found)
        return made

    core.scheduler.speculation = made = Speculation(guess, core.info.vocab_size)
    drafted = demo.together(asked(demo))
    core.scheduler.speculation = None
    assert [seen(result) for result in drafted] == [seen(result) for result in plain]
    assert made.num_drafted > made.num_accepted > 50


class Counting:
    """A matcher of `a b a b …` over the ids 1 and 2, and 3 once there are four of them."""

    def __init__(self) -> None:
        self.said: list[int] = []
        self.error: str | None = None

    @property
    def terminated(self) -> bool:
        """Whether the end has come."""
        return 3 in self.said

    @property
    def accepting(self) -> bool:
        """Whether it may."""
        return len(self.said) >= 4

    def allowed(self) -> list[int]:
        """What may follow."""
        return [1 + len(self.said) % 2] + [3] * self.accepting

    def fill(self, mask: Any, row: int) -> bool:
        """Write them."""
        mask[row] = 0
        for token in self.allowed():
            mask[row][0] |= 1 << token
        return True

    def accept(self, token_ids: Sequence[int]) -> int:
        """A refused token is the end of it: nobody may try one."""
        for token in token_ids:
            if token not in self.allowed() or self.terminated:
                self.error = "refused"
                return 0
            self.said.append(token)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Take back."""
        del self.said[len(self.said) - num_tokens :]

    def forced(self) -> list[int]:
        """Nothing."""
        return []

    def fork(self) -> GrammarMatcher:
        """A copy."""
        raise NotImplementedError


class OneByOne:
    """A backend's batch of masks."""

    calls = 0

    def fill_batch(self, matchers: Sequence[GrammarMatcher], mask: Any, rows: Sequence[int]) -> list[bool]:
        """Fill each."""
        self.calls += 1
        return [matcher.fill(mask, row) for matcher, row in zip(matchers, rows, strict=True)]


def test_masks_stand_behind_each_draft_that_fits() -> None:
    """A constraint has a mask at each place up to the first draft that it refuses, or its end, and is taken back."""
    vocabulary = Vocabulary(
        tokens=[bytes([97 + i]) for i in range(8)], size=8, eos_ids=frozenset({3}), special_ids=frozenset({3}),
        fingerprint="8",
    )  # fmt: skip
    sets, backend = TokenSets(vocabulary), OneByOne()
    rules = WordRules(SamplerParams(max_tokens=9, bad_words=((2, 1, 2),)), 8)
    made: Any = [Constraint(sets, None, Counting(), backend, (), own) for own in (None, rules, None)]  # type: ignore[arg-type]
    lines = np.zeros((32, 1), dtype=np.int32)
    drafts: list[list[int]] = [[1, 2, 2, 1], [], [1, 2, 1, 2, 3, 1], [1, 2, 1]]
    mask_of, ends_only = fill_masks([made[0], None, made[2], made[1]], [True] * 4, lambda num: lines[:num], drafts)
    assert mask_of.tolist() == [0, 1, 2, -1, -1, -1, 3, 4, 5, 6, 7, -1, -1, 8, 9, 10, 11]
    allowed = [[token for token in range(8) if has_bit(lines[line], token)] for line in range(12)]
    assert allowed == [[1], [2], [1], [1], [2], [1], [2], [1, 3], [1], [2], [1], []]
    assert not ends_only[:13].any()
    assert backend.calls == 5
    for constraint in made:
        assert (constraint.matcher.said, constraint.error) == ([], None)
    assert not rules.tail
    for token in (1, 2, 1):
        assert made[1].accept(token) is None
    assert "leave no token" in made[1].accept(2)
