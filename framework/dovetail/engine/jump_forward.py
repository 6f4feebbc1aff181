"""Jump-forward: tokens that a grammar forces are taken without sampling each of them in a step of its own.

They go to the device together, as a prompt's tokens do, and the next token is sampled behind them. The text is the
same: where a text is forced, a mask allows only the token that the tokenizer itself would make. Only tokens that a
backend vouches for are taken; one that knows forced *text* alone cannot say where the model would cut it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.engine.request import EngineRequest

MIN_JUMP = 3
"""Fewer tokens are not worth a chunk of their own."""
RUNNING_PER_TOKEN = 8
"""A chunk delays all running requests: with many of them only long runs are worth it."""


def forced_tokens(request: EngineRequest, num_running: int) -> list[int]:
    """Return the tokens that must follow a request's last one, where taking them at once is worth it.

    No more than it may still generate, so that no pages are taken for others. Empty where something has to be known of
    each of them: log probabilities, or counts for penalties and the like.
    """
    constraint = request.constraint
    if constraint is None or not constraint.was_forced or request.row < 0 or request.finish is not None:
        return []
    if request.params.logprobs is not None or request.params.looks_back:
        return []
    found = constraint.forced()[: request.remaining_tokens]
    return found if len(found) >= max(MIN_JUMP, num_running // RUNNING_PER_TOKEN) else []


def jump(request: EngineRequest, tokens: list[int], step: int) -> list[int]:
    """Let a request take forced tokens; returns those that it took before it ended.

    There are pages for them. The step in flight, number `step`, does not know of them: its token is dropped.
    """
    taken = []
    for token in tokens:
        request.append_token(token)
        taken.append(token)
        if request.finish is not None:
            break
    request.void_step = step
    request.num_sampled = request.num_output
    request.on_device = False
    return taken
