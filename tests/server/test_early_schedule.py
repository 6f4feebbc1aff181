"""Where beginnings of a prompt end: what a step costs beside its tokens decides, and no prompt pays for it."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from dovetail_server.serving.early import next_end

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from early_prefill import AGAIN_S, CHUNK, LENGTHS, MODELS, Load, Model, doubled, filled, none

SLOW, FAST = 140e3, 1e6
"""Tokens a second."""


@pytest.mark.parametrize("seed", range(20))
def test_a_costly_step_is_never_added(seed: int) -> None:
    """Whatever becomes known when: the prompt takes as many steps as it does at once."""
    rng = random.Random(seed)
    for _ in range(50):
        num, size = rng.randrange(1, 50_000), rng.choice((16, 1000, 8192))
        sent, known, steps = 0, 0, 0
        while (known := known + (new := rng.randrange(1, 9000))) < num:
            end = next_end(sent, known, num, new, 1.0, size, 1e9)
            assert end == 0 or max(sent + 1, 2 * sent) <= end <= known
            steps += -(-max(0, end - sent) // size)
            sent = max(sent, end)
        assert steps + -(-(num - sent) // size) == -(-num // size)


def test_all_that_is_known_goes_where_steps_cost_nothing() -> None:
    """As soon as it is twice as much."""
    ends = [next_end(2000, num, 60_000, 999, 0.1, CHUNK, 0.0) for num in (2000, 3999, 4000, 12_345)]
    assert ends == [0, 0, 4000, 12_345]


@pytest.mark.parametrize(
    ("known", "about", "end"),
    [
        (3450, 16_000, 0),  # waits for 4,358 more, with which one full step is left
        (7807, 16_000, 0),
        (7808, 16_000, 7808),
        (10_350, 16_000, 8192),
        (3450, 19_000, 3450),  # two full steps behind it
        (3450, 8000, 0),  # the prompt takes one step
        (9000, 60_000, 8192),
        (CHUNK, 60_000, CHUNK),
    ],
)
def test_a_step_that_costs_more_than_waiting_is_filled(known: int, about: int, end: int) -> None:
    """Or it has at least what leaves full steps behind it."""
    assert next_end(0, known, about, 3450, 1e-6 * known, CHUNK, 0.02) == end


def test_slow_tokenizers_do_not_wait() -> None:
    """What counts is the time of the tokens that a step lacks, which come as many at a time as the last ones."""
    assert next_end(0, 3450, 16_000, 1000, 4e-6 * 3450, CHUNK, 0.02) == 0  # 5,000
    assert next_end(0, 3450, 16_000, 1000, 4.1e-6 * 3450, CHUNK, 0.02) == 3450
    assert next_end(0, 3450, 16_000, 3450, 4e-6 * 3450, CHUNK, 0.02) == 3450  # 6,900


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("rate", [SLOW, 290e3, FAST])
def test_no_prompt_takes_longer_than_it_did(model: Model, rate: float) -> None:
    """Than when twice as many tokens were a beginning, or none was: by 2 % of it and a way to the engine at most."""
    for clients in (1, 8):
        for num in (*LENGTHS, 12_000, 20_000):
            now, before, never = (Load(model, num, clients, rate, rule).run() for rule in (filled, doubled, none))
            assert now.num_steps <= before.num_steps, (clients, num)
            assert now.seconds <= 1.02 * min(before.seconds, never.seconds) + AGAIN_S, (clients, num)
