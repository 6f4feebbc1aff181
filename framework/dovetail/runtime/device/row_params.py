"""How the tokens of each device row are drawn: sent once, with the request's admission, and read by row from then on.

S device rows, W most stop ids of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dovetail.messages import SamplerParams
from dovetail.messages.step import Admit, Ints, no_ints
from dovetail.runtime.device.devices import to_device, upload
from dovetail.runtime.device.penalties import History
from dovetail.sdk.rows import FLOATS, MAX_BIAS, MAX_STOPS, MAX_TOP, NOTHING, NUMBERS, DrawParams, RowTable

NO_STOP = -1
"""Pads the stop ids of a row."""


@dataclass(slots=True, eq=False)
class SampleRow:
    """What the host has to know of a row to sample it. `ids` are those so far, prompt first, if they are counted."""

    params: SamplerParams
    seed: int = 0
    num_prompt: int = 0
    stop_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    history: History | None = None
    """Made on first use, where tokens are counted."""

    @property
    def needs_no_adjustment(self) -> bool:
        """Whether its tokens come from the raw logits by temperature and filters, but for masks and stop ids."""
        p = self.params
        return not (p.looks_back or p.logit_bias or p.logprobs is not None)

    @property
    def fits_graph(self) -> bool:
        """Whether its tokens are drawn in a graph, with masks, penalties, biases and log probabilities."""
        p = self.params
        is_ranked = p.logprobs is None or (p.logprobs <= MAX_TOP and not p.logprob_token_ids)
        return is_ranked and not p.processors and len(p.logit_bias) <= MAX_BIAS

    @property
    def is_banning(self) -> bool:
        """Whether it may be that stop ids are banned."""
        return self.params.min_tokens > 0 and bool(self.stop_ids)

    def release(self) -> None:
        """Give back what it holds."""
        if self.history is not None:
            self.history.release()
            self.history = None


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What holds for some rows together.

    Attributes:
        rows: What the host knows of each.
        needs_no_adjustment: Their tokens come of raw logits by temperature and filters, masks and stop ids aside.
        is_drawn: Some of them are not greedy.
        may_ban: Some of them may have stop ids banned.
        fits_graph: All of them are drawn in a graph …
        bans_in_graph: … also before their minimum lengths.
    """

    rows: list[SampleRow]
    needs_no_adjustment: bool
    is_drawn: bool
    may_ban: bool
    fits_graph: bool
    bans_in_graph: bool


class RowParams:
    """Of every device row.

    Attributes:
        rows: `[S]` on the host.
        version: Changes whenever a row gets another request.
        floats: `[F, S]` float32 on the device, by `rows.FLOATS`.
        numbers: `[N, S]` int64 on the device, by `rows.NUMBERS`.
        num_prompt: `[S]` of these, tokens of the request's prompt.
        min_tokens: `[S]` of these, generated tokens before which no stop id may come.
        slots: `[S]` of these, where the row's tokens are counted, or `NOTHING`.
        num_top: `[S]` of these, rivals whose log probabilities are asked for, or `NOTHING`.
        stop_ids: `[S, W]` int64, padded with `NO_STOP`.
        stops: `[S, MAX_STOPS]`, the first of these; it stays where it is, as graphs read it.
        batch_invariant: A row's draw must not depend on how many rows there are. Then what is more than temperature
            and filters is sampled outside of graphs: there and here, it is computed by other instructions.
        bias_ids, bias: `[S, MAX_BIAS]` int32 and float32, what is added to which logits; `num_bias` of them count.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.rows = [SampleRow(SamplerParams(max_tokens=0, temperature=0.0)) for _ in range(num_rows)]
        self.version, self.batch_invariant = 0, False
        self._device = device
        self.floats = torch.zeros(len(FLOATS), num_rows, device=device)
        self.numbers = torch.zeros(len(NUMBERS), num_rows, dtype=torch.int64, device=device)
        self.num_prompt, self.min_tokens = self.numbers[2], self.numbers[3]
        self.slots, self.num_top, self.num_bias = self.numbers[4], self.numbers[5], self.numbers[6]
        self.slots.fill_(NOTHING)
        self.num_top.fill_(NOTHING)
        self.bias_ids = torch.zeros(num_rows, MAX_BIAS, dtype=torch.int32, device=device)
        self.bias = torch.zeros(num_rows, MAX_BIAS, device=device)
        self.stops = torch.full((num_rows, MAX_STOPS), NO_STOP, dtype=torch.int64, device=device)
        self.stop_ids = self.stops
        self._changed: dict[int, Admit] = {}
        self._facts = _facts([])
        self._facts_rows, self._facts_version = no_ints(), 0

    def clear(self, rows: list[int]) -> None:
        """Requests have left."""
        for row in rows:
            self.rows[row].release()
            self._changed.pop(row, None)

    def admit(self, admit: Admit) -> None:
        """A request takes a row."""
        self.rows[admit.row].release()
        self.rows[admit.row] = SampleRow(admit.params, admit.seed, admit.num_prompt, admit.stop_ids, admit.history)
        self.version += 1
        self._changed[admit.row] = admit

    def facts_of(self, rows: Ints) -> RowFacts:
        """Return what is known of device rows; at no cost for the array of the last call, if nothing has changed."""
        if rows is not self._facts_rows or self.version != self._facts_version:
            found = [self.rows[row] for row in rows.tolist()]
            self._facts = _facts(found, batch_invariant=self.batch_invariant)
            self._facts_rows, self._facts_version = rows, self.version
        return self._facts

    def unsent(self) -> list[Admit]:
        """Return who has taken a row since `sent`, to be written to the device; stop ids and biases are sent."""
        if not self._changed:
            return []
        admits = list(self._changed.values())
        banning = [admit for admit in admits if self.rows[admit.row].is_banning]
        if banning:
            self._set_stop_ids(banning)
        for admit in admits:
            if 0 < len(admit.params.logit_bias) <= MAX_BIAS:
                self._set_bias(admit.row, admit.params.logit_bias)
        return admits

    def sent(self) -> None:
        """Note that the device knows of everybody."""
        self._changed = {}

    def _set_bias(self, row: int, bias: Mapping[int, float]) -> None:
        self.bias_ids[row, : len(bias)] = upload(list(bias), torch.int32, self._device)
        self.bias[row, : len(bias)] = upload(list(bias.values()), torch.float32, self._device)

    def _set_stop_ids(self, admits: list[Admit]) -> None:
        width = max(len(admit.stop_ids) for admit in admits)
        if width > self.stop_ids.shape[1]:
            wider = self.stop_ids.new_full((len(self.rows), width), NO_STOP)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        ids = np.full((len(admits), self.stop_ids.shape[1]), NO_STOP, dtype=np.int64)
        for line, admit in zip(ids, admits, strict=True):
            line[: len(admit.stop_ids)] = admit.stop_ids
        rows = to_device(torch.tensor([admit.row for admit in admits]), self._device)
        sent = to_device(torch.from_numpy(ids), self._device)
        self.stop_ids.index_copy_(0, rows, sent)
        if self.stops is not self.stop_ids:
            self.stops.index_copy_(0, rows, sent[:, :MAX_STOPS])

    def draw_params(self, rows: Tensor, positions: Tensor) -> DrawParams:
        """Gather what draws for rows `[R]` take, whose next tokens have these `[R]` places."""
        return DrawParams.of_rows(rows, positions, self.floats, self.numbers)

    @property
    def table(self) -> RowTable:
        """What the device knows of all rows; it stays where it is."""
        return RowTable(self.floats, self.numbers, self.stops, self.bias_ids, self.bias)


def _facts(rows: list[SampleRow], *, batch_invariant: bool = False) -> RowFacts:
    needs_no_adjustment = all(row.needs_no_adjustment for row in rows)
    return RowFacts(
        rows,
        needs_no_adjustment=needs_no_adjustment,
        is_drawn=any(row.params.temperature > 0 for row in rows),
        may_ban=any(row.is_banning for row in rows),
        fits_graph=all(row.fits_graph for row in rows) and (needs_no_adjustment or not batch_invariant),
        bans_in_graph=all(len(row.stop_ids) <= MAX_STOPS for row in rows if row.is_banning),
    )
