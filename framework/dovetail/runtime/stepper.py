"""Runs steps on a loaded model: forward pass, sampling, and reading the tokens back, each callable by itself.

A step is launched before the last one's tokens are known. Only rows with a grammar need them: their next mask depends
on the last token. So `launch` samples at once unless a row of the step waits; then `choose` does, once the engine has
read the step before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dovetail.cache.pool import KVCache
from dovetail.contracts.attention import AttentionBackend, Phase
from dovetail.contracts.model import CausalLM, Classifier
from dovetail.messages import Pool
from dovetail.messages.step import POOL, DecodeGraph, PrefillGraph, StepInput, StepLate, StepOutput, Want
from dovetail.runtime.device.device_state import DeviceState, RowFacts
from dovetail.runtime.device.penalties import TokenCounts
from dovetail.runtime.device.upload import to_device, upload
from dovetail.runtime.graphs.batch import StepTokens, last_tokens, prepare, tokens_of
from dovetail.runtime.graphs.decode import Decoded, DecodeGraphs
from dovetail.runtime.graphs.prefill import PrefillGraphs
from dovetail.runtime.graphs.verify import VerifyGraphs, VerifyPlaces
from dovetail.runtime.sampling.draw_graphs import yield_to_min_tokens
from dovetail.runtime.sampling.masks import MaskBuffer
from dovetail.runtime.sampling.ranked import RankedLogprobs, rank_logprobs
from dovetail.runtime.sampling.sampler import FloatScratch, Masked, Processors, SampleBatch, Sampled, remember, sample
from dovetail.runtime.step import Drafts, InFlightStep, LayerProgress, StepPart
from dovetail.runtime.step_kernels import PLAIN_STEP, StepKernels
from dovetail.sdk.rows import MAX_TOP

# How many threads compute a step on a CPU.

MANY_TOKENS = 128
"""Tokens from which a step is worth all threads, however small its matrices."""


class StepThreads:
    """Sets torch's number of threads for each step; the threads themselves stay.

    Args:
        few: For steps of few tokens.
        many: For steps of `MANY_TOKENS` and more.
    """

    def __init__(self, few: int, many: int) -> None:
        self.few, self.many = few, many
        self.begin(0)

    def begin(self, num_tokens: int) -> None:
        """Set the number for a step of `num_tokens`."""
        wanted = self.many if num_tokens >= MANY_TOKENS else self.few
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)


# Pooled hidden states: what is told of a prompt in place of a token.
#
# A prompt may be computed in several chunks, so a mean is summed up in its device row, in float64: how a prompt is cut
# changes the last bits of a sum of float32 at most. What is pooled of a classifier are its scores. T tokens of a step,
# H hidden size.


class Pooler:
    """Knows which device rows gather hidden states, and what they have gathered."""

    def __init__(self, model: CausalLM) -> None:
        self._classify = model.classify if isinstance(model, Classifier) else None
        self._kinds: dict[int, Pool] = {}
        self._sums: dict[int, Tensor] = {}

    def apply(self, step: StepInput) -> None:
        """Take what a step says of rows: they are cleared, then taken again."""
        if self._kinds:
            for row in step.cleared.tolist():
                self._kinds.pop(row, None)
                self._sums.pop(row, None)
        for admit in step.admit:
            if admit.pool is not None:
                self._kinds[admit.row] = admit.pool

    def take(self, step: StepInput, hidden: Tensor) -> list[tuple[int, Tensor]]:
        """Gather the final hidden states `[T, H]` of a step, by row.

        Returns:
            For each row whose task is `POOL`, its place in the step and `[H]` float32; of a classifier, its scores.
        """
        if not self._kinds:
            return []
        ends, found = np.cumsum(step.num_new), []
        for at in range(step.num_decode, len(step.rows)):
            row, stop = int(step.rows[at]), int(ends[at])
            kind, first = self._kinds.get(row), stop - int(step.num_new[at])
            if kind == "mean":
                total = hidden[first:stop].sum(0, dtype=torch.float64)
                self._sums[row] = total if step.start[at] == 0 else self._sums[row] + total
            elif kind == "first" and step.start[at] == 0:
                self._sums[row] = hidden[first].clone()
            if step.task[at] == POOL:
                length = int(step.start[at] + step.num_new[at]) if kind == "mean" else 1
                found.append((at, hidden[stop - 1] if kind == "last" else self._sums[row] / length))
        if found and self._classify is not None:
            scores = self._classify(torch.stack([state for _, state in found]).to(hidden.dtype))
            found = [(at, own) for (at, _), own in zip(found, scores, strict=True)]
        return [(at, state.to(torch.float32)) for at, state in found]


LOGIT_ROWS = 256
"""Most rows of prompt logits made at once; at a vocabulary of 152k they take 156 MB in float32."""


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
        processors: Processors,
        progress: LayerProgress,
        step: StepKernels = PLAIN_STEP,
        threads: StepThreads | None = None,
    ) -> None:
        """Nothing is computed yet."""
        self.progress = progress
        self._model, self._attention, self._state, self._pool = model, attention, state, pool
        self._page_size, self._masks, self._graphs = pool.page_size, masks, graphs
        self._counts, self._scratch, self._pooler = counts, FloatScratch(), Pooler(model)
        self._processors, self._kernels, self._threads = processors, step, threads
        self._to_zero: dict[int, list[int]] = {}

    @torch.inference_mode()
    def launch(self, step: StepInput) -> InFlightStep:
        """Start a step. Its tokens are chosen too, unless a row waits."""
        self.take(step)
        if step.decode_graph is not None or step.prefill_graph is not None:
            launched = self._replay(step)
        else:
            num_tokens = int(step.num_new.sum())
            if self._threads is not None:
                self._threads.begin(num_tokens)
            with self.progress.recording(num_tokens) as layers:
                launched = self.run_eagerly(step)
            launched.layers = layers
        if all(part.logits is None for part in launched.parts):
            launched.start_copy(self._state.device)
        return launched

    def take(self, step: StepInput) -> None:
        """Take what a step says of rows and pages, and send it to the device.

        Pages that could not be zeroed are with the next step: nobody has read or written them before.
        """
        self._state.apply(step)
        for group, page in step.zeroed.T.tolist():
            self._to_zero.setdefault(group, []).append(page)
        self._pooler.apply(step)
        self._processors.apply_step(step)
        for group in list(self._to_zero):
            self._pool.zero_pages(group, self._to_zero[group])
            del self._to_zero[group]
        self._state.flush()
        if self._state.images is not None:
            self._state.images.apply(step)  # last: what it raises does not undo what is known of rows and pages

    @torch.inference_mode()
    def choose(self, launched: InFlightStep, late: StepLate) -> None:
        """Sample what waited for its masks. Rows that are to be skipped leave the step without a token."""
        self._masks.keep(late.keep)
        waiting = [part for part in launched.parts if part.logits is not None]
        if not waiting:
            return
        for part in waiting:
            if (done := part.decoded) is not None and not late.skip[part.at].any():
                mask_of, ends_only = late.mask_of[part.places], late.ends_only[part.places]
                lines = self._masks.lines_of(mask_of)
                lines = np.where(ends_only, yield_to_min_tokens(lines), lines)
                kept = part.logits if launched.step.prefill_graph is not None else None
                self._draw_adjusted(part, done, lines, int((mask_of >= 0).sum()), kept)
        if left := [part for part in waiting if part.logits is not None]:
            part = _without_skipped(left[0] if len(left) == 1 else _join(left, self._state), launched, late)
            launched.parts = [other for other in launched.parts if other.logits is None]
            if part.params:
                launched.parts.append(part)
                self._sample(part, launched.step, self._masked(part, late))
        launched.start_copy(self._state.device)

    def _masked(self, part: StepPart, late: StepLate) -> Masked | None:
        tokens = self._masks.mask_of(late.mask_of[part.places])
        if tokens is None:
            return None
        ends_only = late.ends_only[part.places]
        return Masked(tokens, to_device(torch.from_numpy(ends_only), part.rows.device) if ends_only.any() else None)

    def read(self, launched: InFlightStep) -> StepOutput:
        """Wait for what came of a step."""
        output, drafts = launched.read(), launched.step.num_drafts
        if drafts is not None:
            at = np.flatnonzero((drafts > 0) & (output.num > 0))
            self._state.lens[launched.step.rows[at]] += output.num[at] - 1
        return output

    @torch.inference_mode()
    def run_eagerly(self, step: StepInput) -> InFlightStep:
        """Start a step in one forward pass, without graphs; `launch` does where none are named."""
        ids, batch = prepare(step, self._state, self._attention, self._page_size)
        num = step.num_sampled
        self._attention.plan(batch, Phase.EAGER)
        self._attention.plan_in_graph(batch)
        hidden = self._model.forward(ids, batch)
        self._state.seq_lens.index_copy_(0, batch.rows, batch.seq_lens)
        launched = InFlightStep(step, [])
        for want in step.prompt_logprobs:
            launched.prompt_logprobs += [(want.at, found) for found in self._rank(want, step, hidden)]
        launched.pooled = self._pooler.take(step, hidden)
        non_finite = None
        if batch.num_decode < batch.num_requests:  # of a lone token, the logits tell
            non_finite = torch.zeros(batch.num_requests, dtype=torch.bool, device=hidden.device)
            self._kernels.check_finite(hidden, batch.q_starts, non_finite)
        if non_finite is not None and num < batch.num_requests:
            launched.add_tokenless(np.arange(num, batch.num_requests), non_finite[num:])
        if num:
            part, _ = self._part(step, 0, num, batch.rows[:num])
            part.non_finite = None if non_finite is None else non_finite[:num]
            if step.num_drafts is not None:
                self._spread(part, step, batch.positions[batch.last_tokens])
            launched.parts.append(part)
            self._later(part, self._model.lm_head(hidden[batch.last_tokens]), step)
        return launched

    def _part(self, step: StepInput, first: int, stop: int, rows: Tensor) -> tuple[StepPart, RowFacts]:
        """The rows `first … stop - 1` of a step, once it is noted on the host how long they get."""
        mine = step.rows if stop - first == len(step.rows) else step.rows[first:stop]
        facts = self._state.params.facts_of(mine)
        is_banning = facts.may_ban and any(
            self._state.lens[at] - row.num_prompt < row.params.min_tokens
            for row, at in zip(facts.rows, mine.tolist(), strict=True)
            if row.is_banning
        )
        at = np.arange(first, stop)
        return StepPart(at, at, rows, facts.rows, is_banning), facts

    def _spread(self, part: StepPart, step: StepInput, positions: Tensor) -> None:
        """Let a part of a step's last sampled rows have a place behind each of their drafts, too.

        `positions` `[P]` are those of the tokens before these places.
        """
        first, places = int(part.at[0]), step.places
        part.places = np.flatnonzero(places >= first)
        part.at = places[part.places]
        local = part.at - first
        index = to_device(torch.from_numpy(local), part.rows.device)
        part.rows, part.params = part.rows[index], [part.params[at] for at in local.tolist()]
        part.non_finite = None if part.non_finite is None else part.non_finite[index]
        part.positions = positions + 1 - self._state.params.num_prompt[part.rows]

    def _sample(self, part: StepPart, step: StepInput, masked: Masked | None = None) -> None:
        if part.logits is not None:
            positions = self._state.positions(part.rows) if part.positions is None else part.positions
            batch = SampleBatch(
                rows=part.params,
                params=self._state.params,
                at=part.rows,
                positions=positions,
                is_banning=part.is_banning,
            )
            sampled = sample(
                part.logits, batch, self._counts, masked, self._scratch, self._processors, self._kernels.draw
            )
            if part.positions is None:
                self._state.set_next(part.rows, sampled.ids)
            else:
                self._verify(part, step, sampled.ids)
            part.choose(sampled)

    def _verify(self, part: StepPart, step: StepInput, drawn: Tensor) -> None:
        """Go on behind the drafts that hold: keys and values behind them are written over."""
        drafts = Drafts.of(step, part.at, drawn.device)
        held, rows = drafts.num_held(drawn), part.rows[drafts.places[:, 0]]
        self._state.set_next(rows, drafts.last(drawn, held))
        self._state.seq_lens.index_add_(0, rows, held - drafts.num)

    def _replay(self, step: StepInput) -> InFlightStep:
        """A step of one or two graphs: the decode rows, then the prefill chunks."""
        graphs, launched = self._graphs, InFlightStep(step, [])
        if graphs is None or (step.prefill_graph is not None and graphs.prefill is None):
            raise ValueError("the step names a graph of a kind that is never captured here")
        if step.decode_graph is not None:
            launched.parts.append(self._decode(step, graphs.decode, step.decode_graph))
        if step.prefill_graph is not None and graphs.prefill is not None:
            self._prefill(launched, graphs.prefill, step.prefill_graph)
        return launched

    def _decode(self, step: StepInput, graphs: DecodeGraphs, key: DecodeGraph) -> StepPart:
        """Replay a decode step and draw in another graph; what that cannot do is sampled after it.

        That is: logits processors, and more biases, rivals or banned stop ids than stand on the device.
        """
        num = step.num_decode
        rows = step.rows if num == len(step.rows) else step.rows[:num]
        self._state.lens[rows] += 1
        done = graphs.run(rows, key)
        left = done.borrowed.read()
        part, facts = self._part(step, 0, num, done.captured.rows[:num])
        waits = step.waits[:num].any()
        if not facts.fits_graph or (part.is_banning and not facts.bans_in_graph):
            self._later(part, left.logits[:num], step)
        elif waits:
            part.logits, part.decoded = left.logits[:num], done
            if step.prefill_graph is not None:  # whose replay ends the loan
                part.logits, part.non_finite = part.logits.clone(), left.non_finite[:num].clone()
        elif part.is_banning or not facts.needs_no_adjustment:
            self._draw_adjusted(part, done, None, 0)
        else:
            ids = graphs.draw(done) if facts.is_drawn else left.ids
            part.choose(Sampled(ids[:num], left.non_finite[:num]))
        return part

    def _draw_adjusted(
        self,
        part: StepPart,
        done: Decoded,
        lines: npt.NDArray[np.int32] | None,
        num_sent: int,
        kept: Tensor | None = None,
    ) -> None:
        """Draw the rows of a decode graph in another one; the rest as `DecodeGraphs.draw_adjusted` has it."""
        graphs, num, rows = self._graphs, len(part.at), part.params
        if graphs is None:
            raise ValueError("a part of a graph that is not there")
        remember(rows, part.rows, self._state.params, self._counts)
        drawn = graphs.decode.draw_adjusted(done, lines, num_sent, kept)
        ranked = None
        if asked := [i for i, row in enumerate(rows) if row.params.logprobs is not None]:
            num_top = [min(rows[i].params.logprobs or 0, done.captured.vocab_size) for i in asked]
            ranked = RankedLogprobs(drawn.packed_logprobs, asked, asked, num_top, MAX_TOP, [()] * len(asked))
        non_finite = done.borrowed.read().non_finite[:num] if part.non_finite is None else part.non_finite
        part.choose(Sampled(drawn.ids[:num], non_finite, ranked))

    def _prefill(self, launched: InFlightStep, graphs: PrefillGraphs, key: PrefillGraph) -> None:
        """Replay a step's prefill chunks."""
        step = launched.step
        first, stop, end = step.num_decode, step.num_sampled, len(step.rows)
        rows, num = step.rows[first:], stop - first
        tokens = tokens_of(step, self._state, self._page_size, first)
        self._state.lens[rows] = tokens.lens if step.num_drafts is None else tokens.lens - step.num_drafts[first:]
        device_rows, done = graphs.run(tokens, rows, key)
        if stop < end:
            launched.add_tokenless(np.arange(stop, end), done.non_finite[num : end - first])
        if not num:
            return
        part, facts = self._part(step, first, stop, device_rows[:num])
        launched.parts.append(part)
        if step.num_drafts is not None:
            part.non_finite = done.non_finite[:num]
            self._verify_replayed(part, facts, step, graphs.verify, tokens)
            return
        is_greedy = facts.needs_no_adjustment and not facts.is_drawn
        if is_greedy and not part.is_banning and not step.waits[first:stop].any():
            part.choose(Sampled(done.ids[:num], done.non_finite[:num]))
        else:
            part.non_finite = done.non_finite[:num]
            self._later(part, done.logits[:num], step)

    def _verify_replayed(
        self, part: StepPart, facts: RowFacts, step: StepInput, verify: VerifyGraphs | None, tokens: StepTokens
    ) -> None:
        """Draw behind a prefill's graph at all places of a part, in another graph unless its rows ask for more."""
        if verify is None or verify.hidden is None:
            raise ValueError("the step has drafts, and its graphs are not made for any")
        first, device = step.num_decode, part.rows.device
        if facts.needs_no_adjustment and not part.is_banning and not step.waits[part.at].any():
            part.places = np.flatnonzero(step.places >= first)
            part.at, part.non_finite = step.places[part.places], None  # the graph knows
            part.choose(Sampled(*verify.run(VerifyPlaces.of(step, tokens, first), is_drawn=facts.is_drawn)))
            return
        last = last_tokens(step, tokens.starts, first)
        index, positions = (to_device(torch.from_numpy(ints), device) for ints in (last, tokens.positions[last]))
        self._spread(part, step, positions)
        self._later(part, self._model.lm_head(verify.hidden[index]), step)

    def _later(self, part: StepPart, logits: Tensor, step: StepInput) -> None:
        """Sample a part: at once, or when its masks are known."""
        part.logits = logits
        if not step.waits[part.at].any():
            self._sample(part, step)
        elif step.decode_graph is not None or step.prefill_graph is not None:
            # The next graph of this step may overwrite its tensors.
            part.rows, part.logits = part.rows.clone(), logits.clone()
            part.non_finite = None if part.non_finite is None else part.non_finite.clone()

    def _rank(self, want: Want, step: StepInput, hidden: Tensor) -> list[RankedLogprobs]:
        """Rank the successors of tokens of a chunk. The chunk's row is one of `step`, its states are in `hidden`."""
        first = int(step.num_new[: want.at].sum()) + want.first
        found = []
        for begin in range(0, len(want.ids), LOGIT_ROWS):
            ids = want.ids[begin : begin + LOGIT_ROWS]
            num = len(ids)
            logits = self._model.lm_head(hidden[first + begin : first + begin + num])
            chosen = torch.tensor(ids, dtype=torch.int64, device=logits.device)
            found.append(rank_logprobs(logits, chosen, [want.num_top] * num, list(range(num)), [want.named] * num))
            self.progress.count()
        return found


def _without_skipped(part: StepPart, launched: InFlightStep, late: StepLate) -> StepPart:
    """Take out the rows of which it is not known what they may say: they are silent."""
    skip = late.skip[part.at]
    if not skip.any() or part.logits is None:
        return part
    kept, left = np.flatnonzero(~skip), np.flatnonzero(skip)
    non_finite, device = part.non_finite, part.rows.device
    if non_finite is not None:
        launched.add_tokenless(part.at[left], non_finite[upload(left.tolist(), torch.int64, device)])
    index = upload(kept.tolist(), torch.int64, device)
    return StepPart(
        part.at[kept],
        part.places[kept],
        part.rows[index],
        [part.params[i] for i in kept],
        part.is_banning,
        part.logits[index],
        non_finite=None if non_finite is None else non_finite[index],
        positions=None if part.positions is None else part.positions[index],
    )


def _join(parts: list[StepPart], state: DeviceState) -> StepPart:
    """Put parts together; in a step with drafts, the places of those that have none are looked up."""
    non_finite = positions = None
    if any(part.non_finite is not None for part in parts):
        flags = ((part.rows.new_zeros(len(part.params), dtype=torch.bool), part.non_finite) for part in parts)
        non_finite = torch.cat([no if given is None else given for no, given in flags])
    if any(part.positions is not None for part in parts):
        places = ((state.positions(part.rows), part.positions) for part in parts)
        positions = torch.cat([here if given is None else given for here, given in places])
    return StepPart(
        np.concatenate([part.at for part in parts]),
        np.concatenate([part.places for part in parts]),
        torch.cat([part.rows for part in parts]),
        [row for part in parts for row in part.params],
        any(part.is_banning for part in parts),
        torch.cat([part.logits for part in parts if part.logits is not None]),
        non_finite=non_finite,
        positions=positions,
    )
