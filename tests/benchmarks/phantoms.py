"""Replies that talk about tool calls and make none: every format's tags in prose, code, quotes and thinking.

    python tests/benchmarks/phantoms.py                     # 5,000 replies
    python tests/benchmarks/phantoms.py --replies 20000 --seed 2
    python tests/benchmarks/phantoms.py thinking            # replies that talk about the markers of thinking

Each reply is read with tools and without, as text and as tokens, whole and in pieces. It must hold no call, lose no
character but a marker's own newlines, and keep thinking and answer apart. Exit code 1 if one does not.
"""

# ruff: noqa: E501 - tables

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parsers"))  # the table of the parsers' own tests

import samples as TABLE
from output_pairs import cut, vocabularies

from dovetail.contracts.output import FormatSpec
from dovetail.contracts.reasoning import ParserRequest
from dovetail.sdk.formats.output import fold, make_parser
from dovetail.text.parsing.stream import NoTemplate
from dovetail.text.tokenizer.tokenizer import Tokenizer

UNIT = re.compile(r"</?[^<>\s]*[^<>\n]*>|\[/?[A-Z_]{2,}\]|\]<\]minimax\[>\[(?:<[^<>]*>)?|functools\[|>>>\w+")
"""A tag or marker in a sample."""
PROSE = (
    "Paris lies on the Seine.",
    "It's simple; you don't need more.",
    "Let me explain: é 🎉.",
    "1. First of all, no.",
)
FOREIGN = ("»{}«", "«{}»", "‹{}›", "„{}“", "‚{}‘", "”{}”", "「{}」", "『{}』", "<code>{}</code>", "<kbd>{}</kbd>")
"""Quotation marks of other languages, and HTML's."""
THINKERS = {
    "deepseek-v31": "deepseek-v3", "deepseek-v32": "deepseek-v3", "deepseek-v4": "deepseek-v3",
    "deepseek-v41": "deepseek-v3", "qwen3-coder": "qwen3-thinking", "nemotron": "qwen3", "minicpm5": "qwen3",
    "cohere-command": "cohere-command3",
}  # fmt: skip
"""Reasoning parsers of tool formats; of others the one of the same name, or `qwen3`."""


@dataclass(frozen=True)
class Talk:
    """A reply that talks about a format: its thinking, its answer, and how it is written."""

    thinking: str
    answer: str
    closes: bool


class Talker:
    """Writes replies about one format."""

    def __init__(self, rng: random.Random, name: str) -> None:
        self.rng, self.sample = rng, TABLE.CALLS[name]
        if name in TABLE.MACHINES:  # their markers are tokens that text cannot spell
            self.sample = re.sub(r"<\|\w+\|>", "", self.sample)
        self.units = UNIT.findall(self.sample) or [self.sample[:20], self.sample]

    def tag(self) -> str:
        """Return a tag, with a name that stands for all names, or with a tool's."""
        tag = self.rng.choice(self.units)
        name = self.rng.choice(["NAME", "get_weather", "now", "x", "..."])
        return re.sub(r"get_weather|now", name, tag)

    def several(self) -> str:
        """Return a few tags, one behind the other."""
        return "".join(self.tag() for _ in range(self.rng.randrange(1, 4)))

    def sentence(self) -> str:
        """Return a sentence that names tags."""
        rng = self.rng
        quote = rng.choice(["`{}`", "`{}`", '"{}"', "“{}”", "'{}'", "``{}``", "({})", "{}", rng.choice(FOREIGN)])
        named = self.several()
        if quote in ("({})", "{}") and rng.random() < 0.5:  # unquoted, a section with a tool's name is a call
            named = self.tag()
        elif quote in ("({})", "{}"):
            named = re.sub(r"get_weather|now", "NAME", named)
        one, two = quote.format(named), quote.format(self.tag())
        forms = [
            f"A call begins with {one} and ends with {two}.",
            f"Maybe {one} fits.",
            f"The tags are {one}, {two} and so on.",
            f"- {one}: opens a call\n- {two}: closes it",
            f"| {one} | opens |",
            f"Never write {one}!",
            f"> {one} stands first",
        ]
        return rng.choice(forms)

    def example(self) -> str:
        """Return an example of a call, whole or in part, as code."""
        rng, text = self.rng, self.sample
        if rng.random() < 0.5:
            text = text.replace("get_weather", "NAME")
        if rng.random() < 0.3:
            text = text[: rng.randrange(len(text) + 1)]
        fence = rng.choice(["```", "~~~", "````"])
        if "```" in text:
            fence = "~~~"
        if "\n" not in text and "`" not in text and rng.random() < 0.4:
            return f"For example `{text}`."
        if rng.random() < 0.4:
            return self.set_in(text, fence)
        return f"For example:\n\n{fence}{rng.choice(['', 'xml', 'text'])}\n{text}\n{fence}"

    def set_in(self, text: str, fence: str) -> str:
        """Return an example in a list, in a quote, in HTML, indented, or as a difference."""
        lead, opening, closing = self.rng.choice(
            [
                ("    ", "", ""),
                ("\t", "", ""),
                ("  ", f"- {fence}xml", fence),
                ("> ", f"> {fence}", f"> {fence}"),
                ("+", f"{fence}diff", fence),
                ("", "<pre><code>", "</code></pre>"),
            ]
        )
        return "\n".join(("For example:\n", opening, *(lead + line for line in text.split("\n")), closing))

    def passage(self) -> str:
        """Return some sentences."""
        parts = []
        for _ in range(self.rng.randrange(1, 4)):
            kind = self.rng.random()
            parts.append(self.rng.choice(PROSE) if kind < 0.3 else self.sentence() if kind < 0.75 else self.example())
        between = self.rng.choice([" ", "\n", "\n\n"])
        text = "".join(part + ("\n\n" if part.endswith(("```", "~~~")) else between) for part in parts)
        return text.rstrip(" ") + self.rng.choice(["", "\n", "That is all."])

    def talk(self) -> Talk:
        """Return a reply."""
        kind = self.rng.random()
        if kind < 0.45:
            return Talk("", self.rng.choice(["", *PROSE, "So: "]) + "\n\n" + self.passage(), closes=True)
        if kind < 0.85:
            return Talk("Hm.\n\n" + self.passage(), self.passage() if self.rng.random() < 0.3 else "So.", closes=True)
        return Talk("Hm. " + self.sentence(), "", closes=False)


@cache
def formats(tokenizer: Tokenizer) -> list[tuple[str, FormatSpec, FormatSpec]]:
    """Return each tool format, with tools and without."""
    thinkers = {entry.name: entry for entry in entry_points(group="dovetail.reasoning_parsers.v1")}
    callers = {entry.name: entry for entry in entry_points(group="dovetail.tool_parsers.v1")}
    found = []
    for name in sorted(TABLE.CALLS):
        thinker = thinkers.get(THINKERS.get(name, name), thinkers["qwen3"])
        if name == "beam":
            thinker = thinkers["gpt-oss"]
        spec = thinker.load()().spec(tokenizer, NoTemplate(), ParserRequest())
        found.append((name, callers[name].load()().extend(spec, TABLE.TOOLS), spec))
    return found


def reply_of(name: str, spec: FormatSpec, talk: Talk) -> str:
    """Write a reply as a model of the format does."""
    machines = {
        "functionary": f"all\n{talk.answer}",
        "hyperclova": f"/think\n{talk.thinking}<|im_end|>\n<|im_start|>assistant\n{talk.answer}",
        "gpt-oss": f"<|channel|>analysis<|message|>{talk.thinking}<|end|><|start|>assistant<|channel|>final<|message|>{talk.answer}",
        "inkling": f"<|content_thinking|>{talk.thinking}<|end_message|><|message_model|><|content_text|>{talk.answer}",
        "muse": f" to=self<|message|>{talk.thinking}<|eom|><|start|>assistant to=user<|message|>{talk.answer}",
    }
    machines["beam"] = machines["gpt-oss"]
    if name in machines:
        return machines[name]
    markers = spec.reasoning
    if markers is None or not talk.thinking:
        return talk.answer
    end = markers.before_end + markers.end + markers.after_end if talk.closes else ""
    return markers.start + markers.after_start + talk.thinking + end + talk.answer


def parsed(spec: FormatSpec, tokenizer: Tokenizer | None, tail: str | None, chunks: list[Any], reason: str) -> Any:
    """Read a reply chunk by chunk."""
    parser = make_parser(spec, tokenizer, skip_special_tokens=False, make_id=lambda: "id")
    if tail is not None:
        parser.prime(tail)
    events = [e for c in chunks for e in (parser.feed((), c) if tokenizer is None else parser.feed(c))]
    return fold([*events, *parser.finish(reason)])


def phantoms(num_replies: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the format and what is wrong, for each reply that is read wrongly."""
    rng = random.Random(seed)
    tables = [vocabularies()[number] for number in (0, 3)]
    known = [*formats(tables[0])]
    for number in range(num_replies):
        name, *specs = known[number % len(known)]
        talk = Talker(rng, name).talk()
        if name in TABLE.MACHINES and not (talk.closes and talk.answer):
            continue
        text = reply_of(name, specs[0], talk)
        # A marker of messages or thinking that is named as it is *is* one.
        for spec in specs:
            used = rng.choice(tables) if rng.random() < 0.5 else None
            whole: Any = text if used is None else used.encode(text, add_special_tokens=False)
            reason = rng.choice(["stop", "stop", "length"])
            tail = TABLE.MACHINES.get(name, "<assistant>")
            reply = parsed(spec, used, tail, [whole], reason)
            about = f"{name}, {'tools' if spec is specs[0] else 'no tools'}, {used and tables.index(used)}, {text!r}: {reply}"
            if reply.tool_calls:
                yield name, f"PHANTOM {about}"
            elif (
                name not in TABLE.MACHINES
                and talk.thinking
                and (reply.reasoning or "").strip() != talk.thinking.strip()
            ):
                yield name, f"SPILL {about}"
            for _ in range(2):
                if parsed(spec, used, tail, cut(whole, rng), reason) != reply:
                    yield name, f"CUT {about}"


class Thinker:
    """Writes replies that name the markers of thinking, or do not, and says what is thinking in them."""

    def __init__(self, rng: random.Random, start: str, end: str) -> None:
        self.rng, self.start, self.end = rng, start, end

    def quoted(self, text: str) -> str:
        """Return a text in code or in quotation marks, within a line."""
        return self.rng.choice(["`{}`", "`{}`", '"{}"', "“{}”", "'{}'", "``{}``", *FOREIGN]).format(text)

    def block(self, text: str) -> str:
        """Return a text as code in lines of its own."""
        fence = self.rng.choice(["```", "~~~", "````"])
        lead, opening, closing = self.rng.choice(
            [
                ("", f"{fence}xml", fence),
                ("", fence, fence),
                ("> ", "> So:", ">"),
                ("    ", "", ""),
                ("", "<pre>", "</pre>"),
            ]
        )
        return "\n".join(("For example:\n", opening, *(lead + line for line in text.split("\n")), closing))

    def paragraph(self) -> str:
        """Return a paragraph of an answer."""
        rng, start, end = self.rng, self.start, self.end
        whole = f"{start}{rng.choice(['', 'hm', chr(10) + 'hm' + chr(10)])}{end}{rng.choice(['', 'so'])}"
        if "\n" in start:
            start = start.rstrip()  # it would end its line, and what quotes it
        one, two = self.quoted(start), self.quoted(end)
        return rng.choice(
            [
                *PROSE,
                f"Thoughts stand between {one} and {two}.",
                f"- {one}: opens\n- {two}: closes",
                f"| {one} | {two} |",
                f"It is {self.quoted(whole.replace(chr(10), ' '))} then.",
                f"Maybe {self.start.rstrip()} fits, and {end} closes.",
                f"Use ({start}) or ({end}), never {start}.",
                self.block(whole),
                'He said "yes, and',
                "A 5\" screen, it's `code and",
            ]
        )

    def thought(self) -> str:
        """Return a paragraph of thinking."""
        rng, start, end = self.rng, self.start.rstrip(), self.end
        one, two = self.quoted(start), self.quoted(end)
        fence = rng.choice(["```", "~~~"])
        return rng.choice(
            [
                *PROSE,
                f"I put it between {one} and {two} then.",
                f"The tag {two} ends it.",
                f"- {one}: opens\n- {two}: closes",
                f"{fence}xml\n{self.start}\nhm\n{end}\nso\n{fence}",
                f"It is {self.quoted(f'{start}hm{end}' if start == self.start else end)} then.",
                f"Maybe {start} fits.",
                'He said "yes, and',
                "A 5\" screen, it's `code and",
                "> a quote",
            ]
        )

    def several(self, write: Any) -> str:
        """Return some paragraphs."""
        return "\n\n".join(write() for _ in range(self.rng.randrange(1, 4)))

    def reply(self, after_start: str, before_end: str, after_end: str) -> tuple[str, bool, str | None, str | None]:
        """Return a reply, whether its prompt ends within thinking, and what is thinking and answer in it."""
        answer, thought = self.several(self.paragraph), self.several(self.thought)
        closed = before_end + self.end + after_end
        kind = self.rng.random()
        if kind < 0.35:
            return answer, False, None, answer
        if kind < 0.6:
            return f"{self.start}{after_start}{thought}{closed}{answer}", False, thought, answer
        if kind < 0.8:
            return f"{thought}{closed}{answer}", True, thought, answer
        before = f"{answer}\n\n"
        return f"{before}{self.start}{after_start}{thought}{closed}So.", False, thought, f"{before}So."


def spills(num_replies: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the format and what is wrong, for each reply whose thinking is read wrongly."""
    rng = random.Random(seed)
    tables = [vocabularies()[number] for number in (0, 3)]
    thinkers = {entry.name: entry.load() for entry in entry_points(group="dovetail.reasoning_parsers.v1")}
    for number in range(num_replies):
        name = [*TABLE.TAGS][number % len(TABLE.TAGS)]
        start, end, *newlines, _ = TABLE.TAGS[name]
        spec = thinkers[name]().spec(tables[0], NoTemplate(), ParserRequest())
        text, begun, thought, answer = Thinker(rng, start, end).reply(*newlines)
        tail = f"<a>{start}{newlines[0]}" if begun else "<a>"
        used = rng.choice(tables) if rng.random() < 0.5 else None
        whole: Any = text if used is None else used.encode(text, add_special_tokens=False)
        reply = parsed(spec, used, tail, [whole], "stop")
        about = f"{name}, {used and tables.index(used)}, {tail!r}, {text!r}: {reply}"
        if ((reply.reasoning or "").strip(), reply.content) != ((thought or "").strip(), answer):
            yield name, f"SPILL {about}"
        if any(parsed(spec, used, tail, cut(whole, rng), "stop") != reply for _ in range(2)):
            yield name, f"CUT {about}"


def main() -> int:
    """Run."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("what", nargs="?", choices=["calls", "thinking"], default="calls")
    arguments.add_argument("--replies", type=int, default=5_000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--show", type=int, default=20)
    args = arguments.parse_args()
    counts: dict[str, int] = {}
    for name, line in (spills if args.what == "thinking" else phantoms)(args.replies, args.seed):
        kind = f"{line.split()[0]} {name}"
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= 1 and len(counts) <= args.show:
            print(line)
    print(counts)
    print(f"{sum(counts.values())} wrong of {args.replies:,} replies, seed {args.seed}")
    return int(bool(counts))


if __name__ == "__main__":
    sys.exit(main())
