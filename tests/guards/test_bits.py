"""Tiny models say what they said, whichever way a request takes through the engine."""

from __future__ import annotations

import json

import bits
import pytest

FEW = ("qwen3_moe", "gemma3_text")
SIGN = "`python tests/guards/bits.py --changed` compares bits with another commit; `--write` signs what is wanted"


@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.full) for kind in bits.MODELS]
)
def test_tokens_and_log_probabilities_are_those_on_record(kind: str) -> None:
    """Whole, from the cache, in chunks, retracted, on two ranks, with drafts and with a grammar."""
    record = json.loads(bits.RECORD.read_text("utf-8"))
    if record["environment"] != bits.environment():
        pytest.skip(f"random weights depend on versions: on record are those of {record['environment']}")
    _, found = bits.measure(kind, record["models"][kind]["seed"])
    assert bits.differing(record["models"][kind], found) == [], SIGN


def test_a_rounding_error_is_none_and_a_step_more_is_one() -> None:
    """Tokens are compared exactly, log probabilities within what machines may differ by, bits exactly."""
    one = bits.Said([[1, 2]], [[-0.25, -1.5]])
    near, far, other = (
        bits.Said([[1, last]], [[-0.25, value]]) for last, value in ((2, -1.5001), (2, -1.51), (3, -1.5))
    )
    record = bits.to_record(0, {"whole": one, "hit": near, "chunked": far})
    assert record["hit"] == "as whole"
    assert bits.differing(record, {"whole": one, "hit": near, "chunked": far}) == []
    assert bits.differing(record, {"whole": far, "hit": other, "chunked": one}) == ["whole", "hit", "chunked"]
    assert one.digests()[0] == near.digests()[0] != other.digests()[0]
    assert one.digests()[1] != near.digests()[1]
