"""`GrammarDesk`: the engine's counter for structured outputs. Takes requests in, follows their tokens.

A request with a grammar may prefill while it is compiled; nothing is sampled for it while it is `Request.undecided`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.contracts.grammar import Vocabulary
from dovetail.grammar.cache import Enforced, Refused
from dovetail.grammar.constraint import Constraint
from dovetail.grammar.gate import make_gate
from dovetail.grammar.service import GrammarService, Ticket
from dovetail.grammar.vocabulary import make_vocabulary
from dovetail.messages import Finish, Submit, Thinking
from dovetail.plugins import LoadedPlugins
from dovetail.settings import EngineSettings
from dovetail.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dovetail.engine.request import Request


class GrammarDesk:
    """One per engine, in its thread."""

    def __init__(
        self, settings: EngineSettings, plugins: LoadedPlugins, vocab_size: int, eos_ids: tuple[int, ...]
    ) -> None:
        """Prepare; nothing is loaded before it is needed.

        Args:
            settings: The engine's.
            plugins: Of the engine's process.
            vocab_size: The logits' width.
            eos_ids: Ids that end a reply.
        """

        def vocabulary() -> Vocabulary:
            tokenizer = Tokenizer.load(Path(settings.tokenizer_path) if settings.tokenizer_path else settings.folder)
            return make_vocabulary(tokenizer, vocab_size, eos_ids or tokenizer.eos_token_ids)

        self.service = GrammarService(
            plugins,
            vocabulary,
            timeout_s=settings.grammar_compile_timeout,
            cache_bytes=settings.grammar_cache_bytes,
        )
        self._undecided: list[tuple[Request, Ticket, Thinking | None]] = []

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._undecided)

    def take(self, request: Request, message: Submit) -> None:
        """Take in a request; from now on it is undecided if it has a grammar."""
        if not message.grammar and (message.thinking is None or message.thinking.budget is None):
            return
        request.undecided = True
        steps = message.grammar
        if message.grammar_step is not None:
            steps = steps[message.grammar_step : message.grammar_step + 1]  # the text so far is of that one
        ticket = self.service.request(steps, message.owner, again=message.again) if steps else self.service.prepare()
        self._undecided.append((request, ticket, message.thinking))

    def forget(self, request: Request) -> None:
        """A request was aborted."""
        for waiting, ticket, _ in self._undecided:
            if waiting is request:
                self.service.release(ticket)
        self._undecided = [item for item in self._undecided if item[0] is not request]

    def decide(self) -> list[tuple[Request, Finish]]:
        """Let requests go on whose grammars are ready; return those that cannot be served, with the reason."""
        failed: list[tuple[Request, Finish]] = []
        still = []
        for item in self._undecided:
            request, ticket, thinking = item
            outcome = ticket.outcome
            if outcome is None and not ticket.is_ready:
                still.append(item)
            elif isinstance(outcome, Refused):
                failed.append((request, Finish("abort", None, outcome.message, outcome.code)))
            else:
                constraint = self._constraint(request, outcome, thinking)
                error = _follow(constraint, request.ids[request.num_prompt :])
                if error is not None:
                    failed.append((request, Finish("abort", None, error, "grammar_failed")))
                    continue
                request.undecided = False
                request.sample.constraint = constraint
                if outcome is not None:
                    request.grammar_ignored = outcome.ignored
                    request.grammar_step = outcome.step if request.grammar_step is None else request.grammar_step
        self._undecided = still
        return failed

    def wait(self, timeout_s: float) -> None:
        """Sleep until a grammar is ready, at most `timeout_s`."""
        self.service.wait(timeout_s)

    def close(self) -> None:
        """End threads and processes."""
        self.service.close()

    def _constraint(self, request: Request, outcome: Enforced | None, thinking: Thinking | None) -> Constraint:
        sets = self.service.token_sets()
        gate = None if thinking is None else make_gate(thinking, sets.tokens, constrained=outcome is not None)
        if outcome is None:
            return Constraint(sets, gate, None)
        return Constraint(sets, gate, outcome.compiled.matcher(), outcome.backend, request.sample.stop_ids)


def _follow(constraint: Constraint, ids: Sequence[int]) -> str | None:
    """Let a constraint take what was generated in an engine before this one; returns an error if it does not fit."""
    for token in ids:
        error = constraint.accept(token)
        if error is not None:
            return error
    return None


def make_desk(
    settings: EngineSettings, plugins: LoadedPlugins, vocab_size: int, eos_ids: tuple[int, ...]
) -> GrammarDesk | None:
    """Return a desk, or None where the plan has no grammar backend."""
    if not plugins.plan.of_kind("grammar_backend"):
        return None
    return GrammarDesk(settings, plugins, vocab_size, eos_ids)
