"""Mixed loads for an engine that its caller steps, with grammars that need no compiler."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from dovetail.engine.core import EngineCore
from dovetail.engine.request import EngineRequest
from dovetail.messages import Finish, GrammarOption, SamplerParams, Submit

STEP = (GrammarOption(backend="any", kind="regex", source="a"),)


class Thirds:
    """A constraint of every third token, another third after each; in place of `grammar.constraint.Constraint`."""

    matching = backend = matcher = gate = error = None
    was_forced = terminated = False

    def __init__(self) -> None:
        self.num = 0

    def fill(self, row: Any, matched: bool) -> bool:
        """Allow a third; nothing is masked before the second token."""
        flags = np.zeros(32 * len(row), dtype=np.uint8)
        flags[self.num % 3 :: 3] = 1
        row[:] = np.packbits(flags, bitorder="little").view(np.int32)
        return self.num != 1

    def known(self) -> Any:
        """Which third; nobody looks at the words."""
        return None if self.num == 1 else (self.num % 3, np.empty(0, dtype=np.int32))

    def take_known(self, line: Any) -> None:
        """The mask stands on the device."""

    def only_ends(self, row: Any) -> bool:
        """Never."""
        return False

    def accept(self, token: int) -> str | None:
        """Take a token, which the mask has allowed."""
        if self.num != 1 and token % 3 != self.num % 3:
            return f"token {token} is not allowed"
        self.num += 1
        return None

    def forced(self) -> list[int]:
        """None."""
        return []


class ScriptedGrammars:
    """In place of the engine's grammar manager: each grammar is ready after so many questions."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.open: list[list[Any]] = []

    @property
    def is_waiting(self) -> bool:
        """As the manager's."""
        return bool(self.open)

    def add(self, request: EngineRequest, message: Submit) -> None:
        """As the manager's."""
        if message.grammar:
            request.waiting_for_grammar = self.patience > 0
            if self.patience:
                self.open.append([request, self.patience])
            else:
                request.constraint = Thirds()  # type: ignore[assignment]

    def decide(self) -> list[tuple[EngineRequest, Finish]]:
        """As the manager's."""
        for entry in self.open:
            entry[1] -= 1
            if entry[1] == 0:
                entry[0].waiting_for_grammar = False
                entry[0].constraint = Thirds()
        self.open = [entry for entry in self.open if entry[1] > 0]
        return []

    def forget(self, request: EngineRequest) -> None:
        """As the manager's."""
        self.open = [entry for entry in self.open if entry[0] is not request]

    def wait(self, timeout_s: float) -> None:
        """As the manager's."""

    def close(self) -> None:
        """As the manager's."""


Load = tuple[list[int], SamplerParams, bool]


def loads(seed: int, num: int = 18, *, grammars: bool = True, logprobs: bool = True) -> list[Load]:
    """Requests with anything that changes which graph serves a step, or what follows it; some behind one prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(190) for _ in range(13)]
    found: list[Load] = []
    for i in range(num):
        prompt = shared * rng.randrange(2) + [rng.randrange(190) for _ in range(rng.choice([1, 5, 9, 30, 70]))]
        params = SamplerParams(
            max_tokens=rng.choice([1, 2, 5, 8]),
            temperature=rng.choice([0, 0, 0.8, 1.4]),
            top_p=rng.choice([1, 0.9]),
            top_k=rng.choice([0, 5]),
            frequency_penalty=rng.choice([0, 0, 0, 0.7]),
            repetition_penalty=rng.choice([1, 1, 1, 1.3]),
            min_tokens=rng.choice([0, 0, 4]),
            logit_bias={7: 4.0} if i % 9 == 4 else {},
            logprobs=2 if logprobs and i % 6 == 2 else None,
            prompt_logprobs=1 if logprobs and i % 11 == 7 else None,
            stop_token_ids=tuple(rng.randrange(190) for _ in range(rng.choice([0, 30]))),
            ignore_eos=bool(i % 2),
            seed=i,
        )
        found.append((prompt, params, grammars and i % 5 == 3))
    return found


def serve(core: EngineCore, asked: Sequence[Load], *, patience: int = 0, every: int = 2) -> list[tuple[Any, ...]]:
    """Run all, so many steps apart; what a client sees of each. The books are right after every step."""
    grammars: Any = ScriptedGrammars(patience)
    core.grammars = core._masks.grammars = core._replies.grammars = grammars
    tokens: list[list[int]] = [[] for _ in asked]
    extras: list[list[tuple[int, float]]] = [[] for _ in asked]
    finishes: list[Finish | None] = [None for _ in asked]
    left = list(enumerate(asked))
    for step in range(2000):
        if left and step % every == 0:
            for _ in range(3 if step % 3 == 0 else 1):
                if left:
                    handle, (prompt, params, constrained) = left.pop(0)
                    grammar = STEP if constrained else ()
                    core.handle(Submit(rid="", handle=handle, prompt_ids=prompt, params=params, grammar=grammar))
        if not left and not core.has_work:
            break
        for delta in core.step().deltas:
            tokens[delta.handle] += delta.ids
            told = [*(delta.logprobs or ()), *(delta.prompt_logprobs or ())]
            extras[delta.handle] += [(p.token_id, round(p.logprob or 0, 3)) for p in told]
            finishes[delta.handle] = delta.finish or finishes[delta.handle]
        assert core.pages.check_counts(core.scheduler.running)
        assert core.pages.check_ownership(core.scheduler.running)
    assert not core.has_work
    assert core.pages.check_ownership([])
    assert all(finish is not None and finish.reason != "abort" for finish in finishes), finishes
    return list(zip(tokens, extras, finishes, strict=True))
