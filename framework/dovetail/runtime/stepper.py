"""Runs steps on a loaded model: forward pass, sampling, and reading the tokens back, each callable by itself.

A step is launched before the last one's tokens are known. Only requests with a grammar need them: their next mask
depends on the last token. So `launch` samples at once unless a request of the step has a constraint, or will have one
that is still being compiled; then `choose` does, after the caller has read the step before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.cache.pool import KVCache
from dovetail.contracts.attention import AttentionBackend, Phase
from dovetail.contracts.model import CausalLM
from dovetail.engine.request import Chunk, Request, StepPlan
from dovetail.grammar.masks import MaskBuffer
from dovetail.messages import TokenLogprob
from dovetail.runtime.batch import Prepared, prepare
from dovetail.runtime.device_state import DeviceState
from dovetail.runtime.graphs import Choice, DecodeGraphs
from dovetail.runtime.penalties import TokenCounts
from dovetail.runtime.prefill_graphs import PrefillGraphs
from dovetail.runtime.prefill_sizes import Size
from dovetail.runtime.sampler import FloatScratch, Ranked, Sampled, count, is_plain, rank_logprobs, sample
from dovetail.runtime.step import Launched, Part
from dovetail.runtime.step_ops import check_tokens
from dovetail.runtime.upload import upload

LOGIT_ROWS = 256
"""Most rows of prompt logits made at once; at a vocabulary of 152k they take 156 MB in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Tokens of a step: `sampled[i]` got `tokens[i]`, with `logprobs[i]`.

    What was computed for the `broken` requests is not finite, for any of their tokens: they got nothing.
    """

    sampled: list[Request]
    tokens: list[int]
    logprobs: list[TokenLogprob | None]
    broken: list[Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraphs:
    """What is captured: decode steps, and small prefills where the attention backend can be captured for them."""

    decode: DecodeGraphs
    prefill: PrefillGraphs | None


class Stepper:
    """Computes the steps of one engine, in its thread and on the device's current stream."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        state: DeviceState,
        pool: KVCache,
        masks: MaskBuffer,
        counts: TokenCounts,
        graphs: StepGraphs | None,
    ) -> None:
        """Nothing is computed yet."""
        self._model, self._attention, self._state = model, attention, state
        self._page_size, self._masks, self._graphs = pool.page_size, masks, graphs
        self._counts, self._scratch = counts, FloatScratch()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Start a step. Its tokens are chosen too, unless a request has a constraint."""
        self._state.flush()
        launched = self._replay(plan, self._graphs) if self._graphs is not None else None
        if launched is None:
            launched = self.run_eagerly(plan)
        if all(part.logits is None for part in launched.parts):
            launched.start_copy()
        elif self._state.device.type == "cuda" and any(request.undecided for request in launched.sampled):
            launched.forward_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            launched.forward_done.record()
        return launched

    @torch.inference_mode()
    def choose(self, launched: Launched) -> None:
        """Sample what waited for its constraints, which know the last step's tokens by now.

        Requests that are still undecided leave the step without a token.
        """
        waiting = [part for part in launched.parts if part.logits is not None]
        if not waiting:
            return
        # One call: the buffer of masks is filled once per step, as its copy to the device may be under way.
        part = _decided(waiting[0] if len(waiting) == 1 else _join(waiting), launched)
        launched.parts = [other for other in launched.parts if other.logits is None]
        if part.requests:
            launched.parts.append(part)
            self._sample(part)
        launched.start_copy()

    def read(self, launched: Launched) -> StepResult:
        """Wait for a step's tokens. Log probabilities of prompts go to their requests."""
        tokens, broken = launched.read_tokens()
        logprobs: list[TokenLogprob | None] = []
        for part in launched.parts:
            logprobs += _by_row(part)
        for request, ranked in launched.prompt_logprobs:
            if request.prompt_logprobs is not None and launched.plan.number > request.void_step:
                request.prompt_logprobs += ranked.read()
        return StepResult(sampled=launched.sampled, tokens=tokens, logprobs=logprobs, broken=broken)

    @torch.inference_mode()
    def run_eagerly(self, plan: StepPlan) -> Launched:
        """Start a step in one forward pass, without graphs; `launch` does where they do not serve it."""
        ready = prepare(plan, self._state, self._attention, self._page_size)
        self._attention.plan(ready.batch, Phase.EAGER)
        self._attention.plan_in_graph(ready.batch)
        hidden = self._model.forward(ready.ids, ready.batch)
        self._state.seq_lens.index_copy_(0, ready.batch.rows, ready.batch.seq_lens)
        launched = Launched(plan, [])
        self._rank_prompts(launched, hidden)
        broken = self._check(ready, hidden) if plan.chunks else None  # of a lone token, the logits tell
        if broken is not None and ready.silent_at is not None:
            launched.add_silent(ready.silent, broken[ready.silent_at])
        if ready.sampled:
            part = Part(ready.sampled, ready.sampled_rows, self._model.lm_head(hidden[ready.batch.last_tokens]))
            part.broken = broken if broken is None or ready.sampled_at is None else broken[ready.sampled_at]
            launched.parts.append(part)
            if not _waits(ready.sampled):
                self._sample(part)
        return launched

    def _check(self, ready: Prepared, hidden: Tensor) -> Tensor:
        """Find the requests with a token whose hidden state is not finite: `[B]` bool."""
        broken = torch.zeros(ready.batch.num_requests, dtype=torch.bool, device=hidden.device)
        check_tokens(hidden, ready.batch.q_starts, broken)
        return broken

    def _sample(self, part: Part) -> None:
        if part.logits is not None:
            rows = [request.sample for request in part.requests]
            sampled = sample(part.logits, rows, self._masks, self._counts, self._scratch)
            self._state.set_next(part.rows, sampled.ids)
            part.choose(sampled)

    def _replay(self, plan: StepPlan, graphs: StepGraphs) -> Launched | None:
        """A step of two graphs: the decode rows, then the prefill chunks; None where graphs do not serve it."""
        prefill, size = graphs.prefill, None
        if plan.chunks:
            size = None if prefill is None else prefill.size_for(plan.chunks)
            if size is None:
                return None
        choice = graphs.decode.choose(plan.decode) if plan.decode else None
        if plan.decode and choice is None:
            return None
        launched = Launched(plan, [], graph=True)
        if choice is not None:
            launched.parts.append(self._decode(choice, graphs.decode))
        if prefill is not None and size is not None:
            self._prefill(launched, prefill, size)
        return launched

    def _decode(self, choice: Choice, graphs: DecodeGraphs) -> Part:
        """Replay a decode step; rows that want more than temperature and filters are sampled after it."""
        requests = choice.requests
        num, rows = len(requests), [r.sample for r in requests]
        done = graphs.run([r.row for r in requests], choice.key)
        part = Part(requests, done.rows[:num])
        if all(is_plain(row) for row in rows):
            ids = done.ids[:num]
            if any(row.params.temperature > 0 for row in rows):
                ids = graphs.draw(done, rows)[:num]
            count(ids, rows)
            part.choose(Sampled(ids, done.broken[:num]))
            return part
        return self._later(part, done.logits[:num])

    def _prefill(self, launched: Launched, graphs: PrefillGraphs, size: Size) -> None:
        """Replay a step's prefill chunks."""
        # Those that get a token stand side by side.
        chunks = sorted(launched.plan.chunks, key=lambda chunk: not chunk.samples)
        done = graphs.run(chunks, size)
        requests = [chunk.request for chunk in chunks if chunk.samples]
        num, rows = len(requests), [request.sample for request in requests]
        if num < len(chunks):
            launched.add_silent([chunk.request for chunk in chunks[num:]], done.broken[num : len(chunks)])
        if not requests:
            return
        part = Part(requests, done.rows[:num])
        launched.parts.append(part)
        is_greedy = all(is_plain(row) and row.params.temperature == 0 for row in rows)
        if is_greedy and not any(request.undecided for request in requests):
            count(done.ids[:num], rows)
            part.choose(Sampled(done.ids[:num], done.broken[:num]))
        else:
            part.broken = done.broken[:num]
            self._later(part, done.logits[:num])

    def _later(self, part: Part, logits: Tensor) -> Part:
        """Sample a part of a graph outside it: at once, or when its constraints are known."""
        part.logits = logits
        if _waits(part.requests):
            # The next graph of this step may overwrite its tensors.
            part.rows, part.logits = part.rows.clone(), logits.clone()
            part.broken = None if part.broken is None else part.broken.clone()
        else:
            self._sample(part)
        return part

    def _rank_prompts(self, launched: Launched, hidden: Tensor) -> None:
        """Rank each chunk's successors within its prompt, where asked for."""
        at = len(launched.plan.decode)
        for chunk in launched.plan.chunks:
            if chunk.request.prompt_logprobs is not None:
                ranked = self._rank_chunk(chunk, hidden[at : at + chunk.num_new])
                launched.prompt_logprobs += [(chunk.request, item) for item in ranked]
            at += chunk.num_new

    def _rank_chunk(self, chunk: Chunk, hidden: Tensor) -> list[Ranked]:
        """`hidden` `[num_new, H]`: the state at position p gives the log probability of token p + 1."""
        request, found = chunk.request, chunk.request.prompt_logprobs
        wanted = request.params.prompt_logprobs
        if wanted is None or found is None:
            return []
        if chunk.start == 0 and request.params.prompt_logprobs_start == 0:
            found.append(TokenLogprob(request.ids[0], None, []))
        first = max(chunk.start, request.params.prompt_logprobs_start - 1)
        last = min(chunk.start + chunk.num_new, request.num_prompt - 1)
        out = []
        for begin in range(first, last, LOGIT_ROWS):
            end = min(begin + LOGIT_ROWS, last)
            logits = self._model.lm_head(hidden[begin - chunk.start : end - chunk.start])
            chosen = torch.tensor(request.ids[begin + 1 : end + 1], dtype=torch.int64, device=logits.device)
            num, named = end - begin, request.params.logprob_token_ids
            out.append(rank_logprobs(logits, chosen, [wanted] * num, list(range(num)), [named] * num))
        return out


def _waits(requests: list[Request]) -> bool:
    return any(request.undecided or request.sample.constraint is not None for request in requests)


def _decided(part: Part, launched: Launched) -> Part:
    """Take out the requests of which it is not known what they may say: they are silent."""
    kept = [i for i, request in enumerate(part.requests) if not request.undecided]
    if len(kept) == len(part.requests) or part.logits is None:
        return part
    left = [i for i, request in enumerate(part.requests) if request.undecided]
    broken = part.broken
    if broken is not None:
        launched.add_silent([part.requests[i] for i in left], broken[upload(left, torch.int64, broken.device)])
    index = upload(kept, torch.int64, part.rows.device)
    return Part(
        [part.requests[i] for i in kept],
        part.rows[index],
        part.logits[index],
        broken=None if broken is None else broken[index],
    )


def _join(parts: list[Part]) -> Part:
    requests = [request for part in parts for request in part.requests]
    logits = [part.logits for part in parts if part.logits is not None]
    broken = None
    if any(part.broken is not None for part in parts):
        no = [torch.zeros(len(part.requests), dtype=torch.bool, device=part.rows.device) for part in parts]
        broken = torch.cat([none if part.broken is None else part.broken for part, none in zip(parts, no, strict=True)])
    return Part(requests, torch.cat([part.rows for part in parts]), torch.cat(logits), broken=broken)


def _by_row(part: Part) -> list[TokenLogprob | None]:
    """Log probabilities of a part, one entry per request."""
    out: list[TokenLogprob | None] = [None] * len(part.requests)
    if part.logprobs is not None:
        for row, item in zip(part.logprobs.rows, part.logprobs.read(), strict=True):
            out[row] = item
    return out
