"""What has come of steps, as deltas for the client: tokens, log probabilities, pooled states, and ends."""

from __future__ import annotations

import itertools
import logging

from dovetail.engine.grammar_manager import GrammarManager
from dovetail.engine.kv_cache_manager import KVCacheManager
from dovetail.engine.request import EngineRequest, StepPlan
from dovetail.engine.scheduler import Scheduler
from dovetail.messages import Finish, SamplerParams, Submit, TokenDelta, TokenLogprob
from dovetail.messages.step import StepOutput

logger = logging.getLogger(__name__)


# Jump-forward: tokens that a grammar forces are taken without sampling each of them in a step of its own.
#
# They go to the device together, as a prompt's tokens do, and the next token is sampled behind them. The text is the
# same: where a text is forced, a mask allows only the token that the tokenizer itself would make. Only tokens that a
# backend vouches for are taken; one that knows forced *text* alone cannot say where the model would cut it.

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


# Replies whose states the prefix cache is to have: each is computed once more, as a prompt, when it has ended.
#
# A copy of a recurrent state is taken from prompts alone: one that came of decoding has other last bits. So what
# follows a reply that comes back, as a conversation does, has to compute it again. With `--fold-replies` that is done
# before the next turn comes, by a request of the engine's own behind all others.


class ReplyFolds:
    """Makes a request of each reply that is worth it: it samples nothing, and no client knows of it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._handles = scheduler, itertools.count(-1, -1)

    def ended(self, request: EngineRequest) -> None:
        """A request has ended well: if its reply reaches further than its prompt's copies, have it computed again.

        While as many wait as can run, nothing is done: what waits comes first.
        """
        scheduler, grid = self._scheduler, self._scheduler.pages.states.grid
        num = len(request.ids) // grid * grid
        if request.media is not None:
            return  # its images may be gone when it would be computed
        if num <= (request.num_prompt - 1) // grid * grid or request.num_output == 0:
            return
        if len(scheduler.waiting) >= scheduler.limits.max_running_requests:
            return
        message = Submit(
            rid=request.rid,
            handle=next(self._handles),
            prompt_ids=list(request.ids[:num]),
            params=SamplerParams(max_tokens=0),
            priority=request.priority,
            cache_salt=request.cache_salt,
            owner=request.owner,
            weight=request.weight,
            prefill_only=True,
        )
        again = EngineRequest.from_submit(message, arrival=request.arrival, eos_ids=())
        again.max_tokens = 0
        scheduler.add(again)


Logprobs = list[TokenLogprob | None] | None

NOT_FINITE = Finish("abort", None, "the model's output is not finite (NaN or infinity)")


class Replies:
    """Moves requests on by what was computed for them, and ends them."""

    def __init__(
        self,
        scheduler: Scheduler,
        pages: KVCacheManager,
        grammars: GrammarManager | None,
        folds: ReplyFolds | None = None,
    ) -> None:
        """`folds` has replies computed again when they have ended; None: nobody wants that."""
        self.scheduler, self.pages, self.grammars, self._folds = scheduler, pages, grammars, folds

    def of(self, plan: StepPlan, output: StepOutput) -> list[TokenDelta]:
        """Account for a step that was read, and return what it brought clients."""
        deltas = [] if output.finite.all() else self._end_non_finite(plan, output)
        self.scheduler.counted(plan)
        self._take_prompt_logprobs(plan, output)
        deltas += self._take_pooled(plan, output)
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.verified(plan, output.num.tolist())
        tokens = output.tokens.tolist()
        at = 0
        for request, num in zip(plan.sampled, output.num.tolist(), strict=False):
            ids, logprobs = tokens[at : at + num], output.logprobs and output.logprobs[at : at + num]
            at += num
            # Else it ended while this step was under way, or what it computed is void.
            if ids and request.finish is None and plan.number > request.void_step:
                if self._fell_back(request):
                    continue  # these tokens were not sampled with a mask
                deltas.append(self._take_tokens(request, ids, logprobs))
        for chunk in plan.chunks:
            request = chunk.request
            is_over = request.finish is not None or plan.number <= request.void_step
            if request.prefill_only and not is_over and chunk.start + chunk.num_new == len(request.ids):
                deltas.append(self.last(request, Finish("stop")))
        return deltas

    def last(self, request: EngineRequest, finish: Finish) -> TokenDelta:
        """End a live request, and say so."""
        request.finish = finish
        self.scheduler.end(request)
        if self.grammars is not None:
            self.grammars.forget(request)
        return delta_of(request, [], finish)

    def _fell_back(self, request: EngineRequest) -> bool:
        """Whether a request's grammar has failed while it was in force, and the next option is compiled for it."""
        constraint = request.constraint
        if constraint is None or constraint.error is None or self.grammars is None or not self.grammars.again(request):
            return False
        self.scheduler.put_back(request)
        return True

    def _end_non_finite(self, plan: StepPlan, output: StepOutput) -> list[TokenDelta]:
        """End requests whose logits in a step are not finite, before more of their tokens are sent."""
        written = {request for request, _, _ in plan.writes}  # a missing request was undone with an earlier step
        non_finite = [r for r, ok in zip(plan.requests, output.finite, strict=True) if not ok and r in written]
        self.scheduler.discard(plan, non_finite)
        return [self.last(request, NOT_FINITE) for request in non_finite if request.finish is None]

    def _take_prompt_logprobs(self, plan: StepPlan, output: StepOutput) -> None:
        """Keep what a step told of prompts, until their first token is sent; nothing predicts a prompt's first one."""
        for chunk in plan.chunks:
            request = chunk.request
            if chunk.start == 0 == request.params.prompt_logprobs_start and request.prompt_logprobs is not None:
                request.prompt_logprobs[:] = [TokenLogprob(request.model_ids(0, 1)[0], None, [])]
        for at, found in output.prompt_logprobs:
            request = plan.requests[at]
            if request.prompt_logprobs is not None and plan.number > request.void_step:
                request.prompt_logprobs += found

    def _take_pooled(self, plan: StepPlan, output: StepOutput) -> list[TokenDelta]:
        """End the requests that a step has computed to the end of their prompts, and hand out what was pooled."""
        deltas = []
        for at, found in output.pooled:
            request = plan.requests[at]
            if request.finish is None and plan.number > request.void_step:
                delta = self.last(request, Finish("stop"))
                delta.pooled = found.tobytes()
                deltas.append(delta)
        return deltas

    def _take_tokens(self, request: EngineRequest, sampled: list[int], logprobs: Logprobs) -> TokenDelta:
        """Add sampled tokens to a request, and those that its grammar forces behind them."""
        first = request.num_output == 0
        ids: list[int] = []
        request.computed_len += len(sampled) - 1  # drafts that hold
        request.num_sampled += len(sampled) - 1
        try:
            for token in sampled:
                ids.append(token)
                request.append_token(token)
                if request.finish is not None and request.finish.code == "grammar_failed":
                    if self._fell_back(request):
                        request.finish = None  # the mask had allowed the token
                    else:
                        ids.pop()  # the mask did not allow it, and it is not sent
                        request.ids.pop()
                    break
                if request.finish is not None:
                    break
            forced = forced_tokens(request, len(self.scheduler.running))
            if forced and self.pages.allocate_slots(request, len(forced)):
                ids += jump(request, forced, self.scheduler.num_launched)
        except Exception as error:  # of a grammar's backend, which is a plugin
            logger.error("A grammar failed; its request is ended.", exc_info=error)
            request.finish = Finish("abort", None, f"its grammar failed: {type(error).__name__}: {error}")
        delta = delta_of(request, ids, request.finish)
        if logprobs:
            delta.logprobs = [logprob for logprob in logprobs[: len(ids)] if logprob is not None] or None
        if first:
            delta.times = request.timing.first()
            if request.prompt_logprobs is not None:
                delta.prompt_logprobs = request.prompt_logprobs
        if request.finish is not None:
            self.scheduler.end(request)
            if self._folds is not None and request.finish.reason != "abort":
                self._folds.ended(request)
        return delta


def delta_of(request: EngineRequest, ids: list[int], finish: Finish | None) -> TokenDelta:
    """Return what a client is told of a request: new tokens, and its end if it gets no more."""
    return TokenDelta(
        handle=request.handle,
        ids=ids,
        prompt_tokens=request.num_prompt,
        cached_tokens=max(request.cached_len, 0),
        num_retractions=request.num_retractions,
        grammar_option=request.grammar_option,
        grammar_ignored=request.grammar_ignored,
        times=None if finish is None else request.timing.as_times(),
        finish=finish,
    )
