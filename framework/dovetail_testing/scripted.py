"""An `EngineClient` whose replies are scripted: everything between HTTP and the engine, without a model."""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from dovetail.contracts.errors import EngineDeadError
from dovetail.engine.client import CacheWatch
from dovetail.engine.streams import merge
from dovetail.messages import (
    EngineInfo,
    Finish,
    ProfileSpec,
    Stats,
    Submit,
    TokenDelta,
    TokenLogprob,
    TopLogprob,
)

HIDDEN_SIZE = 8
Script = Callable[[Submit], list[int]]


class ScriptedStream:
    """The stream of one scripted request."""

    def __init__(self, engine: ScriptedEngine, request: Submit, every: int) -> None:
        self._aborted = asyncio.Event()
        self._deltas = engine.deltas(request, every, self._aborted)

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        return await anext(self._deltas)

    def abort(self) -> None:
        self._aborted.set()

    async def aclose(self) -> None:
        await self._deltas.aclose()


class ScriptedEngine:
    """Answers each request with the ids its script returns, one per delta, then the end-of-sequence token.

    Attributes:
        script: From a request to the ids of its reply, without the end-of-sequence token.
        eos: The end-of-sequence token.
        delay_s: Pause before each token.
        hold: While cleared, no request gets a token.
        give_up: How every request ends at once.
        restarting: Why the engine is being started again; None: it runs.
        die_after: After so many tokens in all, the engine dies.
        per_delta: Tokens per delta.
        submits: Every request, in order.
        aborted: Identifiers (`rid`) of the requests whose stream was left early, or that were aborted.
        live: Those of the requests that run now.
    """

    def __init__(self, script: Script, *, eos: int, vocab_size: int, context_len: int = 512) -> None:
        self.script = script
        self.eos = eos
        self.vocab_size = vocab_size
        self.context_len = context_len
        self.delay_s = 0.0
        self.hold = asyncio.Event()
        self.hold.set()
        self.die_after: int | None = None
        self.per_delta = 1
        self.give_up: Finish | None = None
        self.start_error: Exception | None = None
        self.submits: list[Submit] = []
        self.aborted: list[str] = []
        self.live: list[str] = []
        self.step = 0
        self.steps: list[dict[str, Any]] = []
        """What `control("steps")` tells."""
        self.dead: str | None = None
        self.restarting: str | None = None
        self.num_restarts = 0
        self.pid = None
        self.cache_watch: CacheWatch | None = None
        self.is_closed = False

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            architecture="FakeForCausalLM",
            dtype="float32",
            device="cpu",
            vocab_size=self.vocab_size,
            hidden_size=HIDDEN_SIZE,
            context_len=self.context_len,
            max_total_tokens=max(100_000, self.context_len),
            max_running_requests=256,
            page_size=16,
            attention_backend="none",
            weight_bytes=0,
            kv_bytes=0,
            load_s=0.0,
        )

    @property
    def num_unanswered(self) -> int:
        return len(self.live)

    async def start(self) -> EngineInfo:
        if self.start_error is not None:
            raise self.start_error
        return self.info

    def submit(self, request: Submit, *, every: int = 1) -> ScriptedStream:
        return ScriptedStream(self, request, every)

    async def deltas(self, request: Submit, every: int, aborted: asyncio.Event) -> AsyncGenerator[TokenDelta, None]:
        """What one request's stream yields, until `aborted` is set."""
        self.submits.append(request)
        self.live.append(request.rid)
        is_finished, has_begun = False, False
        waiting: TokenDelta | None = None
        try:
            async for delta in self._deltas(request, aborted):
                is_finished = delta.finish is not None
                if waiting is None:
                    waiting = delta
                else:
                    merge(waiting, delta)
                if is_finished or not has_begun or len(waiting.ids) >= every:
                    has_begun = True
                    ready, waiting = waiting, None
                    yield ready
        finally:
            self.live.remove(request.rid)
            if not is_finished:
                self.aborted.append(request.rid)

    async def _deltas(self, request: Submit, aborted: asyncio.Event) -> AsyncIterator[TokenDelta]:
        if self.give_up is not None:
            yield TokenDelta(handle=request.handle, ids=[], prompt_tokens=1, finish=self.give_up)
            return
        if request.prefill_only:
            await self._may_go_on(aborted)
            finish = Finish("abort", None, "aborted") if aborted.is_set() else Finish("stop")
            yield TokenDelta(handle=request.handle, ids=[], prompt_tokens=len(request.prompt_ids), finish=finish)
            return
        if request.pool is not None:
            self.step += 1
            yield self._pooled(request)
            return
        ids, finish = self._reply(request)
        chunks = [ids[i : i + self.per_delta] for i in range(0, len(ids), self.per_delta)]
        for position, chunk in enumerate(chunks):
            await asyncio.sleep(self.delay_s)
            await self._may_go_on(aborted)
            if aborted.is_set():
                yield TokenDelta(
                    handle=request.handle, ids=[], prompt_tokens=1, finish=Finish("abort", None, "aborted")
                )
                return
            self.step += 1
            if self.die_after is not None and self.step > self.die_after:
                self.dead = "killed by the test"
                raise EngineDeadError(self.dead)
            is_last = position == len(chunks) - 1
            yield TokenDelta(
                handle=request.handle,
                ids=chunk,
                logprobs=[self._logprob(i, request.params.logprobs) for i in chunk]
                if request.params.logprobs is not None
                else None,
                prompt_logprobs=self._prompt_logprobs(request) if position == 0 else None,
                prompt_tokens=len(request.prompt_ids),
                cached_tokens=3,
                finish=finish if is_last else None,
            )

    async def _may_go_on(self, aborted: asyncio.Event) -> None:
        while not self.hold.is_set() and not aborted.is_set():
            await asyncio.sleep(0.005)

    def _reply(self, request: Submit) -> tuple[list[int], Finish]:
        ids = [*self.script(request), self.eos]
        if request.params.ignore_eos:
            ids = (ids[:-1] * request.params.max_tokens)[: request.params.max_tokens]
            return ids, Finish("length")
        for position, token in enumerate(ids):
            if token in request.params.stop_token_ids:
                return ids[: position + 1], Finish("stop", token)
        if len(ids) > request.params.max_tokens:
            return ids[: request.params.max_tokens], Finish("length")
        return ids, Finish("stop", self.eos)

    def _pooled(self, request: Submit) -> TokenDelta:
        """The one delta of a request for hidden states: its number of tokens, then its first ids."""
        numbers = [float(len(request.prompt_ids)), *map(float, request.prompt_ids)]
        return TokenDelta(
            handle=request.handle,
            ids=[],
            prompt_tokens=len(request.prompt_ids),
            pooled=array("f", (numbers + [0.0] * HIDDEN_SIZE)[:HIDDEN_SIZE]).tobytes(),
            finish=Finish("stop"),
        )

    def _logprob(self, token: int, num_top: int | None) -> TokenLogprob:
        top = [TopLogprob((token + i) % self.vocab_size, -0.25 * (i + 1)) for i in range(num_top or 0)]
        return TokenLogprob(token, -0.25, top)

    def _prompt_logprobs(self, request: Submit) -> list[TokenLogprob] | None:
        count = request.params.prompt_logprobs
        if count is None:
            return None
        start = request.params.prompt_logprobs_start
        rows = [self._logprob(token, count) for token in request.prompt_ids[start:]]
        return rows if start else rows[1:]

    async def control(self, op: str, profile: ProfileSpec | None = None, *, after: int = 0) -> dict[str, Any]:
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if op == "flush_cache":
            return {"ok": True}
        if op == "steps":
            return {"steps": [row for row in self.steps if row["step"] > after]}
        if op.endswith("_profile"):
            return {"error": "this engine computes nothing"}
        stats = Stats(
            step=self.step,
            num_running=len(self.live),
            num_queued=0,
            num_used_tokens=0,
            num_cached_tokens=0,
            max_total_tokens=self.info.max_total_tokens,
            gen_throughput=0.0,
        )
        return dataclasses.asdict(stats)

    async def close(self, *, wait: bool = True) -> None:
        self.is_closed = True
        self.dead = self.dead or "closed"
