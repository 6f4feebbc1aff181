"""The counter-based generator."""

from __future__ import annotations

import math

import torch

from dovetail.contracts.seeds import derive_seed, row_key, signed64
from dovetail.sdk.draws import exponentials, row_keys


def keys(*pairs: tuple[int, int]) -> torch.Tensor:
    """Row keys of (seed, position) pairs."""
    return torch.tensor([row_key(*pair) for pair in pairs], dtype=torch.int32)


def test_a_row_does_not_depend_on_its_batch() -> None:
    """The same seed and position give the same numbers, alone or beside others, for all tokens or some."""
    tokens = torch.arange(1000, dtype=torch.int32)
    alone = exponentials(keys((7, 3)), tokens)[0]
    beside = exponentials(keys((1, 1), (7, 3), (2, 9)), tokens)[1]
    assert torch.equal(alone, beside)
    some = exponentials(keys((7, 3)), tokens[None, [5, 999]])[0]
    assert torch.equal(some, alone[[5, 999]])


def test_known_values_stay_the_same() -> None:
    """A stored draw is reproduced: seeds mean the same in the next release."""
    assert row_key(42, 7) == (161846950, -1445808689)
    found = exponentials(keys((42, 7)), torch.tensor([0, 1, 151935], dtype=torch.int32))[0]
    assert [round(x, 5) for x in found.tolist()] == KNOWN


KNOWN = [1.96132, 0.19501, 0.73922]


def test_the_numbers_are_unit_exponentials() -> None:
    """Over 2 million draws, a Kolmogorov-Smirnov distance below the 0.1% critical value, and none is zero."""
    pairs = [(seed, position) for seed in range(20) for position in range(20)]
    values = exponentials(keys(*pairs), torch.arange(5000, dtype=torch.int32)).flatten().double().sort().values
    n = len(values)
    distance = (1 - torch.exp(-values) - torch.arange(1, n + 1) / n).abs().max().item()
    assert values[0] > 0
    assert distance < 1.95 / math.sqrt(n)


def test_neighbouring_positions_seeds_and_tokens_are_uncorrelated() -> None:
    """Correlation between shifted rows stays within four standard errors of zero."""
    tokens = torch.arange(100_000, dtype=torch.int32)
    rows = exponentials(keys((5, 0), (5, 1), (6, 0)), tokens).double()
    for a, b in [(rows[0], rows[1]), (rows[0], rows[2]), (rows[0, 1:], rows[0, :-1])]:
        correlation = torch.corrcoef(torch.stack((a, b)))[0, 1].item()
        assert abs(correlation) < 4 / math.sqrt(len(a))


def test_derived_seeds_differ_and_the_first_is_the_request_s_own() -> None:
    """Choice 0 keeps the seed; others get distinct 63-bit seeds."""
    seeds = [derive_seed(123, i) for i in range(128)]
    assert seeds[0] == 123
    assert len(set(seeds)) == 128
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_keys_are_the_same_on_the_host_and_on_the_device() -> None:
    """Keys of rows, computed in wrapping 64-bit integers, are those of the host for any seed and position."""
    seeds = [0, 1, 42, 2**31, 2**62 + 12345, 2**63 - 1, -1, -(2**63), 2**64 - 3]
    positions = [0, 7, 1, 131_071, 2, 3, 5, 1_000_000, 4]
    found = row_keys(torch.tensor([signed64(seed) for seed in seeds]), torch.tensor(positions))
    assert [tuple(row) for row in found.tolist()] == [row_key(*pair) for pair in zip(seeds, positions, strict=True)]
