"""Chooses tokens from logits: penalties, bias, filters, seeded draws, log probabilities; vectorised over rows.

R rows (one per request), V vocabulary size. Order of operations, as in the OpenAI API and its peers: grammar mask,
penalties and bias on the raw logits, minimum length, temperature, top-k, top-p, min-p, draw. Log probabilities are
those of the model itself, before any of this.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dovetail.engine.messages import SamplingParams, TokenLogprob, TopLogprob
from dovetail.grammar.constraint import Constraint
from dovetail.grammar.masks import MaskBuffer, TokenMask
from dovetail.runtime import draw as draws
from dovetail.runtime.draw import DrawParams, draw_any, draw_filtered, is_filtered, scaled
from dovetail.runtime.seeds import row_key
from dovetail.runtime.upload import upload


@dataclass(slots=True, eq=False)
class SampleRow:
    """One request's state as the sampler needs it.

    `counts` holds how often each token was generated, `prompt_seen` which tokens the prompt has; both `[V]` on the
    device, made on first use by requests with penalties and kept up to date here.
    """

    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    prompt_ids: list[int] = field(default_factory=list)
    num_output: int = 0
    counts: Tensor | None = None
    prompt_seen: Tensor | None = None
    constraint: Constraint | None = None
    """What it may say next; None for anything."""

    @property
    def penalized(self) -> bool:
        """Whether any penalty is on."""
        p = self.params
        return p.frequency_penalty != 0 or p.presence_penalty != 0 or p.repetition_penalty != 1


@dataclass(slots=True, eq=False)
class Ranked:
    """Log probabilities on the device, before anyone waits for them.

    Attributes:
        rows: Which sampled rows asked for them.
        nums: Rivals that each of these wants.
        chosen: `[N]` int64, the tokens in question.
        picked: `[N]` float32, their log probabilities.
        values: `[N, W]` float32, those of the W most likely tokens, best first.
        rivals: `[N, W]` int64, these tokens.
    """

    rows: list[int]
    nums: list[int]
    chosen: Tensor
    picked: Tensor
    values: Tensor
    rivals: Tensor

    def read(self) -> list[TokenLogprob]:
        """Wait for the device; one entry per entry of `rows`."""
        chosen, picked = self.chosen.tolist(), self.picked.tolist()
        values, rivals = self.values.tolist(), self.rivals.tolist()
        return [
            TokenLogprob(token, logprob, [TopLogprob(t, v) for t, v in zip(top[:num], best[:num], strict=True)])
            for token, logprob, num, top, best in zip(chosen, picked, self.nums, rivals, values, strict=True)
        ]


@dataclass(slots=True, eq=False)
class Sampled:
    """Outcome of a step. `ids` is `[R]` int64 on the device; `broken` rows had logits that are not finite."""

    ids: Tensor
    broken: Tensor
    logprobs: Ranked | None = None


def is_plain(row: SampleRow) -> bool:
    """Whether the row's next token comes from the raw logits by temperature and filters alone."""
    p = row.params
    banning = row.num_output < p.min_tokens and row.stop_ids
    return row.constraint is None and not (row.penalized or p.logit_bias or banning or p.logprobs is not None)


def sample(logits: Tensor, rows: list[SampleRow], masks: MaskBuffer | None = None) -> Sampled:
    """Choose one token per row.

    Args:
        logits: `[R, V]`, any float dtype; not changed.
        rows: One entry per row.
        masks: Where the masks of constrained rows are filled, while the device still computes `logits`.
    """
    mask = fill_masks(rows, masks)
    raw = logits.float()
    top, greedy = raw.max(dim=-1)
    broken = ~torch.isfinite(top)
    adjusted = adjust(raw, rows, mask)
    if adjusted is not raw:
        greedy = adjusted.argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    ids = greedy
    if drawn:
        index = upload(drawn, torch.int64, raw.device)
        ids = greedy.index_copy(0, index, draw(adjusted[index], [rows[i] for i in drawn]))
    count(ids, rows)
    return Sampled(ids, broken, token_logprobs(raw, ids, rows))


def fill_masks(rows: list[SampleRow], masks: MaskBuffer | None) -> TokenMask | None:
    """Fill the step's masks on the host; None where no row is constrained."""
    if masks is None:
        return None
    wants = [row.constraint is not None and row.num_output < row.params.min_tokens for row in rows]
    return masks.fill([row.constraint for row in rows], wants)


def adjust(raw: Tensor, rows: list[SampleRow], mask: TokenMask | None = None) -> Tensor:
    """Apply mask, penalties, bias and minimum length; returns `raw` itself if no row asks for any."""
    out = raw
    only_ends: frozenset[int] = frozenset()
    if mask is not None:
        out = raw.clone()
        mask.apply(out)
        only_ends = mask.only_ends
    for i, row in enumerate(rows):
        p = row.params
        bans = row.num_output < p.min_tokens and row.stop_ids and i not in only_ends
        if not (row.penalized or p.logit_bias or bans):
            continue
        if out is raw:
            out = raw.clone()
        if row.penalized:
            _penalize(out[i], row)
        if p.logit_bias:
            where = upload(list(p.logit_bias), torch.int64, raw.device)
            out[i, where] += upload(list(p.logit_bias.values()), torch.float32, raw.device)
        if bans:
            out[i].index_fill_(0, upload(row.stop_ids, torch.int64, raw.device), float("-inf"))
    return out


def _penalize(logits: Tensor, row: SampleRow) -> None:
    """Frequency and presence over the output; repetition (arXiv:1909.05858) over prompt and output. In place, `[V]`."""
    p = row.params
    if row.counts is None or row.prompt_seen is None:
        row.counts = torch.zeros(logits.shape[-1], dtype=torch.float32, device=logits.device)
        row.prompt_seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        row.prompt_seen[upload(row.prompt_ids, torch.int64, logits.device)] = True
    if p.repetition_penalty != 1:
        seen = row.prompt_seen | (row.counts > 0)
        scaled = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
        torch.where(seen, scaled, logits, out=logits)
    logits -= p.frequency_penalty * row.counts + p.presence_penalty * (row.counts > 0)


def count(ids: Tensor, rows: list[SampleRow]) -> None:
    """Note that each row got its token of `ids` `[R]`."""
    for i, row in enumerate(rows):
        row.num_output += 1
        if row.counts is not None:
            row.counts.index_add_(0, ids[i : i + 1], torch.ones_like(row.counts[:1]))


def draw(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """Draw one token per row, all with temperature above 0; `[R, V]` to `[R]` int64."""
    params = DrawParams.of(
        [row.params for row in rows], [row_key(row.seed, row.num_output) for row in rows], logits.device
    )
    scores = scaled(logits, params.temperature)
    if not any(is_filtered(row.params) for row in rows):
        return draw_any(scores, params)
    width = min(draws.CANDIDATES, logits.shape[-1])
    found, enough = draw_filtered(scores, params, width)
    plain = [not is_filtered(row.params) for row in rows]
    if any(plain):
        mask = upload(plain, torch.bool, logits.device)
        found, enough = torch.where(mask, draw_any(scores, params), found), enough | mask
    if width < logits.shape[-1] and not enough.all():
        again = torch.nonzero(~enough)[:, 0]
        subset = params.rows(again)
        found = found.index_copy(0, again, draw_filtered(scores[again], subset, logits.shape[-1])[0])
    return found


def token_logprobs(raw: Tensor, ids: Tensor, rows: list[SampleRow]) -> Ranked | None:
    """Log probabilities of the chosen tokens and their rivals, for the rows that want them; None if none does."""
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return None
    nums = [rows[i].params.logprobs or 0 for i in wanted]
    if len(wanted) < len(rows):
        index = upload(wanted, torch.int64, raw.device)
        raw, ids = raw[index], ids[index]
    return rank_logprobs(raw, ids, nums, wanted)


def rank_logprobs(logits: Tensor, chosen: Tensor, nums: list[int], rows: list[int]) -> Ranked:
    """Log probability of `chosen[i]` and the `nums[i]` most likely tokens in row i of `[N, V]` logits."""
    logprobs = logits.float().log_softmax(dim=-1)
    picked = logprobs.gather(1, chosen[:, None])[:, 0]
    values, rivals = logprobs.topk(min(max(nums, default=0), logits.shape[-1]), dim=-1)
    return Ranked(rows, nums, chosen.clone(), picked, values, rivals)
