"""What chat templates write, read back by the parsers that `auto` chooses for them.

    python tests/benchmarks/round_trip.py FOLDER…            # every *.jinja in the folders
    python tests/benchmarks/round_trip.py -v FOLDER…         # with each reply that was read wrong

Collections of templates stand in the source distributions of llama-cpp-python and vllm. For each template and each way
to switch thinking, replies are rendered behind the prompt for them, without what ends a turn, and parsed as text: the
answer alone, thinking and answer, one call, an answer and a call, two calls. A reply counts where the template prints
all of it behind the prompt, and is right where all of it comes back, and nothing else; spaces that a template puts in
front of an answer are not counted.

Detection is right where the parsers chosen read back every reply of theirs, or where none was chosen and there is none.
It is wrong where others would read back more of them: the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.contracts.errors import ModelError, RequestError
from dovetail.contracts.output import FormatSpec
from dovetail.contracts.reasoning import ParserRequest
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.plugins.registry import Registry
from dovetail.sdk.formats.output import make_parser, parse_full
from dovetail.text.chat.rendered import behind
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.detection.detect import resolve_parsers
from dovetail.text.parsing.fitted import bound_reasoning, bound_tools

QUESTION = {"role": "user", "content": "What is the weather?"}
THOUGHT, ANSWER = "They ask about\n\nthe weather <b>.", 'It is "fine" & {sunny}\n\n- [in] Rome'
VALUES: dict[str, Any] = {"city": 'Rom, "die" <Stadt>\n & more', "days": 3, "deep": {"a": [1, "x", None]}, "on": True}
SWITCHES: dict[str, Mapping[str, Any]] = {
    "": {},
    "on": {"enable_thinking": True, "thinking": True},
    "off": {"enable_thinking": False, "thinking": False},
}
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
OPENED = re.compile(r"<([^<>/]*think[^<>]*)>\s*\Z")
UNIT = re.compile(r"<[^<>\s][^<>]*>")
TURN_ENDS = (
    "<|call|>",
    "<turn|>",
    "<|tool_response>",
    "<|eom_id|>",
    "<end_of_turn>\n",
    "<|calls|>",
    "<｜hy_eos:opensource｜>",
)
"""What ends a turn behind calls alone."""
LAST = ("<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>")
"""Tokens at which models stop whose templates write more behind them."""
COLUMNS = ("content", "reasoning", "call", "parallel")


def tool(name: str) -> dict[str, Any]:
    """Return a tool as OpenAI writes it."""
    kinds = {"city": "string", "days": "integer", "deep": "object", "on": "boolean"}
    properties = {key: {"type": kind, "description": key} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": "Weather.", "parameters": parameters}}


TOOLS = [tool("get_weather"), tool("now")]


@dataclass(frozen=True)
class Case:
    """A reply. `column` is where it counts."""

    column: str
    reasoning: str | None = None
    content: str | None = None
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The reply as it stands in a history."""
        calls = [
            {"id": f"abcdef{n:03}", "type": "function", "function": {"name": name, "arguments": json.dumps(values)}}
            for n, (name, values) in enumerate(self.calls)
        ]
        message = {"role": "assistant", "content": self.content, "reasoning_content": self.reasoning}
        return {**message, "tool_calls": calls or None}


CASES = [
    Case("content", content=ANSWER),
    Case("reasoning", THOUGHT, ANSWER),
    Case("call", calls=(("get_weather", VALUES),)),
    Case("call", content="Let me look.", calls=(("get_weather", {"city": "Rome"}),)),
    Case("call", calls=(("now", {}),)),
    Case("call", THOUGHT, None, (("get_weather", {"city": "Rome", "days": 3}),)),
    Case("parallel", calls=(("get_weather", VALUES), ("now", {"days": -1, "city": "3"}))),
]


class Parsers:
    """Parsers by name, or, where none is given, those that `auto` chooses for a template."""

    def __init__(
        self, template: ChatTemplate, folder: Path, names: tuple[str | None, str | None] = ("auto", "auto")
    ) -> None:
        registry = Registry.scan()
        given = dict(zip(("reasoning_parser", "tool_parser"), names, strict=True))
        found, _ = resolve_parsers(registry, TokenizerFiles.read(folder), given)
        self.names = (found["reasoning_parser"], found["tool_parser"])
        self.template = template
        binders = (bound_reasoning, bound_tools)
        self._plugins = [
            None if name is None else bind(import_planned(as_planned(registry.resolve(kind, name)))(), template)
            for kind, name, bind in zip(("reasoning_parser", "tool_parser"), self.names, binders, strict=True)
        ]

    def spec(self, switches: Mapping[str, Any], tools: Sequence[dict[str, Any]]) -> FormatSpec:
        """Return the format of a request."""
        reasoning, calls = self._plugins
        spec = FormatSpec()
        if reasoning is not None:
            spec = reasoning.spec(None, self.template, ParserRequest(template_kwargs=switches))
        return calls.extend(spec, tools) if calls is not None and tools else spec


def shown(template: ChatTemplate, case: Case, switches: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the prompt's tail and the reply as rendered behind it; None where the template does not show it all.

    What ends the turn ends the reply: some templates write the next prompt behind a call, asked for or not.
    """
    tools = TOOLS if case.calls else None
    try:
        prompt = template.render([QUESTION], tools=tools, template_kwargs=switches)
        whole = rendered(template, case.message, tools, switches)
        end = turn_end(template, switches, tools)
    except RequestError:
        return None
    found = behind(prompt, whole, case.reasoning)
    if found is None:
        return None
    tail, output = found[0], ended(found[1], end)
    parts = [case.reasoning, case.content, *(name for name, _ in case.calls)]
    parts += [str(value) for _, values in case.calls for value in values.values() if isinstance(value, int | str)]
    plain = output.replace('\\"', '"').replace("\\n", "\n")
    if any(part is not None and not prints(plain, part) for part in parts):
        return None
    if case.reasoning is None and (THOUGHT in output or goes_on_thinking(tail, output)):
        return None
    return tail, output


def goes_on_thinking(tail: str, output: str) -> bool:
    """Whether the template puts an answer into the thinking that its prompt opened, as if to go on with it."""
    opened = OPENED.search(tail)
    return opened is not None and f"</{opened[1]}>" not in output


def prints(text: str, part: str) -> bool:
    """Whether a part stands in the text, escaped in some way or not."""
    escaped = text.replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    found = (
        part in text
        or part in escaped
        or part in text.replace("\\u003c", "<").replace("\\u003e", ">").replace("\\u0026", "&")
    )
    return found or part.lower() in text


def rendered(template: ChatTemplate, reply: dict[str, Any], tools: Any, switches: Mapping[str, Any]) -> str:
    """Render a question and a reply."""
    return template.render([QUESTION, reply], tools=tools, template_kwargs=switches, add_generation_prompt=False).text


def turn_end(template: ChatTemplate, switches: Mapping[str, Any], tools: Any) -> str:
    """Return what the template puts behind an answer."""
    return rendered(template, {"role": "assistant", "content": "sentinel"}, tools, switches).rpartition("sentinel")[2]


def ended(output: str, end: str) -> str:
    """Return a reply as a model generates it: without what ends a turn, and nothing behind that."""
    output = min((output.partition(text)[0] for text in LAST), key=len)
    if end and output.endswith(end):
        return output.removesuffix(end)
    units = UNIT.findall(end)
    stops = [text for text in TURN_ENDS if output.endswith(text)]
    return (
        output.partition(units[-1])[0]
        if units and units[-1] in output
        else output.removesuffix(stops[0] if stops else "")
    )


def wrong(parsers: Parsers, case: Case, switches: Mapping[str, Any]) -> str | bool:
    """Say how a reply is read wrong; False: it is not; True: it does not count."""
    found = shown(parsers.template, case, switches)
    if found is None:
        return True
    tail, output = found
    machine = make_parser(parsers.spec(switches, TOOLS if case.calls else []))
    machine.prime(tail)
    reply = parse_full(machine, text=output)
    calls = [(call.name, loaded(call.arguments)) for call in reply.tool_calls]
    content = reply.content if case.content is None or reply.content is None else reply.content.lstrip(" ")
    got = (reply.reasoning, content, calls)
    want = (case.reasoning, case.content, [*case.calls])
    return False if got == want else f"{tail[-40:]!r} {output!r}\n      gives {got!r}"


def num_right(parsers: Parsers) -> int:
    """Return how many replies are read back."""
    return sum(wrong(parsers, case, switches) is False for case in CASES for switches in SWITCHES.values())


def better(parsers: Parsers, folder: Path) -> str | None:
    """Return other parsers that read back more replies than those chosen do, or none."""
    registry, chosen, best = Registry.scan(), parsers.names, num_right(parsers)
    for place, kind in enumerate(("reasoning_parser", "tool_parser")):
        for name in [None, *(record.name for record in registry.of_kind(kind))]:
            names = (name, chosen[1]) if place == 0 else (chosen[0], name)
            if num_right(Parsers(parsers.template, folder, names)) > best:
                return f"{names[0]} + {names[1]}"
    return None


def loaded(text: str) -> Any:
    """Return what JSON means, or the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def templates(folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each template, each text once."""
    seen = set()
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.jinja")):
            source = path.read_text(encoding="utf-8")
            if source not in seen:
                seen.add(source)
                yield path.stem, source


def measured(name: str, source: str, *, verbose: bool) -> tuple[Counter[str], Counter[str]]:
    """Print a template's row; return what counts and what is right, by column."""
    counts: Counter[str] = Counter()
    right: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        config = {"chat_template": source, "tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            template = ChatTemplate({"default": source}, special_tokens=SPECIAL)
        except ModelError as error:
            print(f"{name:60} {error}")
            return counts, right
        parsers = Parsers(template, Path(folder))
        lines = []
        for case in CASES:
            results = [(label, wrong(parsers, case, switches)) for label, switches in SWITCHES.items()]
            results = [(label, result) for label, result in results if result is not True]
            if not results:
                continue
            bad = [f"    {case.column} {label}: {result}" for label, result in results if result]
            lines += bad
            counts[case.column] += 1
            right[case.column] += not bad
        others = better(parsers, Path(folder)) if lines else None
    cells = " ".join(f"{f'{right[c]}/{counts[c]}' if counts[c] else '-':>9}" for c in COLUMNS)
    counts["detection"] += 1
    right["detection"] += not lines
    counts["wrong"] += others is not None
    print(f"{name:50} {parsers.names[0]!s:18} {parsers.names[1]!s:18} {cells}")
    if others is not None:
        print(f"    wrong: {others} reads back more")
    if verbose and lines:
        print("\n".join(lines))
    return counts, right


def main() -> int:
    """Print a row for each template and the sums; 1 if there was none, or one for which other parsers read more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("-v", "--verbose", action="store_true")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    right: Counter[str] = Counter()
    number = 0
    for name, source in templates(given.folders):
        number += 1
        more_counts, more_right = measured(name, source, verbose=given.verbose)
        counts += more_counts
        right += more_right
    sums = "; ".join(
        f"{c} {right[c]}/{counts[c]} = {100 * right[c] / max(counts[c], 1):.1f} %" for c in (*COLUMNS, "detection")
    )
    print(f"{number} templates: {sums}; wrong parsers {counts['wrong']}")
    return 0 if number and not counts["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
