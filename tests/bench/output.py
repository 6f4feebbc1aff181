"""The output parsers: the same result in every chunking, the cost of a token, and linear work.

    python tests/bench/output.py                         # all three, 20,000 pairs
    python tests/bench/output.py invariance --pairs 1000000 --seed 1
    python tests/bench/output.py cost
    python tests/bench/output.py curve

A pair is a text and a way to cut it, for a combination of a reasoning and a tool parser, a state that the prompt left,
and a reason to end; the fold of what a stream gives must be what the whole gives, the count of reasoning tokens too.
Half of the pairs are token ids, in a vocabulary of single bytes in which the markers are tokens, so that characters
and plain-text markers are cut anywhere; the others are text. Exit code 1 if a pair differs or a token costs too much.
"""

# ruff: noqa: E501 - the tables hold one case per line

from __future__ import annotations

import argparse
import importlib.util
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dovetail.contracts.reasoning import FormatSpec, ParserRequest
from dovetail.text.chat import ChatTemplate
from dovetail.text.derive import CALLED, THOUGHTS, derive, rendered
from dovetail.text.machine import Machine
from dovetail.text.output import fold, make_parser
from dovetail.text.stream import NoTemplate
from dovetail.text.templates import FOLDER
from dovetail.text.tokenizer import Tokenizer

MAX_US = 2.0
"""Most that a token may cost, in microseconds."""
CHUNKINGS = 4
"""Ways in which one text is cut."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {"properties": {"q": {"type": "string"}, "n": {"type": "integer"}, "any": {}}},
        },
    }
]
HARMONY = [f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "return", "call")]
DEEPSEEK = [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")]
KIMI = [
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
]
TOKENS = [
    *HARMONY, *DEEPSEEK, *KIMI, "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]", "<|python_tag|>",
    "<|python_start|>", "<|python_end|>", "｜DSML｜", "<think>", "</think>", "<tool_call>", "</tool_call>", "<seed:think>",
    "</seed:think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
]  # fmt: skip
TEXT_MARKERS = [
    "◁think▷", "◁/think▷", "<function=find>", "</function>", "<parameter=q>", "</parameter>", '<invoke name="find">',
    "</invoke>", '<parameter name="n">', "<minimax:tool_call>", "</minimax:tool_call>", "<seed:tool_call>",
    "</seed:tool_call>", "<｜DSML｜function_calls>", '<｜DSML｜invoke name="find">', "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="q" string="true">', "</｜DSML｜parameter>", "</｜DSML｜function_calls>",
]  # fmt: skip
CALLS = [
    '<tool_call>\n{"name": "find", "arguments": {"q": "</tool_call> \\"é\\"", "n": [1, {}]}}\n</tool_call>',
    "<tool_call>\n<function=find>\n<parameter=q>\na </parameter> 中\n\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
    "<function=find>\n<parameter=any>\n[1]\n</parameter>\n</function>",
    "<tool_call>find\n<arg_key>q</arg_key>\n<arg_value>a </arg_value> b</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    '{"name": "find", "parameters": {"q": "{"}}; {"name": "find"}',
    "[find(q='a, )]', n=-3), find(\"x\", 2)]",
    '[TOOL_CALLS] [{"name": "find", "arguments": {"q": "x"}}]',
    '[TOOL_CALLS]find[CALL_ID]abc[ARGS]{"q": "[TOOL_CALLS]"}',
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{"q": "```"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{"q": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="find">\n<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{"q": "x"}<|tool_call_end|><|tool_calls_section_end|>',
    '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"q": "x"}<|call|>',
    "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>so",
]  # fmt: skip
LATER = [
    "<|open|>", "<|close|>", "<|sep|>", "<|think|>", "<|content|>", "<|begin|>", "<|tool_call:begin|>", "<|tool_call:name|>",
    "<|tool_call:args|>", "<|tool_call:end|>", "<|tool_calls|>", "<|calls|>", "<|START_THINKING|>", "<|END_THINKING|>",
    "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|channel>", "<channel|>", "<|tool_call>",
    "<tool_call|>", '<|"|>', "<|tools_prefix|>", "<|tools_suffix|>", "]<]minimax[>[", "<|tool_call_start|>", "<|tool_call_end|>",
    "<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>", "<｜tool_calls_end｜>",
    "<|eom|>", "<|eot|>", "<|message_model|>", "<|end_message|>", "<|content_thinking|>", "<|content_text|>",
    "<|content_invoke_tool_json|>", "<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<ifm|tool_call>", "</ifm|tool_call>",
]  # fmt: skip
"""Special tokens of formats whose calls are those of the parsers' samples."""
MAX_HEAD = 64
"""Characters at the end of a reply that was cut in which the head of a call may stand that is not shown."""
WITNESS = "\ue000"
"""Stands in a random text for a word that is found nowhere else."""
PLAIN = [WITNESS, WITNESS, WITNESS, "\n", "\n\n", " ", "a", "Paris is ", "é", "中文", "🎉", "\ufffd", "<", "</", "<|", "{", "}", "[", "]", '"', "\\", "find", ",", "assistant", " to=functions.find", "analysis", "```"]  # fmt: skip
TAILS = ["", "<|assistant|>", "<think>", "<think>\n", "</think>", "<think>\n\n</think>\n\n", "<|start|>assistant", "[THINK]", "◁think▷", "<seed:think>", "<|start|>assistant<|channel|>final<|message|>"]  # fmt: skip


def samples() -> Any:
    """Return the table of the parsers' own tests."""
    path = Path(__file__).parents[1] / "parsers" / "samples.py"
    spec = importlib.util.spec_from_file_location("bench_samples", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"no samples at {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TABLE = samples()
CALLS += TABLE.CALLS.values()
TEMPLATES = (FOLDER, Path(__file__).parents[1] / "text" / "templates")
"""Chat templates whose formats are read off them."""


@dataclass(frozen=True)
class Pair:
    """One combination of parsers, and what is written in its formats."""

    name: str
    spec: FormatSpec
    own: tuple[str, ...] = ()


def vocabulary() -> Tokenizer:
    """Make a vocabulary of bytes in which the formats' markers are tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*TOKENS[:24], *LATER])
    backend.add_tokens(TOKENS[24:])
    return Tokenizer(backend)


def combinations(tokenizer: Tokenizer) -> list[Pair]:
    """Every reasoning parser, or none, with every tool parser, or none."""
    reasoning: dict[str, Any] = {"none": None}
    tools: dict[str, Any] = {"none": None}
    for found, group in ((reasoning, "dovetail.reasoning_parsers.v1"), (tools, "dovetail.tool_parsers.v1")):
        found.update({entry.name: entry.load()() for entry in entry_points(group=group)})
    pairs = []
    for first, thinker in reasoning.items():
        for second, caller in tools.items():
            spec = FormatSpec() if thinker is None else thinker.spec(tokenizer, NoTemplate(), ParserRequest())
            spec = spec if caller is None else caller.extend(spec, TOOLS)
            rows = [row.text for row in TABLE.MACHINE_ROWS.get(first, ())]
            own = (*rows, TABLE.CALLS[second]) if second in TABLE.CALLS else (*rows,)
            pairs.append(Pair(f"{first} + {second}", spec, own))
    return [*pairs, *derived()]


def derived() -> Iterator[Pair]:
    """What is read off chat templates, in place of the parsers that would be chosen for them."""
    for path in sorted(path for folder in TEMPLATES for path in folder.glob("*.jinja")):
        template = ChatTemplate({"default": path.read_text(encoding="utf-8")})
        spec = derive(template).spec(TOOLS)
        if spec.reasoning is not None or spec.tools is not None:
            shown = [rendered(template, reply, {}) for reply in (*CALLED, *THOUGHTS)]
            yield Pair(f"derived + {path.stem}", spec, tuple(each.output or "" for each in shown if each is not None))


def random_text(rng: random.Random, pair: Pair) -> str:
    """Marker soup: whole and cut markers, calls, prefixes, late markers, many-byte characters, truncation.

    A third is of the pair's own format, the rest of any.
    """
    own = [call for call in CALLS if starts(pair, call)] + [*pair.own]
    if pair.spec.reasoning is not None:
        own += [pair.spec.reasoning.start, pair.spec.reasoning.end]
    parts = []
    for _ in range(rng.randrange(1, 9)):
        kind = rng.random()
        if own and rng.random() < 1 / 3:
            parts.append(rng.choice(own))
        elif kind < 0.4:
            parts.append(rng.choice(PLAIN))
        elif kind < 0.6:
            parts.append(rng.choice([*TOKENS, *LATER]))
        elif kind < 0.7:
            parts.append(rng.choice(TEXT_MARKERS))
        elif kind < 0.8:
            marker = rng.choice([*TOKENS, *TEXT_MARKERS])
            parts.append(marker[: rng.randrange(len(marker))])
        else:
            parts.append(rng.choice(CALLS))
    text = "".join(parts)
    text = text[: rng.randrange(len(text) + 1)] if rng.random() < 0.3 else text
    head, *rest = text.split(WITNESS)
    return head + "".join(f"w{number}w{part}" for number, part in enumerate(rest))


def cut(whole: Any, rng: random.Random) -> list[Any]:
    """Cut into single elements, in two, or at random."""
    kind = rng.random()
    if kind < 0.3:
        return [whole[at : at + 1] for at in range(len(whole))]
    edges = sorted(rng.randrange(len(whole) + 1) for _ in range(1 if kind < 0.6 else rng.randrange(2, 12)))
    return [whole[begin:end] for begin, end in zip([0, *edges], [*edges, len(whole)], strict=True)]


def outcome(pair: Pair, tokenizer: Tokenizer | None, tail: str | None, chunks: Sequence[Any], reason: str) -> Any:
    """Parse chunk by chunk and fold."""
    parser = make_parser(pair.spec, tokenizer, make_id=lambda: "id")
    if tail is not None:
        parser.prime(tail)
    events = chain.from_iterable(parser.feed((), c) if tokenizer is None else parser.feed(c) for c in chunks)
    whole = fold([*events, *parser.finish(reason)])
    return (
        whole.reasoning,
        whole.content,
        [(c.id, c.name, c.arguments) for c in whole.tool_calls],
        parser.reasoning_tokens,
    )


def mismatches(num_pairs: int, seed: int) -> Iterator[str]:
    """Yield a line for every pair whose stream differs from its whole."""
    rng = random.Random(seed)
    tokenizer = vocabulary()
    pairs = combinations(tokenizer)
    for number in range(0, num_pairs, CHUNKINGS):
        pair = pairs[number // CHUNKINGS % len(pairs)]
        text = random_text(rng, pair)
        tail = rng.choice([None, *TAILS])
        reason = rng.choice(["stop", "length"])
        as_ids = rng.random() < 0.5
        whole: Any = text
        if as_ids:
            whole = tokenizer.encode(text, add_special_tokens=False)
            whole = whole[: rng.randrange(len(whole) + 1)] if rng.random() < 0.2 else whole
        used = tokenizer if as_ids else None
        expected = outcome(pair, used, tail, [whole], reason)
        written = text if not as_ids else tokenizer.decode(whole, skip_special_tokens=False)
        if missing := lost(written, expected, reason):
            yield f"{pair.name}, tail {tail!r}, {reason}, {text!r}: {missing} is lost in {expected}"
        for _ in range(min(CHUNKINGS, num_pairs - number)):
            chunks = cut(whole, rng)
            found = outcome(pair, used, tail, chunks, reason)
            if found != expected:
                yield f"{pair.name}, tail {tail!r}, {reason}, chunks {chunks!r}: {found} instead of {expected}"


def lost(text: str, found: Any, reason: str) -> list[str]:
    """Return the words of a text that stand in no part of the reply.

    A word in the wrapper of a call (beside its name and arguments) is part of the format, as are the name of a call
    that was cut off and the header of a message.
    """
    reasoning, content, calls, _ = found
    kept = " ".join([reasoning or "", content or "", *(f"{name} {arguments}" for _, name, arguments in calls)])
    words = [word for word in re.findall(r"w\d+w", text) if word not in kept]
    return [word for word in words if reason != "length" or word not in text[-MAX_HEAD:]]


def measured(pair: Pair, tokenizer: Tokenizer, ids: Sequence[int], repeats: int = 5) -> float:
    """Return the microseconds per token, fed one by one; the best of several runs."""
    best = float("inf")
    for _ in range(repeats):
        parser: Machine = make_parser(pair.spec, tokenizer)
        begin = time.process_time()
        for token_id in ids:
            parser.feed((token_id,))
        parser.finish("stop")
        best = min(best, time.process_time() - begin)
    return best / len(ids) * 1e6


def stream_of(pair: Pair) -> str:
    """Return a long reply in a format: thinking, an answer, calls."""
    prose = "The capital of France is Paris, which lies on the Seine. <b>élan</b> 🎉 {1} [2]\n" * 10
    thinking = ""
    if pair.spec.reasoning is not None:
        thinking = pair.spec.reasoning.start + prose + pair.spec.reasoning.end
    elif pair.spec.machine is not None:
        thinking = f"<|channel|>analysis<|message|>{prose}<|end|><|start|>assistant<|channel|>final<|message|>"
    calls = "".join(call.replace("x", "a long value " * 20) for call in CALLS if starts(pair, call))
    return thinking + prose + calls * 3


def starts(pair: Pair, call: str) -> bool:
    """Whether a format reads this way to write a call."""
    tools = pair.spec.tools
    return tools is not None and call.startswith(tuple(filter(None, (tools.start, *tools.also, *tools.bare))))


def cost() -> bool:
    """Print what a token costs in each combination's own format; say whether all are cheap enough."""
    tokenizer = vocabulary()
    rows = []
    for pair in combinations(tokenizer):
        first, _, second = pair.name.partition(" + ")
        if first == "none" or second == "none" or first == second or first == "qwen3":
            ids = tokenizer.encode(stream_of(pair), add_special_tokens=False)
            rows.append((measured(pair, tokenizer, ids), pair.name, len(ids)))
    for microseconds, name, count in sorted(rows, reverse=True)[:12]:
        print(f"  {microseconds:6.2f} µs per token  {name} ({count} tokens)")
    print(f"worst of {len(rows)}: {max(rows)[0]:.2f} µs per token, bound {MAX_US} µs")
    return max(rows)[0] < MAX_US


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
