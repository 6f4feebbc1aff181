"""What the device knows of running requests: one stable row each, changed by differences only.

A request keeps its row from admission until it is cleared. The next token is written where the next step reads it, so
that a step can be launched before the host knows the last one's tokens: eagerly `Stepper._sample` writes it through
`DeviceState.set_next`, in a graph its last kernel does. What a step changes is sent before it is computed, in one copy
however many rows it touches. S device rows, one for each request, and behind them spare ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dovetail.cache.pool import StateCache
from dovetail.contracts.kernels import Kernel
from dovetail.contracts.seeds import signed64
from dovetail.messages import SamplerParams
from dovetail.messages.step import Admit, Ints, StepInput, no_ints
from dovetail.runtime.device.penalties import History
from dovetail.runtime.device.row_images import RowImages
from dovetail.runtime.device.upload import to_device, upload
from dovetail.runtime.memory.plan import NUM_PADDING_ROWS
from dovetail.runtime.step_kernels import PLAIN_STEP
from dovetail.sdk.rows import FLOATS, MAX_BIAS, MAX_STOPS, MAX_TOP, NOTHING, NUMBERS, DrawParams, RowTable

# How the tokens of each device row are drawn: sent once, with the request's admission, and read by row from then on.
#
# S device rows, W most stop ids of a row.

NO_STOP = -1
"""Pads the stop ids of a row."""


@dataclass(slots=True, eq=False)
class SampleRow:
    """What the host has to know of a row to sample it. `ids` are those so far, prompt first, if they are counted."""

    params: SamplerParams
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
        self.rows[admit.row] = SampleRow(admit.params, admit.num_prompt, admit.stop_ids, admit.history)
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


Longs = npt.NDArray[np.int64]
Places = npt.NDArray[np.integer]
NO_LONGS: Longs = np.empty(0, dtype=np.int64)


def pack(places: Longs, pages: Ints, cleared: Sequence[Ints], admits: Sequence[Admit]) -> Longs:
    """Pack what a step changes of the device rows, to be sent and written at once.

    E page table entries at `places` `[E]`, C rows that are cleared, A requests that take rows.

    Returns:
        `[2 E + C + A (1 + F + N)]` places in the page tables and their pages; rows that are cleared; rows that are
        taken, and by name the bits of their float32 `FLOATS` and their `NUMBERS`.
    """
    parts: list[npt.NDArray[np.integer]] = [places, pages, *cleared]
    if admits:
        params = [admit.params for admit in admits]
        floats = np.array([[getattr(p, name) for p in params] for name in FLOATS])
        # 0 where nothing is banned: the row still has the stop ids of whoever had it.
        least = [admit.params.min_tokens if admit.stop_ids else 0 for admit in admits]
        numbers = [
            [p.top_k for p in params],
            [signed64(a.seed) for a in admits],
            [a.num_prompt for a in admits],
            least,
            [NOTHING] * len(admits),  # until its tokens are counted
            [NOTHING if p.logprobs is None else p.logprobs for p in params],
            [len(p.logit_bias) if len(p.logit_bias) <= MAX_BIAS else 0 for p in params],
        ]
        rows = np.array([admit.row for admit in admits])
        parts += [rows, floats.astype(np.float32).view(np.int32).ravel(), np.array(numbers).ravel()]
    return np.concatenate(parts, dtype=np.int64)


class DeviceState:
    """Rows of running requests.

    Attributes:
        page_tables: For each cache group that has pages `[S, max_pages]` int32, page ids; 0 (the null page) past a
            request's pages.
        page_table: The first of them.
        next_ids: `[S]` int64, the token that the row's next decode step reads.
        seq_lens: `[S]` int64, tokens of the row whose keys and values are in its pages.
        pages: `[G, S, max_pages]` the page tables on the host.
        lens: `[S]` int64 on the host, `seq_lens` once the steps that were launched are done.
        seconds: `[S]` int64 on the host, where the second of two texts begins; 0 where there is one.
        padding_row: The first row that no request holds.
        params: How the tokens of the rows are drawn.
        states: Of recurrent layers, by row; None where the model has none.
        images: Of requests, by row; None where the model reads text only.
    """

    def __init__(
        self,
        num_rows: int,
        max_pages: int,
        device: torch.device,
        num_groups: int = 1,
        states: StateCache | None = None,
        write_changes: Kernel = PLAIN_STEP.write_changes,
    ) -> None:
        self.device, self._write_changes = device, write_changes
        self.padding_row = num_rows
        total = num_rows + NUM_PADDING_ROWS
        self._tables = torch.zeros(num_groups, total, max_pages, dtype=torch.int32, device=device)
        self.page_tables = list(self._tables.unbind())
        self.page_table = self.page_tables[0]
        self.next_ids, self.seq_lens = torch.zeros(2, total, dtype=torch.int64, device=device).unbind()
        self.pages = np.zeros((num_groups, total, max_pages), dtype=np.int32)
        self.lens, self.seconds = np.zeros((2, total), dtype=np.int64)
        self.params = RowParams(total, device)
        self._cleared: list[Ints] = []
        self._entries: list[Longs] = []
        self.states = states
        self.images: RowImages | None = None
        self._loads: list[Ints] = []

    def apply(self, step: StepInput) -> None:
        """Take what a step says of rows, on the host; `flush` sends it. Rows are cleared, then taken again."""
        if step.cleared.size:
            self._forget(step.cleared)
        for admit in step.admit:
            self.params.admit(admit)
            self.seconds[admit.row] = admit.second
        if step.tables.size:
            groups, rows, columns, pages = step.tables
            self.pages[groups, rows, columns] = pages
            self._entries.append(self._flat(groups, rows, columns))
        if step.loads.size:
            self._loads.append(step.loads)

    def _forget(self, rows: Ints) -> None:
        """Empty rows: only entries that hold a page are sent."""
        groups, at, columns = np.nonzero(self.pages[:, rows])
        self._entries.append(self._flat(groups, rows[at], columns))
        self._cleared.append(rows)
        self.pages[:, rows] = 0
        self.lens[rows] = 0
        self.params.clear(rows.tolist())

    def _flat(self, groups: Places, rows: Places, columns: Places) -> Longs:
        """Place of entries in the tables of all groups together."""
        _, num_rows, width = self.pages.shape
        places: Longs = (groups.astype(np.int64) * num_rows + rows) * width + columns
        return places

    def flush(self) -> None:
        """Send what has changed to the device.

        If that fails, the step does, and its requests begin again. What the host knows of rows is sent with the next
        step then, as a row may have been left by somebody else. States are loaded for requests of this step alone:
        those of a step that failed never come back.
        """
        loads, self._loads = self._loads, []
        admits = self.params.unsent()
        if self._entries or self._cleared or admits:
            # An entry that has changed twice is sent twice, and as what it is by now.
            places = np.concatenate(self._entries) if self._entries else NO_LONGS
            packed = pack(places, self.pages.reshape(-1)[places], self._cleared, admits)
            sent = to_device(torch.from_numpy(packed), self.device)
            self._write_changes(
                sent, self._tables, self.next_ids, self.seq_lens, self.params.floats, self.params.numbers,
                len(places), sum(map(len, self._cleared)), len(admits),
            )  # fmt: skip
            self._entries, self._cleared = [], []
            self.params.sent()
        for groups, copies, rows in loads:
            if self.states is None:
                raise ValueError("the step loads states, and the model has none")
            for group in np.unique(groups).tolist():
                mine = groups == group
                self.states.load(group, copies[mine].tolist(), rows[mine].tolist())

    def positions(self, rows: Tensor) -> Tensor:
        """Return the place of the next token of rows `[R]` among those that they generate: `[R]` int64."""
        return self.seq_lens[rows] - self.params.num_prompt[rows]

    def clear_padding(self) -> None:
        """Empty the spare rows, which steps write like any other; graphs do so themselves."""
        self.lens[self.padding_row :] = 0
        self.next_ids[self.padding_row :].zero_()
        self.seq_lens[self.padding_row :].zero_()

    def set_next(self, rows: Tensor, ids: Tensor) -> None:
        """Store sampled tokens `ids` `[R]` for rows `[R]`."""
        self.next_ids.index_copy_(0, rows, ids)
