"""Which request has which device row, and what the devices have to be told of rows and pages before the next step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.messages.step import Ints, no_ints

NO_PAGES, NO_ENTRIES = np.empty((2, 0), dtype=np.int32), np.empty((4, 0), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class RowChanges:
    """As in `StepInput`."""

    zeroed: Ints
    cleared: Ints
    tables: Ints
    loads: Ints
    saves: Ints


UNCHANGED = RowChanges(NO_PAGES, no_ints(), NO_ENTRIES, no_ints(), no_ints())


class DeviceRows:
    """The host's side of the device rows. A request keeps its row from admission to release."""

    def __init__(self, num_rows: int) -> None:
        self.free = list(range(num_rows - 1, -1, -1))
        """Rows that no request holds."""
        self._cleared: list[int] = []
        self._pages: dict[int, dict[tuple[int, int], int]] = {}
        self.to_zero: list[tuple[int, int]] = []
        """Pages that are zeroed before the next step: group and page."""
        self._loads: dict[tuple[int, int], int] = {}  # of a group's row, so that each is loaded once
        self._saves: list[tuple[int, int, int, int]] = []

    def take_row(self) -> int:
        """Give a request a row; its page table is clear in the next step."""
        return self.free.pop()

    def release_row(self, row: int) -> None:
        """Take a row back."""
        self._pages.pop(row, None)
        self._loads = {place: copy for place, copy in self._loads.items() if place[1] != row}
        self._saves = [save for save in self._saves if save[1] != row]
        self._cleared.append(row)
        self.free.append(row)

    def set_pages(self, row: int, start: int, pages: list[int], group: int = 0) -> None:
        """Write a group's page ids at columns `start …` of a row."""
        if pages:
            changed = self._pages.setdefault(row, {})
            changed.update(((group, column), page) for column, page in enumerate(pages, start))

    def zero_pages(self, group: int, pages: list[int]) -> None:
        """Have a group's pages zeroed whose contents may not be finite, before anyone else reads them."""
        self.to_zero += ((group, page) for page in pages)

    def load(self, row: int, copy: int, group: int) -> None:
        """Begin with a copy of a recurrent group's state, 0 for zeros."""
        self._loads[group, row] = copy

    def save(self, row: int, length: int, copy: int, group: int) -> None:
        """Have the state copied as it is behind the row's first `length` tokens, which the next step computes."""
        self._saves.append((group, row, length, copy))

    def drain(self) -> RowChanges:
        """Return what has changed since the last call: cleared rows first, as some have been taken again."""
        if not (self.to_zero or self._cleared or self._pages or self._loads or self._saves):
            return UNCHANGED
        entries = [(g, row, at, page) for row, own in self._pages.items() for (g, at), page in own.items()]
        tables = np.array(entries, dtype=np.int32).T if entries else NO_ENTRIES
        zeroed = np.array(self.to_zero, dtype=np.int32).T if self.to_zero else NO_PAGES
        begun = [(group, copy, row) for (group, row), copy in self._loads.items()]
        loads, saves = (np.array(own, dtype=np.int32).T if own else no_ints() for own in (begun, self._saves))
        changes = RowChanges(zeroed, np.array(self._cleared, np.int32), tables, loads, saves)
        self.to_zero, self._cleared, self._pages, self._loads, self._saves = [], [], {}, {}, []
        return changes
