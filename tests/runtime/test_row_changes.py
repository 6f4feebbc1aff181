"""What a step changes of rows arrives as it was said, by torch and by the kernel (in Triton's interpreter here)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.contracts.seeds import signed64
from dovetail.messages import SamplerParams
from dovetail.messages.step import Admit, Ints, StepInput, no_ints
from dovetail.runtime.device import device_state
from dovetail.runtime.device.device_state import DeviceState
from dovetail.sdk import step as step_ops
from dovetail_backends.kernels.triton import row_changes

CPU = torch.device("cpu")
NUM_ROWS, WIDTH, GROUPS = 300, 9, 2
"""More rows and entries than a program of the kernel takes."""
WRITERS = [step_ops.write_changes, row_changes.write_changes]


def step(cleared: list[int], admit: tuple[Admit, ...], tables: list[tuple[int, int, int, int]]) -> StepInput:
    """A step that computes nothing."""
    entries = np.array(tables, dtype=np.int32).T if tables else np.empty((4, 0), dtype=np.int32)
    nothing: dict[str, Any] = dict.fromkeys(("rows", "start", "num_new", "task", "ids"), no_ints())
    return StepInput(
        step=1, decode_graph=None, prefill_graph=None, zeroed=np.empty((2, 0), np.int32), waits=np.zeros(0, np.bool_),
        cleared=np.array(cleared, np.int32), admit=admit, tables=entries, **nothing,
    )  # fmt: skip


def admit(row: int, rng: random.Random) -> Admit:
    """A request of random parameters."""
    params = SamplerParams(
        max_tokens=5, temperature=rng.random(), top_p=rng.uniform(0.1, 1), min_p=rng.random(), top_k=rng.randint(1, 99),
        min_tokens=rng.randint(0, 4),
    )  # fmt: skip
    return Admit(row, rng.getrandbits(64), rng.randint(1, 10**6), params, stop_ids=(3, 5) if rng.random() < 0.5 else ())


def same_as_host(state: DeviceState, held: dict[int, Admit]) -> None:
    """The device's page tables are the host's; each row that was taken has its parameters."""
    assert np.array_equal(np.stack([table.numpy() for table in state.page_tables]), state.pages)
    params, rows = state.params, torch.tensor(sorted(held))
    found = params.draw_params(rows, torch.zeros(len(rows), dtype=torch.int64))
    admits = [held[row] for row in rows.tolist()]
    for name in ("temperature", "top_p", "min_p"):
        assert torch.equal(getattr(found, name), torch.tensor([getattr(a.params, name) for a in admits])), name
    assert found.top_k.tolist() == [a.params.top_k for a in admits]
    assert found.seeds.tolist() == [signed64(a.seed) for a in admits]
    assert params.num_prompt[rows].tolist() == [a.num_prompt for a in admits]
    assert params.min_tokens[rows].tolist() == [a.params.min_tokens if a.stop_ids else 0 for a in admits]


@pytest.mark.parametrize("writer", WRITERS)
def test_the_device_knows_what_the_host_does(writer: Callable[..., None]) -> None:
    """Rows leave, are taken in the same step, grow, and two steps may come before what they say is sent."""
    rng = random.Random(1)
    state = DeviceState(NUM_ROWS, WIDTH, CPU, GROUPS, write_changes=writer)
    held: dict[int, Admit] = {}
    gone: set[int] = set()
    for turn in range(12):
        most = (3, NUM_ROWS)[turn % 3 == 0]
        leaving = rng.sample(sorted(held), min(len(held), rng.randint(0, most)))
        gone.update(leaving)
        for row in leaving:
            del held[row]
        free = [row for row in range(NUM_ROWS) if row not in held]
        taken = [admit(row, rng) for row in rng.sample(free, rng.randint(0, min(len(free), most)))]
        held |= {a.row: a for a in taken}
        places = {(g, row, c) for row in held for g in range(GROUPS) for c in range(WIDTH) if rng.random() < 0.3}
        state.apply(step(leaving, tuple(taken), [(*at, rng.randint(0, 10**5)) for at in sorted(places)]))
        if turn % 4 == 1:
            continue
        state.seq_lens[:] = state.next_ids[:] = 7
        state.flush()
        same_as_host(state, held)
        want = [0 if row in gone else 7 for row in range(NUM_ROWS)]
        assert state.seq_lens[:NUM_ROWS].tolist() == want == state.next_ids[:NUM_ROWS].tolist()
        gone.clear()


def test_nothing_is_sent_for_a_step_that_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step within its pages costs no copy."""
    sent: list[Ints] = []
    monkeypatch.setattr(device_state, "to_device", lambda tensor, device: sent.append(tensor.numpy()) or tensor)
    state = DeviceState(4, 4, CPU)
    state.apply(step([], (), [(0, 1, 0, 9)]))
    state.flush()
    state.apply(step([], (), []))
    state.flush()
    assert [array.tolist() for array in sent] == [[4, 9]]


def test_entries_that_held_no_page_are_not_sent_when_their_row_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row of a long context costs to clear is what it used of it."""
    state = DeviceState(4, 8192, CPU)
    state.apply(step([], (), [(0, 2, 0, 9), (0, 2, 1, 8)]))
    state.flush()
    sent: list[int] = []
    monkeypatch.setattr(device_state, "to_device", lambda tensor, device: sent.append(tensor.numel()) or tensor)
    state.apply(step([2], (), []))
    state.flush()
    assert sent == [2 * 2 + 1]
    assert not state.page_table.any()
