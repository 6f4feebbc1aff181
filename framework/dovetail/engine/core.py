"""The engine without any transport: takes messages, makes steps, returns deltas."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from dovetail.contracts.observers import CacheEvent
from dovetail.engine.first_requests import serve_first
from dovetail.engine.integrity import SHARED_PAGE, PageWatch
from dovetail.engine.pages import PageBook
from dovetail.engine.policy import make_policy
from dovetail.engine.recovery import Failure, Recovery, failure_of
from dovetail.engine.report import Report
from dovetail.engine.request import Request, StepPlan
from dovetail.engine.scheduler import Limits, Scheduler
from dovetail.grammar.desk import make_desk
from dovetail.grammar.jump import forced_tokens, jump
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
)
from dovetail.plugins import LoadedPlugins
from dovetail.runtime.memory import chunk_size
from dovetail.runtime.runner import ModelRunner
from dovetail.runtime.step import Launched
from dovetail.settings import EngineSettings

logger = logging.getLogger(__name__)

POLL_S = 0.002
"""How long the engine sleeps at a time if all it has waits for grammars."""
PATIENCE_S = 0.005
"""How long a step waits for a grammar if nobody else takes part in it: about what computing it again would take."""
WATCH_S = 0.0002
"""How long it waits for one before it looks whether the device is done."""
NOT_FINITE = Finish("abort", None, "the model's output is not finite (NaN or infinity)")


class EngineCore:
    """Scheduler, cache and runner in one thread. Not thread-safe: whoever drives it calls everything."""

    def __init__(self, settings: EngineSettings, plugins: LoadedPlugins) -> None:
        """Load the model and allocate the cache.

        Raises:
            ConfigError: The settings, the model or a plugin is at fault.
        """
        self.settings = settings
        self.runner = ModelRunner(settings, plugins)
        self.stepper = self.runner.stepper
        self._journal: list[CacheEvent] | None = [] if settings.report_cache else None
        self.pages = PageBook(
            self.runner.pool, self.runner.state, use_tree=not settings.disable_radix_cache, journal=self._journal
        )
        self.scheduler = Scheduler(
            self.pages,
            make_policy(plugins),
            _limits(settings, self.runner.device.type, self.runner.weight_bytes),
        )
        self.recovery = Recovery(self.scheduler)
        self._bound_chunks()
        self.watch = PageWatch(self.pages)
        self.report = Report(settings.decode_log_interval)
        self.grammars = make_desk(settings, plugins, self.runner.config.vocab_size, self.runner.eos_ids)
        self.step_count = 0
        self.tell: Callable[[FromEngine], None] = lambda message: None
        """Sends what cannot wait for the end of the step; set by whoever drives the engine."""
        self._arrivals = 0
        self._ended: list[TokenDelta] = []
        on_cpu = self.runner.device.type == "cpu"
        self._overlap = not settings.disable_overlap_schedule and (settings.overlap_on_cpu or not on_cpu)
        self._flying: Launched | None = None
        self._is_resting = False
        if not on_cpu:
            serve_first(self)

    @property
    def info(self) -> EngineInfo:
        """Facts for the client."""
        runner = self.runner
        return EngineInfo(
            architecture=runner.config.architecture,
            dtype=str(runner.dtype).removeprefix("torch."),
            device=str(runner.device),
            vocab_size=runner.config.vocab_size,
            context_len=runner.context_len,
            max_total_tokens=(runner.pool.sizes[0] - 1) * runner.pool.page_size,
            max_running_requests=self.settings.max_running_requests,
            page_size=runner.pool.page_size,
            attention_backend=runner.attention_name,
            weight_bytes=runner.weight_bytes,
            kv_bytes=runner.pool.num_bytes,
            load_s=runner.load_s,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to say."""
        return self.scheduler.has_work or self._flying is not None or bool(self._ended)

    @property
    def has_chores(self) -> bool:
        """Whether `do_chore` has something to prepare for later steps."""
        return not self.runner.chores.is_complete

    def do_chore(self) -> None:
        """Use a moment without work."""
        self.runner.chores.do_next()
        self._bound_chunks()

    def _bound_chunks(self) -> None:
        """Keep to the prompt tokens of a step for which memory was found to suffice."""
        most = self.runner.max_prefill_tokens
        if most is not None and most < self.scheduler.limits.max_prefill_tokens and self.scheduler.limits.cut_prompts:
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
        if isinstance(launched, Failure):
            deltas += self._recover(plan, launched)
        elif launched is not None:
            deltas += self._choose(launched)
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

    def _launch(self, plan: StepPlan) -> Launched | Failure:
        """Start a step; its requests move on as far as can be said without its tokens. If it fails, they do not."""
        self._announce([chunk.request for chunk in plan.chunks if not chunk.request.is_announced])
        self.report.planned(plan, self.scheduler, self.pages)
        self.scheduler.launching(plan)
        try:
            launched = self.stepper.launch(plan)
        except Exception as error:  # of a model, a backend, a sampler: of whoever is a plugin
            return failure_of(error, self.runner.device)
        self.scheduler.launched(plan)
        return launched

    def _announce(self, requests: list[Request]) -> None:
        """Tell the client which requests take part from now on: should the engine die, one of those may be why."""
        if requests:
            for request in requests:
                request.is_announced = True
            self.tell(Admitted([request.handle for request in requests]))

    def _recover(self, plan: StepPlan, failure: Failure) -> list[TokenDelta]:
        """Undo a step that has failed; end its request if there is no other way to go on."""
        self.scheduler.cut(plan, plan.requests)
        request = self.recovery.failed(plan, failure)
        return [] if request is None else [self._last(request, failure.finish)]

    def _choose(self, launched: Launched) -> list[TokenDelta]:
        """Sample what waited for grammars; those that are still being compiled are waited for while that costs nothing.

        That is while the device computes the step, or for a moment where nobody else takes part in it.
        """
        late = [chunk.request for chunk in launched.plan.chunks if chunk.samples and chunk.request.undecided]
        if late and self.grammars is not None:
            moment = time.monotonic() + (PATIENCE_S if len(late) == len(launched.plan.requests) else 0)
            self._decide_grammars()
            while any(request.undecided and request.finish is None for request in late) and (
                launched.is_computing or time.monotonic() < moment
            ):
                self.grammars.wait(WATCH_S)
                self._decide_grammars()
            for request in late:
                if not request.undecided and request.row >= 0:
                    self.scheduler.decided(request)
        try:
            self.stepper.choose(launched)
        except Exception as error:  # as above
            self.scheduler.landed(launched.plan)
            return self._recover(launched.plan, failure_of(error, self.runner.device))
        self._flying = launched
        return []

    def _settle(self) -> list[TokenDelta]:
        """Wait for the step in flight, if there is one, and hand out its tokens."""
        step, self._flying = self._flying, None
        if step is None:
            return []
        self.scheduler.landed(step.plan)
        try:
            result = self.stepper.read(step)
        except Exception as error:  # as above
            return self._recover(step.plan, failure_of(error, self.runner.device))
        self.recovery.worked(step.plan)
        deltas = self._end_broken(step.plan, result.broken) if result.broken else []
        self.scheduler.counted(step.plan)
        for request, token, logprob in zip(result.sampled, result.tokens, result.logprobs, strict=True):
            # Else it ended while this step was under way, or what it computed is void.
            if request.finish is None and step.plan.number > request.void_step:
                if self._fell_back(request):
                    continue  # what the token was drawn by is no mask
                deltas.append(self._take_token(request, token))
                if logprob is not None:
                    deltas[-1].logprobs = [logprob]
        self.report.finished(step, self.scheduler, self.pages)
        return deltas

    def _fell_back(self, request: Request) -> bool:
        """Whether a request's grammar has failed while it was in force, and the next way is compiled for it."""
        constraint = request.sample.constraint
        if constraint is None or constraint.error is None or self.grammars is None or not self.grammars.again(request):
            return False
        self.scheduler.put_back(request)
        return True

    def _end_broken(self, plan: StepPlan, broken: list[Request]) -> list[TokenDelta]:
        """End requests for which a step computed numbers that are not finite, before anybody gets more of them."""
        written = {request for request, _, _ in plan.writes}
        broken = [request for request in broken if request in written]  # else it was undone with an earlier step
        self.scheduler.cut(plan, broken)
        deltas = []
        for request in broken:
            if request.finish is None:
                deltas.append(self._last(request, NOT_FINITE))
        return deltas

    def _last(self, request: Request, finish: Finish) -> TokenDelta:
        """End a live request, and say so."""
        request.finish = finish
        request.sample.release()
        self.scheduler.end(request)
        if self.grammars is not None:
            self.grammars.forget(request)
        return _ending(request, finish)

    def _submit(self, message: Submit) -> None:
        self._arrivals += 1
        request = Request.from_submit(message, arrival=self._arrivals, eos_ids=self.runner.eos_ids)
        room = self.runner.context_len - request.num_prompt
        why = None
        if request.num_prompt == 0:
            why = "the prompt is empty"
        elif room < 1:
            why = f"the prompt has {request.num_prompt} tokens, the context length is {self.runner.context_len}"
        elif max(message.prompt_ids) >= self.runner.config.vocab_size or min(message.prompt_ids) < 0:
            why = "the prompt holds a token id outside the vocabulary"
        if why is not None:
            self._ended.append(_ending(request, Finish("abort", None, why)))
            return
        request.max_tokens = min(message.params.max_tokens, room)
        self.scheduler.add(request)
        if self.grammars is not None:
            self.grammars.take(request, message)
            if request.undecided:
                self._announce([request])  # its grammar is being compiled
        elif message.grammar or message.thinking is not None or WordRules.are_in(message.params):
            why = "this engine has no grammar backend"
            self._abort(message.handle, Finish("abort", None, why, "unsupported_parameter"))

    def _decide_grammars(self) -> None:
        """Let requests go on whose grammars are compiled; end those whose grammars cannot be enforced."""
        if self.grammars is not None and self.grammars.is_waiting:
            for request, finish in self.grammars.decide():
                self._abort(request.handle, finish)

    def close(self) -> None:
        """End what runs beside the engine's thread."""
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
            num_repaired_pages=self.watch.num_repaired_pages,
        )

    def _take_token(self, request: Request, token: int) -> TokenDelta:
        first = request.num_output == 0
        ids = [token]
        try:
            request.take(token)
            if request.finish is not None and request.finish.code == "grammar_failed" and self._fell_back(request):
                request.finish = None  # the mask had allowed the token
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
        if first and request.prompt_logprobs is not None:
            delta.prompt_logprobs = request.prompt_logprobs
        if request.finish is not None:
            request.sample.release()
            self.scheduler.end(request)
        return delta


def _limits(settings: EngineSettings, device: str, weight_bytes: int) -> Limits:
    chunk = chunk_size(settings, device, weight_bytes)
    return Limits(
        max_running_requests=settings.max_running_requests,
        max_prefill_tokens=settings.max_prefill_tokens if chunk == -1 else chunk,
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
