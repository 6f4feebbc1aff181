"""Tools as pydantic describes them, in every format of tool calls: what is called full is enforced in full.

    python tests/benchmarks/pydantic_tools.py                       # 300 tools, in all formats
    python tests/benchmarks/pydantic_tools.py --tools 20 --formats qwen3-coder,gemma4 --show 5

Each tool is routed with `tool_choice` required, as a server does it. Its grammar's masks are followed at random, and
led to what tempts a reader: the format's own tags, quotes, and values of other types. A finished text must be read as
calls of the tool, and where the report says `full`, `jsonschema` judges the arguments. Exit code 1 where one does not
conform, or where less than 95 % of a format's tools are enforced in full.
"""

# ruff: noqa: E402 - the tests' helpers are found first

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

for folder in ("grammar", "parsers"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))  # what the tests of grammars and parsers share

import samples as TABLE
from grammar_routes import Enforced, backends_of
from phantoms import UNIT
from random_models import tool_of
from test_tools import MARKERS

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarBackend, GrammarMatcher, Vocabulary
from dovetail.contracts.output import FormatSpec
from dovetail.contracts.tools import ToolParser
from dovetail.grammar.compile.validity import conforms
from dovetail.grammar.compile.vocabulary import make_vocabulary
from dovetail.grammar.pipeline import StructuredOutputs
from dovetail.plugins import Registry, load, make_plan
from dovetail.sdk.formats.output import make_parser, parse_full
from dovetail.sdk.masks import has_bit, ids_of
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_testing.vocabularies import byte_level

CALLS = {
    "beam": " to=f<|channel|>analysis <|constrain|>xml<|message|>",
    "gpt-oss": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    "hyperclova": " -> tool/function_call\n[",
}
"""What begins a call, where random thoughts before it would hardly come to an end."""
VALUES = [
    "null",
    "true",
    "None",
    "12",
    "-3",
    "3.0",
    "1e3",
    '"12"',
    '"a',
    "[]",
    "{}",
    '["a"]',
    '{"a": 1}',
    "a b",
    "ab",
    "x",
]
SIGNS = ['"', '"', "'", "}", "]", ")", ", ", ",", ": ", "\n", " "]
MAX_TOKENS = 600


@dataclass
class Format:
    """What came of one format.

    Attributes:
        levels: Tools by what is reported of them.
        finished: Texts that came to their end.
        wrong: What is wrong with texts.
        lost: What was named as lost, and how often.
        errors: Refusals.
    """

    levels: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Return which share of the tools is enforced in full."""
        return self.levels["full"] / max(1, self.levels.total())


class Walker:
    """Follows the masks of grammars to an end."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, sample: str) -> None:
        """Prepare; `sample` is how the format writes calls."""
        tags = dict.fromkeys(unit for unit in UNIT.findall(sample) if unit.strip())
        marks = [text for text in MARKERS if text in sample]
        wanted = [*tags, *marks, *(f"\n{tag}" for tag in tags), *VALUES, *SIGNS, *SIGNS, *tags, *tags]
        self._texts = [tokenizer.encode(text, add_special_tokens=False) for text in wanted]
        self._vocabulary = vocabulary
        self._row = np.zeros((1, vocabulary.mask_words), dtype=np.int32)

    def walk(self, matcher: GrammarMatcher, rng: random.Random, begin: Sequence[int]) -> list[int] | None:
        """Return the tokens of a finished text, None where it gets long."""
        taken = [*begin]
        if matcher.accept(taken) != len(taken):
            raise AssertionError("the beginning of a call is refused")
        while len(taken) < MAX_TOKENS:
            if rng.random() < 0.35:
                text = rng.choice(self._texts)
                text = text[: rng.randrange(1, len(text) + 1)] if rng.random() < 0.1 else text
                taken += self._allowed(matcher, text)
                if matcher.terminated:
                    return taken
            matcher.fill(self._row, 0)
            allowed = ids_of(self._row[0])
            ends = self._vocabulary.eos_ids & set(allowed)
            if ends and (len(ends) == len(allowed) or rng.random() < 0.7):
                return taken
            tokens = self._vocabulary.tokens
            printed = [t for t in allowed if t < len(tokens) and tokens[t].isascii() and tokens[t].strip()]
            marks = [t for t in allowed if t in self._vocabulary.special_ids and t not in ends]
            if not allowed:
                raise AssertionError(f"there is no way on: {matcher.error}")
            some = marks if marks and rng.random() < 0.6 else printed if printed and rng.random() < 0.8 else allowed
            token = rng.choice([t for t in some if t not in ends] or allowed)
            if matcher.accept([token]) != 1:
                raise AssertionError(f"an allowed token is refused: {matcher.error}")
            taken.append(token)
        return None

    def _allowed(self, matcher: GrammarMatcher, text: Sequence[int]) -> Iterator[int]:
        """Take of a text what the masks allow, as a model does: what they leave out may lead to no end."""
        for token in text:
            matcher.fill(self._row, 0)
            if not has_bit(self._row[0], token) or matcher.accept([token]) != 1:
                return
            yield token
            if matcher.terminated:
                return


class Bench:
    """Tries tools in formats."""

    def __init__(self, num_walks: int) -> None:
        self.tokenizer = byte_level(MARKERS)
        self.vocabulary = make_vocabulary(self.tokenizer, self.tokenizer.vocab_size, self.tokenizer.eos_token_ids)
        self.backends: dict[str, GrammarBackend] = backends_of(self.vocabulary)
        self._num_walks = num_walks

    def run(self, name: str, tools: Sequence[dict[str, Any]], seed: int) -> Format:
        """Try all tools in one format."""
        parser: ToolParser = load(make_plan(Registry.scan(), tool_parser=name), "api").get("tool_parser", name)()
        walker, found = Walker(self.tokenizer, self.vocabulary, TABLE.CALLS.get(name, "")), Format()
        front = StructuredOutputs(self.backends)
        try:
            for number, tool in enumerate(tools):
                self._try(found, front, (name, parser, walker), tool, random.Random(f"{seed} {number} {name}"))
        finally:
            front.close()
        return found

    def _try(
        self,
        found: Format,
        front: StructuredOutputs,
        how: tuple[str, ToolParser, Walker],
        tool: dict[str, Any],
        rng: random.Random,
    ) -> None:
        name, parser, walker = how
        begin = self.tokenizer.encode(CALLS.get(name, ""), add_special_tokens=False)
        try:
            route = front.tools(parser, name, [tool], "required", parallel=False, param="tools")
            enforced = Enforced(route, self.backends, self.vocabulary)
        except RequestError as error:
            found.levels["refused"] += 1
            found.errors.append(error.message)
            return
        found.levels[enforced.enforcement] += 1
        if enforced.enforcement == "refused":
            found.errors += enforced.errors[:1]
            return
        if enforced.enforcement != "full":
            found.lost.update(place.rsplit("/", 1)[-1] for place in enforced.ignored)
            return
        spec = parser.extend(FormatSpec(), [tool])
        for _ in range(self._num_walks):
            ids = walker.walk(enforced.grammar.matcher(), rng, begin)
            if ids is None:
                continue
            found.finished += 1
            folded = parse_full(make_parser(spec, self.tokenizer), ids)
            text = self.tokenizer.decode(ids, skip_special_tokens=False)
            calls = [(call.name, call.arguments) for call in folded.tool_calls]
            if [called for called, _ in calls] != ["f"]:
                found.wrong.append(f"UNREAD {text!r} as {folded}")
            elif not conforms(tool["function"]["parameters"], calls[0][1]):
                found.wrong.append(f"INVALID {calls[0][1]} of {text!r} by {json.dumps(tool['function']['parameters'])}")


def rows(results: dict[str, tuple[Format, float]]) -> Iterator[str]:
    """Yield the table, a line for each format."""
    yield f"{'format':16} {'full':>7} {'named':>6} {'refused':>7} {'calls':>6} {'wrong':>6} {'s':>6}  lost most"
    for name, (found, took) in results.items():
        levels, most = found.levels, ", ".join(f"{key} {num}" for key, num in found.lost.most_common(4))
        named = levels["approximate"] + levels["validate_only"]
        yield (
            f"{name:16} {found.share:7.1%} {named:6} {levels['refused']:7} {found.finished:6} {len(found.wrong):6}"
            f" {took:6.1f}  {most}"
        )


def main() -> int:
    """Run."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--tools", type=int, default=300)
    arguments.add_argument("--walks", type=int, default=2, help="texts of each tool and format")
    arguments.add_argument("--formats", default="", help="names with commas between them; all if not given")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--show", type=int, default=2, help="wrong texts to print for each format")
    args = arguments.parse_args()
    bench, tools = Bench(args.walks), [tool_of(random.Random(f"{args.seed} {n}"), "f") for n in range(args.tools)]
    known = [record.name for record in Registry.scan().of_kind("tool_parser") if record.builtin]
    names = args.formats.split(",") if args.formats else sorted(set(known) - {"template"})
    results = {}
    for name in names:
        began = time.thread_time()
        found = bench.run(name, tools, args.seed)
        results[name] = found, time.thread_time() - began
        for line in (*found.wrong[: args.show], *sorted(set(found.errors))[: args.show]):
            print(f"{name}: {line[:1500]}")
    print(*rows(results), sep="\n")
    total = sum((found.levels for found, _ in results.values()), Counter[str]())
    wrong = sum(len(found.wrong) for found, _ in results.values())
    print(f"{total['full'] / total.total():.2%} of {total.total():,} in full, {wrong} wrong, seed {args.seed}")
    return int(wrong > 0 or any(found.share < 0.95 for found, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
