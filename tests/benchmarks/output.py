"""The output parsers: the same result in every chunking, the cost of a token, and linear work.

    python tests/benchmarks/output.py                         # all three, 20,000 pairs
    python tests/benchmarks/output.py invariance --pairs 1000000 --seed 1
    python tests/benchmarks/output.py cost
    python tests/benchmarks/output.py curve

A pair is a text and a way to cut it, for a combination of a reasoning and a tool parser, a state that the prompt left,
and a reason to end; the fold of what a stream gives must be what the whole gives, the count of reasoning tokens too.
Half of the pairs are token ids, in a vocabulary of single bytes in which the markers are tokens, so that characters
and plain-text markers are cut anywhere; the others are text. Exit code 1 if a pair differs or a token costs too much.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))  # the pairs beside this file

from output_pairs import CALLS, Pair, combinations, mismatches, starts, vocabulary

from dovetail.sdk.formats.detokenizer import Detokenizer
from dovetail.sdk.formats.machine import IncrementalParser
from dovetail.sdk.formats.output import make_parser
from dovetail.text.tokenizer.tokenizer import Tokenizer

MAX_US = 2.0
"""Most that a token may cost, in microseconds."""
MAX_RATIO = 3.0
"""Most that a token may cost in the median, in times of detokenizing it."""
REPEATS = 9


def measured(pair: Pair, tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[float, float]:
    """Return the microseconds per token, fed one by one, and those of detokenizing; each the best of turns."""
    best = plain = float("inf")
    for _ in range(REPEATS):
        parser: IncrementalParser = make_parser(pair.specs[1], tokenizer)  # with every tool that is called
        begin = time.process_time()
        for token_id in ids:
            parser.feed((token_id,))
        parser.finish("stop")
        middle = time.process_time()
        detokenizer = Detokenizer(tokenizer)
        for token_id in ids:
            detokenizer.feed((token_id,))
        plain = min(plain, time.process_time() - middle)
        best = min(best, middle - begin)
    return best / len(ids) * 1e6, plain / len(ids) * 1e6


def stream_of(pair: Pair) -> str:
    """Return a long reply in a format: thinking, an answer, calls."""
    prose = "The capital of France is Paris, which lies on the Seine. <b>élan</b> 🎉 {1} [2]\n" * 10
    thinking = ""
    if pair.spec.reasoning is not None:
        thinking = pair.spec.reasoning.start + prose + pair.spec.reasoning.end
    elif pair.spec.machine is not None:
        thinking = f"<|channel|>analysis<|message|>{prose}<|end|><|start|>assistant<|channel|>final<|message|>"
    calls = "".join(call.replace("x", "a long value " * 20) for call in CALLS if starts(pair.spec, call))
    return thinking + prose + calls * 3


def cost() -> bool:
    """Print what a token costs in each combination's own format; say whether it is cheap enough.

    On a machine that other work shares all times grow alike: the ratio to detokenizing does not.
    """
    tokenizer = vocabulary()
    rows = []
    for pair in combinations(tokenizer):
        first, _, second = pair.name.partition(" + ")
        if first == "none" or second == "none" or first == second or first == "qwen3":
            ids = tokenizer.encode(stream_of(pair), add_special_tokens=False)
            spent, plain = measured(pair, tokenizer, ids)
            rows.append((spent / plain, spent, pair.name, len(ids)))
    for ratio, spent, name, count in sorted(rows, reverse=True)[:12]:
        print(f"  {spent:6.2f} µs per token, {ratio:.2f} × detokenizing  {name} ({count} tokens)")
    worst, middle = max(row[1] for row in rows), median(row[0] for row in rows)
    least = min(row[1] / row[0] for row in rows)
    print(f"worst of {len(rows)}: {worst:.2f} µs per token, bound {MAX_US} µs; {max(rows)[0]:.2f} × detokenizing")
    print(f"median: {middle:.2f} × detokenizing, bound {MAX_RATIO}; detokenizing {least:.2f} µs")
    return worst < MAX_US and middle < MAX_RATIO


def curve() -> None:
    """Print the time for texts of growing length, in pieces of 16 characters: linear work doubles with it."""
    tokenizer = vocabulary()
    named = {pair.name: pair for pair in combinations(tokenizer)}
    units = {
        "content": ("qwen3 + hermes", "", "Paris is the capital of France. "),
        "unfinished marker": ("qwen3 + hermes", "", "<"),
        "almost a marker": ("kimi + qwen3-coder", "", "◁thin"),
        "start markers": ("qwen3 + hermes", "", "<think>"),
        "braces": ("none + llama3", "", "{"),
        "brackets": ("none + pythonic", "[f(", "["),
        "newlines": ("qwen3 + hermes", "", "\n"),
        "closing tags": ("none + qwen3-coder", "<tool_call><function=f><parameter=q>", "</parameter> "),
        "spaces behind a tag": ("none + qwen3-coder", "<tool_call><function=f><parameter=q></parameter>", " "),
        "spaces between tags": ("none + qwen3-coder", "<tool_call><function=f>", " "),
        "stray text": ("none + qwen3-coder", "<tool_call><function=f>", " x "),
        "harmony markers": ("gpt-oss + gpt-oss", "", "<|channel|>"),
        "nested arguments": ("none + hermes", '<tool_call>{"name": "f", "arguments": ', "["),
    }
    sizes = [125_000, 250_000, 500_000, 1_000_000]
    print(
        "  " + "length".ljust(22) + "".join(f"{size:>12,}" for size in sizes) + "   seconds, in pieces of 16 characters"
    )
    for label, (name, opening, unit) in units.items():
        times = []
        for size in sizes:
            text = opening + unit * (size // len(unit))
            parser = make_parser(named[name].spec)
            begin = time.perf_counter()
            for at in range(0, len(text), 16):
                parser.feed((), text[at : at + 16])
            parser.finish("length")
            times.append(time.perf_counter() - begin)
        print("  " + label.ljust(22) + "".join(f"{seconds:12.3f}" for seconds in times))


def main() -> int:
    """Run what was asked for."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("what", nargs="?", choices=["all", "invariance", "cost", "curve"], default="all")
    arguments.add_argument("--pairs", type=int, default=20_000, help="pairs of text and chunking")
    arguments.add_argument("--seed", type=int, default=1)
    args = arguments.parse_args()
    failed = False
    if args.what in ("all", "invariance"):
        begin, count = time.perf_counter(), 0
        for line in mismatches(args.pairs, args.seed):
            count += 1
            if count <= 20:
                print(line)
        seconds = time.perf_counter() - begin
        print(f"{count} mismatches in {args.pairs:,} pairs, seed {args.seed}, {seconds:.0f} s")
        failed |= count > 0
    if args.what in ("all", "cost"):
        failed |= not cost()
    if args.what in ("all", "curve"):
        curve()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
