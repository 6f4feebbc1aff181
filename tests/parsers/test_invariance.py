"""Every combination of parsers gives the same in every chunking: the benchmark's random pairs, fewer of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[1] / "bench" / "output.py"
    spec = importlib.util.spec_from_file_location("bench_output", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_random_pairs(bench: ModuleType) -> None:
    """Marker soup, markers cut anywhere, late markers, truncation, half characters: no mismatch, no word lost."""
    assert next(bench.mismatches(12_000, 7), None) is None


def test_the_pairs_hold_what_they_should(bench: ModuleType) -> None:
    """A check of the check: enough of the texts think, and call tools, and the combinations are all there."""
    import random

    rng = random.Random(1)
    tokenizer = bench.vocabulary()
    pairs = bench.combinations(tokenizer)
    assert len(pairs) > 24 * 30
    assert sum(pair.name.startswith("derived") for pair in pairs) > 15
    thinking = calling = 0
    for number in range(2000):
        pair = pairs[number % len(pairs)]
        reasoning, _, calls, _ = bench.outcome(pair, None, None, [bench.random_text(rng, pair)], "stop")
        thinking += reasoning is not None
        calling += bool(calls)
    assert thinking > 300
    assert calling > 300


def test_a_mismatch_would_be_seen(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that forgets what it held back between chunks is caught."""
    from dovetail.text.machine import Machine

    feed = Machine.feed

    def forgetful(self: Machine, token_ids: object, text: str | None = None) -> object:
        self._held, self._state = "", 0
        return feed(self, token_ids, text)  # type: ignore[arg-type]

    monkeypatch.setattr(Machine, "feed", forgetful)
    assert next(bench.mismatches(2_000, 7), None) is not None


def test_tokens_are_cheap(bench: ModuleType) -> None:
    """A token costs a few times what it does as plain text; both are measured here, so other load does not matter."""
    tokenizer = bench.vocabulary()
    plain = bench.Pair("plain", bench.FormatSpec())
    for pair in bench.combinations(tokenizer):
        if pair.name in ("qwen3 + deepseek-v32", "gpt-oss + gpt-oss", "kimi + pythonic", "muse + muse"):
            ids = tokenizer.encode(bench.stream_of(pair), add_special_tokens=False)
            assert bench.measured(pair, tokenizer, ids) < 8 * bench.measured(plain, tokenizer, ids)
