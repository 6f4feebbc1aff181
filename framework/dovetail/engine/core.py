"""The engine without any transport: takes messages, makes steps, returns deltas."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Sequence
from time import perf_counter

import msgspec

from dovetail.base.settings import EngineSettings
from dovetail.contracts.observers import CacheEvent
from dovetail.engine.device_rows import DeviceRows
from dovetail.engine.grammar_manager import GrammarManager, LateMasks
from dovetail.engine.kv_cache_manager import KVCacheManager
from dovetail.engine.limits import limits_of
from dovetail.engine.media import RequestMedia, TowerSchedule, fault, isolated, keyed
from dovetail.engine.policy import make_policy
from dovetail.engine.profiling import Profiling
from dovetail.engine.recovery import SHARED_PAGE, KVCacheChecker, Recovery, finish_of
from dovetail.engine.replies import Replies, ReplyFolds, delta_of
from dovetail.engine.request import EngineRequest, StepPlan
from dovetail.engine.scheduler import Scheduler
from dovetail.engine.speculation import Gain, Speculation, make_speculation
from dovetail.engine.stats_log import StatsLog, Timeline
from dovetail.engine.step_builder import GraphChooser, StepBuilder
from dovetail.grammar.compile.early import EarlyTokenizer
from dovetail.grammar.matching.constraint import WordRules
from dovetail.messages import (
    Abort,
    Admitted,
    CacheChanged,
    Control,
    ControlReply,
    EngineInfo,
    Finish,
    FromEngine,
    ServedModel,
    Stats,
    StepDeltas,
    Submit,
    ToEngine,
    TokenDelta,
)
from dovetail.messages.executor import Executor, StepError
from dovetail.messages.media import MediaSpan
from dovetail.messages.step import PrepareResult
from dovetail.plugins import LoadedPlugins

logger = logging.getLogger(__name__)

POLL_S = 0.002
"""How long the engine sleeps at a time if all it has waits for grammars."""


class EngineCore:
    """Requests, scheduler and cache in one thread. Not thread-safe: whoever drives it calls everything.

    Knows no tensors: what is to be computed goes to its executor as data.
    """

    def __init__(
        self,
        settings: EngineSettings,
        plugins: LoadedPlugins,
        executor: Executor,
        tokenizer: EarlyTokenizer | None = None,
        *,
        eos_ids: tuple[int, ...],
    ) -> None:
        """Prepare; the executor has started. Grammars take a `tokenizer` that is being read, or read it themselves.

        `eos_ids` end a request that does not ignore them, as `end_ids` finds them.

        Raises:
            ConfigError: A plugin is at fault.
        """
        self.settings, self.executor = settings, executor
        info = self._info = executor.info
        self._eos_ids = tuple(i for i in eos_ids if i < info.vocab_size)  # a tokenizer may have more
        self.rows = DeviceRows(settings.max_running_requests)
        self._journal: list[CacheEvent] | None = [] if settings.report_cache else None
        self.pages = KVCacheManager(
            self.rows,
            page_size=info.page_size,
            num_pages=info.num_pages,
            reaches=info.reaches,
            use_tree=not settings.disable_radix_cache,
            journal=self._journal,
        )
        self.graphs = GraphChooser(info, executor.prepare)
        self.scheduler = Scheduler(self.pages, make_policy(plugins), limits_of(settings, info))
        self.recovery = Recovery(self.scheduler)
        self._builder = StepBuilder(self.rows, self.graphs)
        self._prepared(info.prepared)
        self.watch = KVCacheChecker(self.pages)
        self.profiling = Profiling(executor)
        self.timeline = Timeline()
        self.stats_log = StatsLog(settings.decode_log_interval)
        self.grammars: GrammarManager | None = None
        if plugins.plan.of_kind("grammar_backend"):
            self.grammars = GrammarManager(settings, plugins, info.vocab_size, self._eos_ids, tokenizer)
        self._masks = LateMasks(executor, self.scheduler, self.grammars, self._decide_grammars)
        folds = ReplyFolds(self.scheduler) if settings.fold_replies else None
        self._replies = Replies(self.scheduler, self.pages, self.grammars, folds)
        self.step_count = 0
        self.send: Callable[[FromEngine], None] = lambda message: None
        """Sends what cannot wait for the end of the step; set by whoever drives the engine."""
        if info.image_token_bytes:
            self.scheduler.tower = TowerSchedule(info.image_token_bytes, info.timed_patches)
        self._key_secret = secrets.token_bytes(16)
        self._arrivals = 0
        self._known_ids: list[int] = []
        self._ended: list[TokenDelta] = []
        on_cpu = info.device == "cpu"
        self.scheduler.speculation = speculation = make_speculation(plugins, info.vocab_size)
        self._overlap = not settings.disable_overlap_schedule and (settings.overlap_on_cpu or not on_cpu)
        if speculation is not None and (self._overlap or not on_cpu):
            speculation.gain = Gain(self.graphs.verifying)
        self._encoded: Sequence[MediaSpan] = ()
        self._in_flight: StepPlan | None = None
        self._is_throttled = False

    @property
    def info(self) -> EngineInfo:
        """Facts for the client."""
        shared = {name: getattr(self._info, name) for name in ServedModel.__struct_fields__}
        return EngineInfo(
            **shared,
            max_total_tokens=self.pages.num_pages * self._info.page_size,
            max_running_requests=self.settings.max_running_requests,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to say."""
        return self.scheduler.has_work or self._in_flight is not None or bool(self._ended)

    def why_slow(self) -> str:
        """Return what makes the step long that was begun last, as a sentence behind others; any thread may ask."""
        if not (patches := max((span.num_patches for span in self._encoded), default=0)):
            return ""
        return f" Its vision tower reads an image of {patches:,} patches in this step: lower --max-image-patches."

    @property
    def has_idle_tasks(self) -> bool:
        """Whether `run_idle_task` has something to prepare for later steps."""
        return self._num_unprepared > 0

    def run_idle_task(self) -> None:
        """Use a moment without work."""
        self._prepared(self.executor.prepare())

    def _prepared(self, outcome: PrepareResult) -> None:
        """Note what was prepared, and keep to the prompt tokens of a step for which memory was found to suffice."""
        self.graphs.prepared(outcome)
        self._num_unprepared = outcome.num_left
        most, limits = outcome.max_prefill_tokens, self.scheduler.limits
        if most is not None and most < limits.max_prefill_tokens and limits.cut_prompts:
            self.recovery.bound(most)

    @property
    def throttle_s(self) -> float:
        """Seconds in which `step` would do nothing unless a message comes: all that is here holds back."""
        return self.scheduler.background.wait_s() if self._is_throttled and not self._ended else 0.0

    def handle(self, message: ToEngine) -> ControlReply | None:
        """Take one message."""
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self._abort(message.handle)
        else:
            return self._control(message)
        return None

    def step(self) -> StepDeltas:
        """Launch a step and account for the one before; without overlap, for this one.

        The device computes a step while the host reads, sends and plans its neighbours.
        """
        self._decide_grammars()
        deltas, self._ended = self._ended, []
        self._is_throttled = False
        has_read = self._in_flight is not None
        if self.scheduler.speculation is not None:
            deltas += self._read_before_drafts(self.scheduler.speculation)
        plan = self.scheduler.schedule()
        launched = self._launch(plan) if plan.decode or plan.chunks else None
        if launched is None and self.scheduler.tower is not None:
            self.scheduler.tower.failed(plan)  # a chunk for whose images it was got no pages
        deltas += self._read()
        if isinstance(launched, StepError):
            deltas += self._recover(plan, launched)
        elif launched is not None:
            deltas += self._sample_deferred(plan, launched)
            if not self._overlap:
                deltas += self._read()
        elif not deltas and not has_read:
            is_compiling = self.grammars is not None and self.grammars.is_waiting
            if self.grammars is not None and is_compiling:
                self.grammars.wait(POLL_S)
            self._is_throttled = not is_compiling
        for request in self.watch.check(self.scheduler.running):
            self._abort(request.handle, SHARED_PAGE)
        self.step_count += 1
        if self.profiling.is_on:
            self.profiling.stepped(self.step_count)
        self._report_cache()
        # What is computed for the cache alone has no client, however it ends.
        return StepDeltas(step=self.step_count, deltas=[delta for delta in deltas if delta.handle >= 0])

    def _read_before_drafts(self, speculation: Speculation) -> list[TokenDelta]:
        """Read the step in flight if the next one is to have drafts, or if it has some: what it brings is open."""
        is_open = self._in_flight is not None and bool(self._in_flight.drafts)
        deltas = self._read() if is_open else []
        return deltas + self._read() if speculation.wants_next(self.scheduler.running) else deltas

    def _report_cache(self) -> None:
        """Tell what has come into the prefix cache and gone since the last time, if somebody wants to know."""
        if self._journal:
            events = self._journal.copy()
            self._journal.clear()
            self.send(CacheChanged(events))

    def _launch(self, plan: StepPlan) -> bool | StepError:
        """Start a step; its requests move on as far as can be said without its tokens. If it fails, they do not.

        Returns:
            Whether a row of it waits for what the host has yet to say.
        """
        self._announce([chunk.request for chunk in plan.chunks if not chunk.request.is_announced])
        self.stats_log.planned(plan, self.scheduler, self.pages)
        self.scheduler.launching(plan)
        step = self._builder.build(plan)
        self._encoded = plan.encode
        plan.began = perf_counter()
        try:
            self.executor.launch(step)
        except StepError as failure:
            return failure
        self.scheduler.launched(plan)
        return bool(step.waits.any())

    def _announce(self, requests: list[EngineRequest]) -> None:
        """Tell the client which requests take part from now on: should the engine die, one of those may be why."""
        for request in requests:
            request.is_announced = True
        if known := [request.handle for request in requests if request.handle >= 0]:
            self.send(Admitted(known))

    def _recover(self, plan: StepPlan, failure: StepError) -> list[TokenDelta]:
        """Undo a step that has failed; end its request if there is no other way to go on."""
        self._masks.forget()
        self.scheduler.discard(plan, plan.requests)
        request = self.recovery.failed(plan, failure)
        return [] if request is None else [self._replies.last(request, finish_of(failure))]

    def _sample_deferred(self, plan: StepPlan, waits: bool) -> list[TokenDelta]:
        """Have drawn what waited for grammars, and take the step for the one in flight."""
        if waits:
            try:
                self._masks.choose(plan)
            except StepError as failure:
                self.scheduler.step_finished(plan)
                return self._recover(plan, failure)
        self._in_flight = plan
        return []

    def _read(self) -> list[TokenDelta]:
        """Wait for the step in flight, if there is one, and hand out its tokens."""
        plan, self._in_flight = self._in_flight, None
        if plan is None:
            return []
        self.scheduler.step_finished(plan)
        try:
            output = self.executor.read()
        except StepError as failure:
            return self._recover(plan, failure)
        self.recovery.worked(plan)
        self.timeline.read(plan, len(self.scheduler.waiting))
        deltas = self._replies.of(plan, output)
        if self.scheduler.speculation is not None and self.scheduler.speculation.gain is not None:
            self.scheduler.speculation.gain.read(plan)
        self.stats_log.finished(plan, len(output.tokens), self.scheduler, self.pages)
        return deltas

    def _submit(self, message: Submit) -> None:
        if self.scheduler.find(message.handle) is not None:
            # Deltas carry handles alone: one that refused this request would end the stream of the other.
            logger.error("Ignored a request: handle %d belongs to one that has not ended; use another.", message.handle)
            return
        if message.prefill_only:
            whole = self.pages.whole(len(message.prompt_ids))
            message = msgspec.structs.replace(message, prompt_ids=message.prompt_ids[:whole])
        self._arrivals += 1
        request = EngineRequest.from_submit(message, arrival=self._arrivals, eos_ids=self._eos_ids)
        room = self._info.context_len - request.num_prompt + (request.pool is not None)
        why = None
        if request.pool is None and not self._info.generates:
            why = f"{self._info.architecture} does not generate: it has no output head"
        elif request.num_prompt == 0:
            why = "the prompt is empty"
        elif room < 1:
            why = f"the prompt has {request.num_prompt} tokens, the context length is {self._info.context_len}"
        elif not self._knows(message.prompt_ids):
            why = "the prompt holds a token id outside the vocabulary"
        elif message.media:
            why = fault(message.media, request.num_prompt, self._info.max_image_patches)
        if why is not None:
            self._ended.append(delta_of(request, [], Finish("abort", None, why)))
            return
        if request.prefill_only and self.pages.is_cached(request):
            request.cached_len = len(request.ids)
            self._ended.append(delta_of(request, [], Finish("stop")))
            return
        generates = request.pool is None and not request.prefill_only
        request.max_tokens = min(message.params.max_tokens, room) if generates else 0
        if message.media:
            spans = isolated(message.media, message.cache_salt)
            request.media = RequestMedia(spans, message.prompt_ids, message.owner, is_cut=self._info.cuts_images)
            request.ids[: request.num_prompt] = keyed(message.prompt_ids, spans, self._key_secret)
        self.scheduler.add(request)
        if self.grammars is not None:
            self.grammars.add(request, message)
            if request.waiting_for_grammar:
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
            self._ended.append(self._replies.last(request, finish or Finish("abort", None, "aborted")))

    def _control(self, message: Control) -> ControlReply:
        if message.op == "flush_cache":
            num_pages = self.pages.flush()
            self._report_cache()
            return ControlReply(id=message.id, result={"ok": True, "num_pages": num_pages})
        if message.op == "steps":
            return ControlReply(id=message.id, result=self.timeline.since(message.after))
        if message.op == "start_profile" and message.profile is not None:
            return ControlReply(id=message.id, result=self.profiling.start(message.profile, self.step_count))
        if message.op == "stop_profile":
            return ControlReply(id=message.id, result=self.profiling.stop())
        return ControlReply(id=message.id, result=dataclasses.asdict(self.stats()))

    def stats(self) -> Stats:
        """A snapshot of the load, in tokens."""
        size = self.pages.page_size
        device_used_bytes, device_total_bytes = self.executor.device_memory()
        return Stats(
            step=self.step_count,
            num_running=len(self.scheduler.running),
            num_queued=len(self.scheduler.waiting),
            num_used_tokens=self.pages.num_used * size,
            num_cached_tokens=self.pages.tree.num_free_to_go() * size,
            max_total_tokens=self.pages.num_pages * size,
            gen_throughput=self.stats_log.throughput if self.has_work else 0.0,
            num_drafted_tokens=0 if (speculation := self.scheduler.speculation) is None else speculation.num_drafted,
            num_accepted_tokens=0 if speculation is None else speculation.num_accepted,
            num_encoded_images=0 if (tower := self.scheduler.tower) is None else tower.num_encoded,
            device_used_bytes=device_used_bytes,
            device_total_bytes=device_total_bytes,
            num_repaired_pages=self.watch.num_repaired_pages,
        )
