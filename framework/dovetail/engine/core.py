"""The engine without any transport: takes messages, makes steps, returns deltas."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import msgspec
import numpy as np

from dovetail.contracts.observers import CacheEvent
from dovetail.engine.device_rows import DeviceRows
from dovetail.engine.first_requests import serve_first
from dovetail.engine.grammar_manager import make_grammar_manager
from dovetail.engine.graph_choice import GraphChooser
from dovetail.engine.integrity import SHARED_PAGE, PageWatch
from dovetail.engine.jump_forward import forced_tokens, jump
from dovetail.engine.pages import PageBook
from dovetail.engine.policy import make_policy
from dovetail.engine.recovery import Recovery, finish_of
from dovetail.engine.report import Report
from dovetail.engine.request import Request, StepPlan
from dovetail.engine.scheduler import Limits, Scheduler
from dovetail.engine.speculation import make_speculation
from dovetail.engine.step_builder import StepBuilder
from dovetail.grammar.bitmask import FREE, fill_masks
from dovetail.grammar.words import WordRules
from dovetail.messages import (
    Abort,
    Admitted,
    CacheChanged,
    Control,
    ControlReply,
    EngineInfo,
    Finish,
    FromEngine,
    Stats,
    Submit,
    Tick,
    ToEngine,
    TokenDelta,
    TokenLogprob,
)
from dovetail.messages.executor import Executor, StepError
from dovetail.messages.step import Prepared, StepLate, StepOutput
from dovetail.plugins import LoadedPlugins
from dovetail.settings import EngineSettings

logger = logging.getLogger(__name__)

Logprobs = list[TokenLogprob | None] | None

POLL_S = 0.002
"""How long the engine sleeps at a time if all it has waits for grammars."""
PATIENCE_S = 0.005
"""How long a step waits for a grammar if nobody else takes part in it: about what computing it again would take."""
WATCH_S = 0.0002
"""How long it waits for one before it looks whether the device is done."""
NOT_FINITE = Finish("abort", None, "the model's output is not finite (NaN or infinity)")


class EngineCore:
    """Requests, scheduler and cache in one thread. Not thread-safe: whoever drives it calls everything.

    Knows no tensors: what is to be computed goes to its executor as data.
    """

    def __init__(self, settings: EngineSettings, plugins: LoadedPlugins, executor: Executor) -> None:
        """Prepare; the executor has started.

        Raises:
            ConfigError: A plugin is at fault.
        """
        self.settings, self.executor = settings, executor
        info = self._info = executor.info
        self.rows = DeviceRows(settings.max_running_requests)
        self._journal: list[CacheEvent] | None = [] if settings.report_cache else None
        self.pages = PageBook(
            self.rows,
            page_size=info.page_size,
            num_pages=info.num_pages,
            reaches=info.reaches,
            use_tree=not settings.disable_radix_cache,
            journal=self._journal,
        )
        self.graphs = GraphChooser(info, executor.prepare)
        self.scheduler = Scheduler(self.pages, make_policy(plugins), _limits(settings, info.chunk_size))
        self.recovery = Recovery(self.scheduler)
        self._builder = StepBuilder(self.rows, self.graphs)
        self._prepared(info.prepared)
        self.watch = PageWatch(self.pages)
        self.report = Report(settings.decode_log_interval)
        self.grammars = make_grammar_manager(settings, plugins, info.vocab_size, info.eos_ids)
        self.step_count = 0
        self.tell: Callable[[FromEngine], None] = lambda message: None
        """Sends what cannot wait for the end of the step; set by whoever drives the engine."""
        self._arrivals = 0
        self._known_ids: list[int] = []
        self._ended: list[TokenDelta] = []
        on_cpu = info.device == "cpu"
        self.scheduler.speculation = speculation = make_speculation(plugins, info.vocab_size)
        # Drafts need the last token.
        may_overlap = not settings.disable_overlap_schedule and speculation is None
        self._overlap = may_overlap and (settings.overlap_on_cpu or not on_cpu)
        self._flying: StepPlan | None = None
        self._is_resting = False
        if not on_cpu:
            serve_first(self)

    @property
    def info(self) -> EngineInfo:
        """Facts for the client."""
        info = self._info
        return EngineInfo(
            architecture=info.architecture,
            dtype=info.dtype,
            device=info.device,
            vocab_size=info.vocab_size,
            hidden_size=info.hidden_size,
            context_len=info.context_len,
            max_total_tokens=info.num_pages[0] * info.page_size,
            max_running_requests=self.settings.max_running_requests,
            page_size=info.page_size,
            attention_backend=info.attention_backend,
            weight_bytes=info.weight_bytes,
            kv_bytes=info.kv_bytes,
            load_s=info.load_s,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to say."""
        return self.scheduler.has_work or self._flying is not None or bool(self._ended)

    @property
    def has_chores(self) -> bool:
        """Whether `do_chore` has something to prepare for later steps."""
        return self._num_unprepared > 0

    def do_chore(self) -> None:
        """Use a moment without work."""
        self._prepared(self.executor.prepare())

    def _prepared(self, outcome: Prepared) -> None:
        """Note what was prepared, and keep to the prompt tokens of a step for which memory was found to suffice."""
        self.graphs.prepared(outcome)
        self._num_unprepared = outcome.num_left
        most, limits = outcome.max_prefill_tokens, self.scheduler.limits
        if most is not None and most < limits.max_prefill_tokens and limits.cut_prompts:
            self.recovery.bound(most)

    @property
    def rest_s(self) -> float:
        """Seconds in which `step` would do nothing unless a message comes: all that is here holds back."""
        return self.scheduler.background.wait_s() if self._is_resting and not self._ended else 0.0

    def handle(self, message: ToEngine) -> ControlReply | None:
        """Take one message."""
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self._abort(message.handle)
        else:
            return self._control(message)
        return None

    def step(self) -> Tick:
        """Launch a step and account for the one before; without overlap, for this one.

        The device computes a step while the host reads, sends and plans its neighbours.
        """
        self._decide_grammars()
        deltas, self._ended = self._ended, []
        self._is_resting = False
        plan, has_read = self.scheduler.schedule(), self._flying is not None
        launched = self._launch(plan) if plan.decode or plan.chunks else None
        deltas += self._settle()
        if isinstance(launched, StepError):
            deltas += self._recover(plan, launched)
        elif launched is not None:
            deltas += self._choose(plan, launched)
            if not self._overlap:
                deltas += self._settle()
        elif not deltas and not has_read:
            is_compiling = self.grammars is not None and self.grammars.is_waiting
            if self.grammars is not None and is_compiling:
                self.grammars.wait(POLL_S)
            self._is_resting = not is_compiling
        for request in self.watch.look(self.scheduler.running):
            self._abort(request.handle, SHARED_PAGE)
        self.step_count += 1
        self._report_cache()
        return Tick(step=self.step_count, deltas=deltas)

    def _report_cache(self) -> None:
        """Tell what has come into the prefix cache and gone since the last time, if somebody wants to know."""
        if self._journal:
            events = self._journal.copy()
            self._journal.clear()
            self.tell(CacheChanged(events))

    def _launch(self, plan: StepPlan) -> bool | StepError:
        """Start a step; its requests move on as far as can be said without its tokens. If it fails, they do not.

        Returns:
            Whether a row of it waits for what the host has yet to say.
        """
        self._announce([chunk.request for chunk in plan.chunks if not chunk.request.is_announced])
        self.report.planned(plan, self.scheduler, self.pages)
        self.scheduler.launching(plan)
        step = self._builder.build(plan)
        try:
            self.executor.launch(step)
        except StepError as failure:
            return failure
        self.scheduler.launched(plan)
        return bool(step.waits.any())

    def _announce(self, requests: list[Request]) -> None:
        """Tell the client which requests take part from now on: should the engine die, one of those may be why."""
        if requests:
            for request in requests:
                request.is_announced = True
            self.tell(Admitted([request.handle for request in requests]))

    def _recover(self, plan: StepPlan, failure: StepError) -> list[TokenDelta]:
        """Undo a step that has failed; end its request if there is no other way to go on."""
        self.scheduler.cut(plan, plan.requests)
        request = self.recovery.failed(plan, failure)
        return [] if request is None else [self._last(request, finish_of(failure))]

    def _choose(self, plan: StepPlan, waits: bool) -> list[TokenDelta]:
        """Have drawn what waited for grammars, and take the step for the one in flight."""
        if waits:
            self._await_grammars(plan)
            try:
                self.executor.choose(self._late(plan))
            except StepError as failure:
                self.scheduler.landed(plan)
                return self._recover(plan, failure)
        self._flying = plan
        return []

    def _await_grammars(self, plan: StepPlan) -> None:
        """Wait for grammars that are still being compiled while that costs nothing.

        That is while the device computes the step, or for a moment where nobody else takes part in it.
        """
        late = [chunk.request for chunk in plan.chunks if chunk.samples and chunk.request.undecided]
        if not late or self.grammars is None:
            return
        moment = time.monotonic() + (PATIENCE_S if len(late) == len(plan.requests) else 0)
        self._decide_grammars()
        while any(request.undecided and request.finish is None for request in late) and (
            self.executor.is_computing() or time.monotonic() < moment
        ):
            self.grammars.wait(WATCH_S)
            self._decide_grammars()
        for request in late:
            if not request.undecided and request.row >= 0:
                self.scheduler.decided(request)

    def _late(self, plan: StepPlan) -> StepLate:
        """Fill the masks of a step; those that are still undecided get no token.

        Raises:
            StepError: A grammar's backend, which is a plugin, has failed.
        """
        sampled = plan.sampled
        wants = [r.constraint is not None and r.num_output < r.params.min_tokens for r in sampled]
        try:
            constraints = [r.constraint for r in sampled]
            mask_of, ends_only = fill_masks(constraints, wants, self.executor.masks, plan.drafts)
        except Exception as error:
            logger.error("A grammar failed; its step's requests are tried again.", exc_info=error)
            self._discard(plan)
            raise StepError.of(error, is_memory=isinstance(error, MemoryError)) from error
        skip = np.fromiter((request.undecided for request in sampled), np.bool_, len(sampled))
        return StepLate(step=plan.number, mask_of=mask_of, skip=skip, ends_only=ends_only)

    def _discard(self, plan: StepPlan) -> None:
        """Let a launched step end without its tokens."""
        rows, places = len(plan.sampled), plan.num_places
        free, no, skip = np.full(places, FREE, np.int32), np.zeros(places, np.bool_), np.ones(rows, np.bool_)
        with contextlib.suppress(StepError):
            self.executor.choose(StepLate(step=plan.number, mask_of=free, skip=skip, ends_only=no))
            self.executor.read()

    def _settle(self) -> list[TokenDelta]:
        """Wait for the step in flight, if there is one, and hand out its tokens."""
        plan, self._flying = self._flying, None
        if plan is None:
            return []
        self.scheduler.landed(plan)
        try:
            output = self.executor.read()
        except StepError as failure:
            return self._recover(plan, failure)
        self.recovery.worked(plan)
        deltas = [] if output.finite.all() else self._end_broken(plan, output)
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
                    continue  # what the tokens were drawn by is no mask
                deltas.append(self._take_tokens(request, ids, logprobs))
        self.report.finished(plan, len(tokens), self.scheduler, self.pages)
        return deltas

    def _fell_back(self, request: Request) -> bool:
        """Whether a request's grammar has failed while it was in force, and the next way is compiled for it."""
        constraint = request.constraint
        if constraint is None or constraint.error is None or self.grammars is None or not self.grammars.again(request):
            return False
        self.scheduler.put_back(request)
        return True

    def _end_broken(self, plan: StepPlan, output: StepOutput) -> list[TokenDelta]:
        """End requests for which a step computed numbers that are not finite, before anybody gets more of them."""
        written = {request for request, _, _ in plan.writes}  # who is missing was undone with an earlier step
        broken = [r for r, ok in zip(plan.requests, output.finite, strict=True) if not ok and r in written]
        self.scheduler.cut(plan, broken)
        return [self._last(request, NOT_FINITE) for request in broken if request.finish is None]

    def _take_prompt_logprobs(self, plan: StepPlan, output: StepOutput) -> None:
        """Keep what a step told of prompts, until their first token is sent; nothing predicts a prompt's first one."""
        for chunk in plan.chunks:
            request = chunk.request
            if chunk.start == 0 == request.params.prompt_logprobs_start and request.prompt_logprobs is not None:
                request.prompt_logprobs[:] = [TokenLogprob(request.ids[0], None, [])]
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
                delta = self._last(request, Finish("stop"))
                delta.pooled = found.tobytes()
                deltas.append(delta)
        return deltas

    def _last(self, request: Request, finish: Finish) -> TokenDelta:
        """End a live request, and say so."""
        request.finish = finish
        self.scheduler.end(request)
        if self.grammars is not None:
            self.grammars.forget(request)
        return _ending(request, finish)

    def _submit(self, message: Submit) -> None:
        self._arrivals += 1
        request = Request.from_submit(message, arrival=self._arrivals, eos_ids=self._info.eos_ids)
        room = self._info.context_len - request.num_prompt + (request.pool is not None)
        why = None
        if request.num_prompt == 0:
            why = "the prompt is empty"
        elif room < 1:
            why = f"the prompt has {request.num_prompt} tokens, the context length is {self._info.context_len}"
        elif not self._knows(message.prompt_ids):
            why = "the prompt holds a token id outside the vocabulary"
        if why is not None:
            self._ended.append(_ending(request, Finish("abort", None, why)))
            return
        request.max_tokens = min(message.params.max_tokens, room) if request.pool is None else 0
        self.scheduler.add(request)
        if self.grammars is not None:
            self.grammars.take(request, message)
            if request.undecided:
                self._announce([request])  # its grammar is being compiled
        elif message.grammar or message.thinking is not None or WordRules.are_in(message.params):
            why = "this engine has no grammar backend"
            self._abort(message.handle, Finish("abort", None, why, "unsupported_parameter"))

    def _knows(self, prompt_ids: list[int]) -> bool:
        """Whether all ids are in the vocabulary; choices share their prompt's list, which is looked at once."""
        if prompt_ids is not self._known_ids:
            if max(prompt_ids) >= self._info.vocab_size or min(prompt_ids) < 0:
                return False
            self._known_ids = prompt_ids
        return True

    def _decide_grammars(self) -> None:
        """Let requests go on whose grammars are compiled; end those whose grammars cannot be enforced."""
        if self.grammars is not None and self.grammars.is_waiting:
            for request, finish in self.grammars.decide():
                self._abort(request.handle, finish)

    def close(self) -> None:
        """End what runs beside the engine's thread."""
        self.executor.close()
        if self.grammars is not None:
            self.grammars.close()

    def _abort(self, handle: int, finish: Finish | None = None) -> None:
        request = self.scheduler.find(handle)
        if request is not None:
            self._ended.append(self._last(request, finish or Finish("abort", None, "aborted")))

    def _control(self, message: Control) -> ControlReply:
        if message.op == "flush_cache":
            num_pages = self.pages.flush()
            self._report_cache()
            return ControlReply(id=message.id, result={"ok": True, "num_pages": num_pages})
        return ControlReply(id=message.id, result=msgspec.structs.asdict(self.stats()))

    def stats(self) -> Stats:
        """A snapshot of the load, in tokens."""
        size = self.pages.page_size
        return Stats(
            step=self.step_count,
            num_running=len(self.scheduler.running),
            num_queued=len(self.scheduler.waiting),
            num_used_tokens=self.pages.num_used * size,
            num_cached_tokens=self.pages.tree.num_free_to_go() * size,
            max_total_tokens=self.pages.allocator.num_pages * size,
            gen_throughput=self.report.throughput,
            num_drafted_tokens=0 if (speculation := self.scheduler.speculation) is None else speculation.num_drafted,
            num_accepted_tokens=0 if speculation is None else speculation.num_accepted,
            num_repaired_pages=self.watch.num_repaired_pages,
        )

    def _take_tokens(self, request: Request, sampled: list[int], logprobs: Logprobs) -> TokenDelta:
        first = request.num_output == 0
        ids: list[int] = []
        request.computed_len += len(sampled) - 1  # drafts that hold
        request.num_sampled += len(sampled) - 1
        try:
            for token in sampled:
                ids.append(token)
                request.take(token)
                if request.finish is not None and request.finish.code == "grammar_failed" and self._fell_back(request):
                    request.finish = None  # the mask had allowed the token
                    break
                if request.finish is not None:
                    break
            forced = forced_tokens(request, len(self.scheduler.running))
            if forced and self.pages.extend(request, len(forced)):
                ids += jump(request, forced, self.scheduler.num_launched)
        except Exception as error:  # of a grammar's backend, which is a plugin
            logger.error("A grammar failed; its request is ended.", exc_info=error)
            request.finish = Finish("abort", None, f"its grammar failed: {type(error).__name__}: {error}")
        delta = TokenDelta(
            handle=request.handle,
            ids=ids,
            prompt_tokens=request.num_prompt,
            cached_tokens=request.cached_len,
            num_retractions=request.num_retractions,
            grammar_step=request.grammar_step,
            grammar_ignored=request.grammar_ignored,
            finish=request.finish,
        )
        if logprobs:
            delta.logprobs = [logprob for logprob in logprobs[: len(ids)] if logprob is not None] or None
        if first and request.prompt_logprobs is not None:
            delta.prompt_logprobs = request.prompt_logprobs
        if request.finish is not None:
            self.scheduler.end(request)
        return delta


def _limits(settings: EngineSettings, chunk: int) -> Limits:
    return Limits(
        max_running_requests=settings.max_running_requests,
        max_prefill_tokens=settings.max_prefill_tokens if chunk == -1 else chunk,
        max_places=settings.max_places,
        cut_prompts=chunk != -1,
    )


def _ending(request: Request, finish: Finish) -> TokenDelta:
    return TokenDelta(
        handle=request.handle,
        ids=[],
        prompt_tokens=request.num_prompt,
        cached_tokens=max(request.cached_len, 0),
        num_retractions=request.num_retractions,
        grammar_step=request.grammar_step,
        grammar_ignored=request.grammar_ignored,
        finish=finish,
    )
