"""Runs steps on a loaded model: forward pass, sampling, and reading the tokens back, each callable by itself.

A step is launched before the last one's tokens are known. Only requests with a grammar need them: their next mask
depends on the last token. So `launch` samples at once unless a request of the step has a constraint, or will have one
that is still being compiled; then `choose` does, after the caller has read the step before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.cache.pool import PagedKVPool
from dovetail.contracts.attention import AttentionBackend, Phase
from dovetail.contracts.model import CausalLM
from dovetail.engine.messages import TokenLogprob
from dovetail.engine.request import Chunk, Request, StepPlan
from dovetail.grammar.masks import MaskBuffer
from dovetail.runtime.batch import prepare
from dovetail.runtime.device_state import DeviceState
from dovetail.runtime.graphs import Choice, DecodeGraphs
from dovetail.runtime.penalties import TokenCounts
from dovetail.runtime.prefill_graphs import PrefillGraphs
from dovetail.runtime.prefill_sizes import Size
from dovetail.runtime.sampler import FloatScratch, Ranked, Sampled, count, is_plain, rank_logprobs, sample
from dovetail.runtime.step import Launched, Part
from dovetail.runtime.upload import upload

LOGIT_ROWS = 256
"""Most rows of prompt logits made at once; at a vocabulary of 152k they take 156 MB in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Tokens of a step: `sampled[i]` got `tokens[i]`, None where its logits were not finite, with `logprobs[i]`."""

    sampled: list[Request]
    tokens: list[int | None]
    logprobs: list[TokenLogprob | None]


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
        pool: PagedKVPool,
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
        part = _decided(waiting[0] if len(waiting) == 1 else _join(waiting))
        launched.parts = [other for other in launched.parts if other.logits is None]
        if part.requests:
            launched.parts.append(part)
            self._sample(part)
        launched.start_copy()

    def read(self, launched: Launched) -> StepResult:
        """Wait for a step's tokens. Log probabilities of prompts go to their requests."""
        tokens = launched.read_tokens()
        logprobs: list[TokenLogprob | None] = []
        for part in launched.parts:
            logprobs += _by_row(part)
        for request, ranked in launched.prompt_logprobs:
            if request.prompt_logprobs is not None:
                request.prompt_logprobs += ranked.read()
        return StepResult(sampled=launched.sampled, tokens=tokens, logprobs=logprobs)

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
        if ready.sampled:
            part = Part(ready.sampled, ready.sampled_rows, self._model.lm_head(hidden[ready.batch.last_tokens]))
            launched.parts.append(part)
            if not _waits(ready.sampled):
                self._sample(part)
        return launched

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
        if prefill is not None and size is not None and (part := self._prefill(plan.chunks, prefill, size)) is not None:
            launched.parts.append(part)
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

    def _prefill(self, chunks: list[Chunk], graphs: PrefillGraphs, size: Size) -> Part | None:
        """Replay a step's prefill chunks; None if no token follows any of them."""
        chunks = sorted(chunks, key=lambda chunk: not chunk.samples)  # those that get a token stand side by side
        done = graphs.run(chunks, size)
        requests = [chunk.request for chunk in chunks if chunk.samples]
        if not requests:
            return None
        num, rows = len(requests), [request.sample for request in requests]
        part = Part(requests, done.rows[:num])
        is_greedy = all(is_plain(row) and row.params.temperature == 0 for row in rows)
        if is_greedy and not any(request.undecided for request in requests):
            count(done.ids[:num], rows)
            part.choose(Sampled(done.ids[:num], done.broken[:num]))
            return part
        return self._later(part, done.logits[:num])

    def _later(self, part: Part, logits: Tensor) -> Part:
        """Sample a part of a graph outside it: at once, or when its constraints are known."""
        part.logits = logits
        if _waits(part.requests):
            # The next graph of this step may overwrite its tensors.
            part.rows, part.logits = part.rows.clone(), logits.clone()
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
            out.append(rank_logprobs(logits, chosen, [wanted] * (end - begin), list(range(end - begin))))
        return out


def _waits(requests: list[Request]) -> bool:
    return any(request.undecided or request.sample.constraint is not None for request in requests)


def _decided(part: Part) -> Part:
    """Take out the requests of which it is not known what they may say."""
    kept = [i for i, request in enumerate(part.requests) if not request.undecided]
    if len(kept) == len(part.requests) or part.logits is None:
        return part
    index = upload(kept, torch.int64, part.rows.device)
    return Part([part.requests[i] for i in kept], part.rows[index], part.logits[index])


def _join(parts: list[Part]) -> Part:
    requests = [request for part in parts for request in part.requests]
    logits = [part.logits for part in parts if part.logits is not None]
    return Part(requests, torch.cat([part.rows for part in parts]), torch.cat(logits))


def _by_row(part: Part) -> list[TokenLogprob | None]:
    """Log probabilities of a part, one entry per request."""
    out: list[TokenLogprob | None] = [None] * len(part.requests)
    if part.logprobs is not None:
        for row, item in zip(part.logprobs.rows, part.logprobs.read(), strict=True):
            out[row] = item
    return out
