"""Chooses tokens from logits: penalties, bias, filters, seeded draws, log probabilities; vectorised over rows.

R rows (one per request), V vocabulary size. Order of operations, as in the OpenAI API and its peers: logits processors,
grammar mask, penalties and bias on the raw logits, minimum length, temperature, top-k, top-p, min-p, draw. Log
probabilities are those of the model itself, before any of this.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.contracts.device import is_on_host
from dovetail.contracts.kernels import Kernel
from dovetail.contracts.logits import LogitsProcessor, LogitsRows
from dovetail.messages.step import StepInput
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.loader import describe
from dovetail.runtime.device.device_state import RowParams, SampleRow
from dovetail.runtime.device.penalties import History, TokenCounts, penalize
from dovetail.runtime.device.upload import upload
from dovetail.runtime.sampling.masks import TokenMask
from dovetail.runtime.sampling.ranked import RankedLogprobs, rank_logprobs
from dovetail.runtime.step_kernels import PLAIN_STEP

# The logits processors of an engine: which rows ask for which, and how the sampler calls them.
#
# R rows that are sampled together, K of them that ask for a processor, V vocabulary size.

logger = logging.getLogger(__name__)


class Processors:
    """Those of one engine, by the names that requests call them."""

    def __init__(self, loaded: Mapping[str, LogitsProcessor]) -> None:
        """They are called in this order."""
        self._loaded = dict(loaded)
        self._rows: dict[int, list[str]] = {}

    @classmethod
    def make(cls, plugins: LoadedPlugins, vocab_size: int, num_rows: int, device: torch.device) -> Processors:
        """Make those of an engine's plan."""
        made: dict[str, LogitsProcessor] = {}
        for planned, plugin in plugins.candidates("logits_processor"):
            with torch.inference_mode(), plugins.watched(planned):
                made[planned.name] = plugin(vocab_size, num_rows, device)
            if not plugin.capturable:
                text = "%s reads tensors on the host: steps with requests that ask for it wait for the device."
                logger.info(text, describe(planned))
        return cls(made)

    def apply_step(self, step: StepInput) -> None:
        """Take what a step says of rows: they are cleared, then taken again.

        What `admit` raises ends a request of this step. What `release` raises is not of it: that request has ended.
        """
        if not self._loaded:
            return
        for row in step.cleared.tolist():
            for name in self._rows.pop(row, ()):
                try:
                    self._loaded[name].release(row)
                except Exception:
                    logger.exception("The logits processor %s failed where a request left its row.", name)
        for admit in step.admit:
            if admit.params.processors:
                taken = self._rows[admit.row] = []
            for name, given in admit.params.processors.items():
                processor = self._loaded[name]
                processor.admit(admit.row, processor.Params(**given), admit.history, admit.num_prompt)
                taken.append(name)  # a row that was not taken is not given back

    def groups(self, rows: Sequence[SampleRow]) -> dict[str, list[int]]:
        """Return which of some rows ask for each processor; empty, and at no cost, where none is served."""
        found: dict[str, list[int]] = {}
        if not self._loaded:
            return found
        for i, row in enumerate(rows):
            for name in row.params.processors:
                found.setdefault(name, []).append(i)
        return {name: found[name] for name in self._loaded if name in found}

    def apply(self, raw: Tensor, groups: Mapping[str, list[int]], at: Tensor, positions: Tensor) -> Tensor:
        """Return a copy of logits `[R, V]`, changed for each processor's rows; device rows are `at` `[R]`."""
        out = raw.clone()
        for name, wanted in groups.items():
            index = upload(wanted, torch.int64, raw.device)
            chosen = out[index]
            self._loaded[name].apply(chosen, LogitsRows(at[index], positions[index]))
            out.index_copy_(0, index, chosen)
        return out

    def drawn(self, ids: Tensor, groups: Mapping[str, list[int]], at: Tensor, positions: Tensor) -> None:
        """Tell them of the tokens `[R]` that were drawn."""
        for name, wanted in groups.items():
            index = upload(wanted, torch.int64, ids.device)
            self._loaded[name].drawn(LogitsRows(at[index], positions[index]), ids[index])


class Masked(NamedTuple):
    """The masks of a step's rows, and `[R]` bool which of them allow only ends: a minimum length gives way to those."""

    tokens: TokenMask
    ends_only: Tensor | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class SampleBatch:
    """R rows that are sampled together.

    Attributes:
        rows: What the host knows of them.
        params: What the device knows of all rows.
        at: `[R]` int64, which of those they are.
        positions: `[R]` int64, the place of each row's next token among those that it generates.
        is_banning: Whether any of these is before its row's minimum length.
    """

    rows: list[SampleRow]
    params: RowParams
    at: Tensor
    positions: Tensor
    is_banning: bool


@dataclass(slots=True, eq=False)
class Sampled:
    """Outcome of a step. `ids` is `[R]` int64 on the device; `non_finite` rows had logits that are not finite."""

    ids: Tensor
    non_finite: Tensor
    logprobs: RankedLogprobs | None = None


def sample(
    logits: Tensor,
    batch: SampleBatch,
    counts: TokenCounts,
    masked: Masked | None = None,
    scratch: FloatScratch | None = None,
    processors: Processors | None = None,
    draw: Kernel = PLAIN_STEP.draw,
) -> Sampled:
    """Choose one token per row.

    Args:
        logits: `[R, V]`, any float dtype; not changed.
        batch: The rows.
        masked: What constrained rows may say.
        counts: Where all rows with penalties have their history; those that are new get one.
        scratch: Where the logits are widened; memory of their own if not given.
        processors: Those that rows may ask for.
        draw: Kernel of the operation.
    """
    rows = batch.rows
    asked = {} if processors is None else processors.groups(rows)
    raw = logits.float() if scratch is None else scratch.widen(logits)
    # Masks need no copy of logits that are a copy already, unless log probabilities are to come from them.
    in_place = masked is not None and raw is not logits and all(row.params.logprobs is None for row in rows)
    in_place = in_place and not asked
    adjusted = adjust(raw, batch, counts, masked, in_place=in_place)
    top, greedy = _best(raw)
    non_finite = ~torch.isfinite(top)
    if asked and processors is not None:
        processed = processors.apply(raw, asked, batch.at, batch.positions)
        non_finite |= ~(_best(processed)[0] < math.inf)  # NaN is not, either
        processed = adjust(processed, batch, counts, masked)
        # Where a processor leaves nothing to say, its step goes without it.
        adjusted = torch.where(_best(processed)[0][:, None] == -math.inf, adjusted, processed)
    if in_place and masked is not None:
        # A mask that allows nothing is the grammar's error.
        at = masked.tokens.rows
        non_finite[at] &= top[at] != -math.inf
    if adjusted is not raw:
        greedy = _best(adjusted)[1]
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    ids = greedy
    if drawn:
        index = upload(drawn, torch.int64, raw.device)
        params = batch.params.draw_params(batch.at[index], batch.positions[index])
        chosen = draw(adjusted[index], greedy[index], *params.tensors())
        ids = greedy.index_copy(0, index, chosen)
    count(ids, rows, counts)
    if asked and processors is not None:
        processors.drawn(ids, asked, batch.at, batch.positions)
    return Sampled(ids, non_finite, token_logprobs(raw, ids, rows))


class FloatScratch:
    """Float32 memory for the logits of one step on the CPU, where fresh pages cost many times the conversion."""

    def __init__(self) -> None:
        self._kept = torch.empty(0)

    def widen(self, logits: Tensor) -> Tensor:
        """Return float32 logits: a copy that the next call overwrites, or `logits` themselves if they are wide."""
        if logits.dtype == torch.float32 or not is_on_host(logits.device):
            return logits.float()
        if self._kept.numel() < logits.numel():
            self._kept = torch.empty(logits.numel())
        return self._kept[: logits.numel()].view(logits.shape).copy_(logits)


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value of each row, NaN above all, and its first place; by NumPy on the CPU, which is faster."""
    if not is_on_host(logits.device):
        return torch.max(logits, dim=-1)
    ids = logits.numpy().argmax(axis=-1)
    found = torch.from_numpy(ids)
    return logits.gather(1, found[:, None])[:, 0], found


def adjust(
    raw: Tensor, batch: SampleBatch, counts: TokenCounts, masked: Masked | None = None, *, in_place: bool = False
) -> Tensor:
    """Apply mask, penalties, bias and minimum length; returns `raw` itself if no row asks for any.

    With `in_place` the mask is applied to `raw`.
    """
    rows = batch.rows
    remember(rows, batch.at, batch.params, counts)
    out = raw
    if masked is not None:
        out = raw if in_place else raw.clone()
        masked.tokens.apply(out)
    if counted := _counted(rows):
        if out is raw:
            out = raw.clone()
        index = upload([i for i, _ in counted], torch.int64, raw.device)
        histories = [history for _, history in counted]
        out.index_copy_(0, index, penalize(out[index], histories, [rows[i].params for i, _ in counted]))
    bias = [(i, token, value) for i, row in enumerate(rows) for token, value in (row.params.logit_bias or {}).items()]
    if bias:
        if out is raw:
            out = raw.clone()
        lines, tokens, values = zip(*bias, strict=True)
        where = upload([*lines, *tokens], torch.int64, raw.device).view(2, -1)
        out.index_put_((where[0], where[1]), upload(values, torch.float32, raw.device), accumulate=True)
    if not batch.is_banning:
        return out
    return _ban(raw.clone() if out is raw else out, batch, None if masked is None else masked.ends_only)


def _ban(out: Tensor, batch: SampleBatch, ends_only: Tensor | None) -> Tensor:
    """Forbid the stop ids of rows that are before their minimum length, in place."""
    is_early = batch.positions < batch.params.min_tokens[batch.at]
    if ends_only is not None:
        is_early &= ~ends_only
    stops = batch.params.stop_ids[batch.at]
    added = torch.where(is_early[:, None] & (stops >= 0), -math.inf, 0.0).to(out.dtype)
    return out.scatter_add_(1, stops.clamp(min=0), added)


def remember(rows: list[SampleRow], at: Tensor, params: RowParams, counts: TokenCounts) -> None:
    """Give every row with penalties its history; `at` `[R]` are the device rows."""
    new: list[tuple[int, int]] = []
    for i, row in enumerate(rows):
        if row.history is None and row.params.is_penalized:
            row.history = counts.take(row.ids[: row.num_prompt], row.ids[row.num_prompt :])
            new.append((i, row.history.slot))
    if new:
        index, slots = upload([number for pair in new for number in pair], torch.int64, at.device).view(-1, 2).T
        params.slots.index_copy_(0, at[index], slots)


def _counted(rows: list[SampleRow]) -> list[tuple[int, History]]:
    """Rows whose tokens are counted, and where."""
    return [(i, row.history) for i, row in enumerate(rows) if row.history is not None]


def count(ids: Tensor, rows: list[SampleRow], counts: TokenCounts) -> None:
    """Note that each row got its token of `ids` `[R]`."""
    if counted := _counted(rows):
        chosen = ids if len(counted) == len(rows) else ids[upload([i for i, _ in counted], torch.int64, ids.device)]
        counts.add([history.slot for _, history in counted], chosen)


def token_logprobs(raw: Tensor, ids: Tensor, rows: list[SampleRow]) -> RankedLogprobs | None:
    """Log probabilities of the chosen tokens and of the most likely, for the rows that want them; None if none does."""
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return None
    num_top = [rows[i].params.logprobs or 0 for i in wanted]
    if len(wanted) < len(rows):
        index = upload(wanted, torch.int64, raw.device)
        raw, ids = raw[index], ids[index]
    return rank_logprobs(raw, ids, num_top, wanted, [rows[i].params.logprob_token_ids for i in wanted])
