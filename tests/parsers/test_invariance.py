"""Every combination of parsers gives the same in every chunking: the benchmark's random pairs, fewer of them."""

from __future__ import annotations

import importlib.util
import random
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from dovetail_testing.operations import operations

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # the pairs beside the benchmark

import output_pairs
import samples as TABLE


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "output.py"
    spec = importlib.util.spec_from_file_location("bench_output", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def pairs() -> list[output_pairs.Pair]:
    """All of them, in the vocabulary of bytes and markers; making them takes longer than most tests."""
    return output_pairs.combinations(output_pairs.vocabulary())


@pytest.mark.parametrize("num", [2_000, pytest.param(20_000, marks=pytest.mark.full)])
def test_random_pairs(num: int) -> None:
    """Broken replies of two formats, markers cut anywhere, half characters: no mismatch, no error, no word lost."""
    assert next(output_pairs.mismatches(num, 7), None) is None


def test_a_marker_that_is_read_twice_counts_twice() -> None:
    """Thinking is held behind what looks like a call, and read again when it is none, token or text."""
    vocabulary = output_pairs.vocabulary()
    spec = next(p for p in pairs() if p.name == "apertus + cohere-command").spec
    text = "<|inner_prefix|>so<|START_ACTION|><|tool_call_begin|><|START_ACTION|>"
    text += '[{"tool_name": "find", "parameters": {}}]<|END_ACTION|>'
    as_text = output_pairs.outcome(output_pairs.Given(spec, None, None, "stop", False), [text])
    ids = vocabulary.encode(text, add_special_tokens=False)
    as_tokens = output_pairs.outcome(output_pairs.Given(spec, vocabulary, None, "stop", False), [[id_] for id_ in ids])
    assert as_tokens[:3] == as_text[:3]
    assert as_text[:3] == ("so<|START_ACTION|><|tool_call_begin|>", None, [("id", "find", "{}")])


def test_a_key_that_names_a_call_leaves_no_text_behind() -> None:
    """Where the section ends before the key's colon, there is a call without arguments and nothing else."""
    spec = next(p for p in pairs() if p.name == "qwen3 + apertus").spec
    text = '<|tools_prefix|>[{"get_weather"'
    for chunks in ([text], [*text]):
        _, content, calls, *_ = output_pairs.outcome(output_pairs.Given(spec, None, None, "stop"), chunks)
        assert (content, calls) == (None, [("id", "get_weather", "")])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3 + olmo3", "<think><function_calls>t<function_calls>now()"),
        ("glm45 + kimi-k2", "<think><|tool_calls_section_begin|>0" + TABLE.CALLS["kimi-k2"]),
        ("none + functiongemma", '<start_function_call>r{ "<end_function_call><start_function_call>'),
        ("none + kimi-k2", "So <|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ],
)
def test_tokens_are_read_as_their_text(name: str, text: str) -> None:
    """What turned out to be no call is read once more, and what is a marker then is one as a token and as text."""
    spec = next(p for p in pairs() if p.name == name).specs[1]
    own = output_pairs.own_vocabulary(spec)
    ids = own.encode(text, add_special_tokens=False)
    assert len(ids) < len(text.encode())
    as_text = output_pairs.outcome(output_pairs.Given(spec, None, None, "stop"), [text])
    for tokenizer, chunks in ((own, [ids]), (own, [[one] for one in ids]), (None, [*text])):
        assert output_pairs.outcome(output_pairs.Given(spec, tokenizer, None, "stop"), chunks)[:3] == as_text[:3]


@pytest.mark.parametrize(
    "word", ['"w0w', *(pytest.param(w, marks=pytest.mark.full) for w in ("w0w", " w0w", ">w0w", ' a="w0w"', "\nw0w"))]
)
def test_a_word_anywhere_in_a_call_is_kept(word: str) -> None:
    """A word within a call, its tags and heads, too, stands in one part of the reply: the call, or content.

    Every other place of a call is tried: the others in the format's next pair.
    """
    for number, pair in enumerate(pairs()):
        first, _, second = pair.name.partition(" + ")
        if first not in ("none", second, "derived") or (first == "none" and second not in TABLE.CALLS):
            continue
        call = pair.own[0] if first == "derived" else TABLE.CALLS.get(second, "")
        given = output_pairs.Given(pair.specs[1], None, None, "stop")
        for at in range(number % 2, len(call) + 1, 2):
            text = call[:at] + word + call[at:]
            found = output_pairs.outcome(given, [text])
            assert output_pairs.lost(text, found, "stop", "") == [], text


def test_the_pairs_hold_what_they_should() -> None:
    """A check of the check: enough of the texts think, and call tools, and the combinations are all there."""
    writer = output_pairs.Writer(random.Random(1))
    assert len(pairs()) > 24 * 30
    assert sum(pair.name.startswith("derived") for pair in pairs()) > 15
    thinking = calling = 0
    for number in range(800):
        pair = pairs()[number % len(pairs())]
        given = output_pairs.Given(pair.spec, None, None, "stop")
        reasoning, _, calls, _ = output_pairs.outcome(given, [writer.text(pair)])
        thinking += reasoning is not None
        calling += bool(calls)
    assert thinking > 120
    assert calling > 120


def test_a_mismatch_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that forgets what it held back between chunks is caught."""
    from dovetail.sdk.formats.machine import IncrementalParser

    feed = IncrementalParser.feed

    def forgetful(self: IncrementalParser, token_ids: object, text: str | None = None) -> object:
        self._held, self._state = "", 0
        return feed(self, token_ids, text)  # type: ignore[arg-type]

    monkeypatch.setattr(IncrementalParser, "feed", forgetful)
    assert next(output_pairs.mismatches(2_000, 7), None) is not None


def test_tokens_are_cheap(bench: ModuleType) -> None:
    """Lines of Python per token: few for text, bounded for markers and calls in tokens of one byte."""
    tokenizer = bench.vocabulary()
    lines = {}
    for pair in bench.combinations(tokenizer):
        first, _, second = pair.name.partition(" + ")
        if "none" in (first, second) or first == second:
            ids = tokenizer.encode(bench.stream_of(pair), add_special_tokens=False)
            parser = bench.make_parser(pair.specs[1], tokenizer)
            [parser.feed((token_id,)) for token_id in ids]  # what is filled as tokens come
            parser = bench.make_parser(pair.specs[1], tokenizer)
            lines[pair.name] = operations(lambda: [parser.feed((i,)) for i in ids]) / len(ids)  # noqa: B023
    assert lines["none + none"] < 20
    assert sorted(lines.values())[len(lines) // 2] < 40
    assert max(lines.values()) < 80
