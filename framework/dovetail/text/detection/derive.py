r"""A reply's format, read off the chat template that teaches it.

`derive` renders replies made of sentinels (an answer; thinking and an answer; calls) and reads the markers, their
newlines and the shape of a call off what the template wrote around them:

```
<|im_start|>assistant\n<think>\n THOUGHT \n</think>\n\n ANSWER <|im_end|>\n
                      ------- -            -----------          -----------
                      start   after_start  end, its newlines    the turn's end
```

What is derived is put to the test: it must read the same replies back, or it is dropped. A template that refuses, fails
or draws lots gives nothing; all renders for one reply see the same time.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.output import FormatSpec, Markers, TemplateView
from dovetail.text.chat.moment import one_moment
from dovetail.text.chat.template import ChatTemplate, RenderedChat, common_len
from dovetail.text.detection.call_shape import FIRST, NAMES, SECOND, CallShape, read_shape
from dovetail.text.detection.response_template import declared
from dovetail.text.parsing.output import make_parser, parse_full
from dovetail.text.parsing.regions import Regions
from dovetail.text.parsing.reply import Folded

logger = logging.getLogger("dovetail.text")

QUESTION = {"role": "user", "content": "dovetail question"}
THOUGHT, ANSWER = "dovetail thought", "dovetail answer"
SWITCHES: tuple[Mapping[str, Any], ...] = ({}, {"enable_thinking": True, "thinking": True})
_UNIT = re.compile(r"<[^<>\s][^<>]*>|\[/?[A-Z_]{2,}\]|◁[^◁▷]*▷")
_PARTNERS = (("</", "<"), ("[/", "["), ("◁/", "◁"), ("END", "START"), ("suffix", "prefix"), ("end", "begin"))


@dataclass(frozen=True, slots=True)
class Call:
    """A call in a reply."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SampleReply:
    """A reply to render and to read back."""

    reasoning: str | None = None
    content: str | None = None
    calls: tuple[Call, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The reply as it stands in a history."""
        calls = [
            {
                "id": f"abcdef{number:03}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(self.calls)
        ]
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.content, **reasoning} | ({"tool_calls": calls} if calls else {})


_ONE, _TWO = Call(NAMES[0], FIRST), Call(NAMES[1], SECOND)
TWICE = SampleReply(calls=(_ONE, _TWO))
THOUGHTS = (SampleReply(THOUGHT, ANSWER),)
CALLED = (SampleReply(calls=(_ONE,)), TWICE)
ANSWERED_AND_CALLED = SampleReply(content=ANSWER, calls=(_ONE,))


def tools_of(replies: Sequence[SampleReply]) -> list[dict[str, Any]] | None:
    """Return tools that fit the calls of replies; None where there are none."""
    found = {call.name: call.arguments for reply in replies for call in reply.calls}
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "",
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": "string", "description": ""} for key in arguments},
                    "required": [],
                },
            },
        }
        for name, arguments in found.items()
    ] or None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A reply as the template writes it behind a prompt.

    Attributes:
        whole: The conversation with the reply.
        output: What of it stands behind the prompt, or, where the template writes a history in another way (without the
            thinking that the prompt opens), behind what they share; None where they share nothing of the reply.
        tail: What the template appended to the prompt, as far as the reply follows it.
    """

    whole: str
    output: str | None
    tail: str


def rendered(template: ChatTemplate, reply: SampleReply, switches: Mapping[str, Any]) -> Rendered | None:
    """Render a reply behind the prompt for it; None where the template refuses or fails.

    Every parser is asked whether it reads the same few replies back: a template writes each of them once.
    """
    return _rendered(template, json.dumps(reply.message), json.dumps(dict(switches)))


@lru_cache(maxsize=64)
def _rendered(template: ChatTemplate, written: str, switches: str) -> Rendered | None:
    if template.varies:
        return None
    message, given = json.loads(written), json.loads(switches)
    tools = tools_of((TWICE,)) if "tool_calls" in message else None
    try:
        with one_moment():
            prompt = template.render([QUESTION], tools=tools, template_kwargs=given)
            whole = template.render(
                [QUESTION, message], tools=tools, template_kwargs=given, add_generation_prompt=False
            ).text
    except RequestError:
        return None
    found = None if "'role'" in whole else behind(prompt, whole, message.get("reasoning_content"))
    # Where the role's name stands in quotes, the template writes data.
    return Rendered(whole, None, prompt.tail) if found is None else Rendered(whole, found[1], found[0])


def behind(prompt: RenderedChat, whole: str, thought: str | None) -> tuple[str, str] | None:
    """Return what a reply follows, and the reply, in a conversation; None where it does not follow the prompt.

    That is what the template appended to the prompt, as far as the conversation has it, too. It may write it with other
    space, or leave out what opens thinking in the prompt.

    Args:
        prompt: The prompt for the reply.
        whole: The conversation with it.
        thought: The reply's reasoning, if it has any.
    """
    common = common_len(prompt.text, whole)
    for unit in _UNIT.finditer(whole, max(common - 80, 0)):
        if unit.start() < common < unit.end():
            common = unit.start()
    shared = common - (len(prompt.text) - len(prompt.tail))
    if shared < 0:
        return None
    rest = prompt.tail[shared:].strip()
    if rest and (place := _after(whole, common, rest)) >= 0:
        return prompt.tail, whole[place:].lstrip()
    if not prompt.tail[:shared].strip() and prompt.tail.strip():
        return None
    output = whole[common:]
    opened = bool(thought and rest) and rest not in output and output.lstrip().startswith(thought or "")
    return prompt.tail if opened else prompt.tail[:shared], output


def _after(text: str, begin: int, part: str) -> int:
    """Return where a text ends that stands at a place, whatever space stands in and before it; -1: it does not."""
    pattern = r"\s*" + r"\s*".join(re.escape(char) for char in "".join(part.split()))
    found = re.compile(pattern).match(text, begin)
    return -1 if found is None else found.end()


@lru_cache(maxsize=8)
def turn_end(template: ChatTemplate) -> str:
    """Return what the template writes behind an answer; empty where it shows none."""
    plain = rendered(template, SampleReply(content=ANSWER), {})
    return "" if plain is None else plain.whole.rpartition(ANSWER)[2] if ANSWER in plain.whole else ""


@dataclass(frozen=True, slots=True)
class Derived:
    """What a template says of replies; None for what it does not say.

    Attributes:
        reasoning: Where thinking stands.
        answer: What stands around an answer.
        calls: How calls are written.
        turn_end: What stands behind a reply.
        declared: Names of the parts that the template does not show, and `response_template` says.
        regions: What `response_template` says, where the template shows nothing, and markers do not say it.
    """

    reasoning: Markers | None = None
    answer: Markers | None = None
    calls: CallShape | None = None
    turn_end: str = ""
    declared: frozenset[str] = frozenset()
    regions: Regions | None = None

    def says(self, part: str) -> bool:
        """Whether anything is known of a part of replies, `reasoning` or `calls`."""
        if self.regions is not None:
            return self.regions.has("thinking" if part == "reasoning" else "tool_calls")
        return getattr(self, part) is not None

    def spec(self, tools: Sequence[Mapping[str, Any]] = ()) -> FormatSpec:
        """Return the format of a request."""
        if self.regions is not None:
            return self.regions.spec(tools)
        calls = self.calls.tool_format(tools) if self.calls is not None and tools else None
        return FormatSpec(reasoning=self.reasoning, answer=self.answer, tools=calls)


def derive(template: TemplateView) -> Derived:
    """Read a format off a template; empty where the template cannot be rendered or says nothing."""
    if not isinstance(template, ChatTemplate) or not template.source:
        return Derived()
    return _with_declared(template)


@lru_cache(maxsize=8)
def _with_declared(template: ChatTemplate) -> Derived:
    """Take what the template does not show from the model's own description of replies."""
    found, said = _derive(template), declared(template.response_template)
    if said.regions is not None and found.reasoning is None and found.calls is None:
        return replace(found, regions=said.regions, declared=frozenset(("reasoning", "calls")))
    parts = {name: getattr(said, name) for name in ("reasoning", "calls") if getattr(found, name) is None}
    if parts.get("reasoning") is not None and found.answer is None:
        parts["answer"] = said.answer
    parts = {name: part for name, part in parts.items() if part is not None}
    return replace(found, **parts, declared=frozenset(parts))


@lru_cache(maxsize=8)
def _derive(template: ChatTemplate) -> Derived:
    plain = rendered(template, SampleReply(content=ANSWER), {})
    if plain is None or plain.output is None or ANSWER not in plain.whole:
        return Derived()
    head, _, turn_end = plain.whole.rpartition(ANSWER)
    reasoning, answer = _thinking(template, head, turn_end)
    found = Derived(reasoning, answer, None, turn_end)
    if reasoning is not None and not all(read_back(template, found.spec(), reply) is not False for reply in THOUGHTS):
        found = Derived(turn_end=turn_end)
    return replace(found, calls=_calls(template, head, found))


def _thinking(template: ChatTemplate, head: str, turn_end: str) -> tuple[Markers | None, Markers | None]:
    """Read the markers of thinking, and of an answer if it has any, off a reply with both."""
    for switches in SWITCHES:
        shown = rendered(template, SampleReply(THOUGHT, ANSWER), switches)
        if shown is None:
            continue
        before, found, rest = shown.whole.partition(THOUGHT)
        between, found_too, _ = rest.partition(ANSWER)
        if not found or not found_too or not between.strip():
            continue
        answer_start = _answer_start(between, head)
        between = between.removesuffix(answer_start)
        answer = _answer(answer_start, turn_end)
        end = between.strip()
        start = _start(before, end, head) or _in_prompt(template, before, switches) or _added(before, head)
        if not end or not start.strip():
            continue
        if start.strip() != start:
            before, start = start, start.strip()
        lead = len(between) - len(between.lstrip())
        trail = len(between.rstrip())
        after_start = before[len(before.rstrip()) :]
        markers = Markers(start, end, after_start, between[:lead], between[trail:], ended_by_tools=True)
        return markers, answer
    return None, None


def _start(before: str, end: str, head: str) -> str:
    """Return the marker that opens thinking: what stands last before it, unless that opens every reply."""
    units = _UNIT.findall(before.rstrip())
    last = units[-1] if units and before.rstrip().endswith(units[-1]) else ""
    for closing, opening in _PARTNERS:
        if closing in end and end.replace(closing, opening, 1) in (last, *_UNIT.findall(before)[-2:]):
            return end.replace(closing, opening, 1)
    if last and not head.rstrip().endswith(last):
        return last
    return next((end.replace(c, o, 1) for c, o in _PARTNERS if c in end and _UNIT.fullmatch(end)), "")


def _added(before: str, head: str) -> str:
    """Return what stands before thinking and not before an answer alone, for markers that look like none."""
    common = common_len(before, head)
    return "" if any(unit.start() < common < unit.end() for unit in _UNIT.finditer(before)) else before[common:]


def _in_prompt(template: ChatTemplate, before: str, switches: Mapping[str, Any]) -> str:
    """Return what opens thinking in the prompt, where the template leaves it out of a history."""
    try:
        tail = template.render([QUESTION], template_kwargs=switches).tail
    except RequestError:
        return ""
    shared = next((size for size in range(len(tail), 0, -1) if before.endswith(tail[:size])), 0)
    return tail[shared:] if shared else ""


def _answer_start(between: str, head: str) -> str:
    """Return what stands before every answer, with thinking and without: a marker of its own and its newlines."""
    common = between[len(between) - common_len(between[::-1], head[::-1]) :]
    units = _UNIT.findall(common)
    if not units or common.strip() == between.strip() or not common.rstrip().endswith(units[-1]):
        return ""
    return common[common.rfind(units[-1]) :]


def _answer(start: str, turn_end: str) -> Markers | None:
    """Return the markers around an answer."""
    if not start.strip():
        return None
    units = _UNIT.findall(turn_end)
    if len(units) < 2:
        return None
    before, _, after = turn_end.partition(units[0])
    return Markers(
        start.strip(), units[0], start[len(start.rstrip()) :], before, after[: len(after) - len(after.lstrip())]
    )


def _calls(template: ChatTemplate, head: str, found: Derived) -> CallShape | None:
    """Read the shape of calls off two of them, or one, behind an answer or alone; None where none reads them back."""
    for calls in (TWICE.calls, TWICE.calls[:1]):
        for reply in (SampleReply(content=ANSWER, calls=calls), SampleReply(calls=calls)):
            shown = rendered(template, reply, {})
            if shown is None:
                continue
            shape = read_shape(_from_calls(shown, reply, head), found.turn_end)
            if shape is None:
                continue
            spec = replace(found, calls=shape).spec(tools_of((TWICE,)) or ())
            wanted = CALLED if shape.bare else (*CALLED, ANSWERED_AND_CALLED)  # what is bare stands alone
            if reads_all(template, spec, wanted, {}):
                return shape
    return None


def _from_calls(shown: Rendered, reply: SampleReply, head: str) -> str:
    """Return what the template writes from the first call on, as far as can be told."""
    if reply.content and 0 <= shown.whole.rfind(reply.content) < shown.whole.rfind(NAMES[0]):
        return shown.whole.rpartition(reply.content)[2]
    if shown.output is not None:
        return shown.output
    common = common_len(head, shown.whole)
    for unit in _UNIT.finditer(shown.whole):
        if unit.start() < common < unit.end():
            common = unit.start()
    return shown.whole[common:]


def read_back(
    template: ChatTemplate, spec: FormatSpec, reply: SampleReply, switches: Mapping[str, Any] | None = None
) -> bool | None:
    """Say whether a format reads back a reply that the template renders; None where the template does not show it."""
    results = [_read_back(template, spec, reply, each) for each in ((switches,) if switches is not None else SWITCHES)]
    return False if False in results else True if True in results else None


def reads_all(
    template: ChatTemplate, spec: FormatSpec, replies: Sequence[SampleReply], switches: Mapping[str, Any] | None = None
) -> bool | None:
    """Whether a format reads back every one of the replies that the template shows; None where it shows none."""
    results = [read_back(template, spec, reply, switches) for reply in replies]
    return False if False in results else True if True in results else None


def shown_text(template: ChatTemplate, replies: Sequence[SampleReply], switches: Mapping[str, Any]) -> str:
    """Return the replies that a template shows, each with what the prompt begins of it; empty where it shows none."""
    shown = [_shown(template, reply, switches) for reply in replies]
    return "\n".join(one.tail + (one.output or "") for one in shown if one is not None)


def _shown(template: ChatTemplate, reply: SampleReply, switches: Mapping[str, Any]) -> Rendered | None:
    """Return a reply of which the template writes all parts but the answer behind the prompt; None: it does not."""
    shown = rendered(template, reply, switches)
    return shown if shown is not None and shown.output and all(part in shown.output for part in _parts(reply)) else None


def _parts(reply: SampleReply) -> list[str]:
    """Return the thinking of a reply, and the names and texts of its calls."""
    thoughts = [] if reply.reasoning is None else [reply.reasoning]
    values = [value for call in reply.calls for value in call.arguments.values() if isinstance(value, str)]
    return [*thoughts, *(call.name for call in reply.calls), *values]


def _read_back(
    template: ChatTemplate, spec: FormatSpec, reply: SampleReply, switches: Mapping[str, Any]
) -> bool | None:
    shown = _shown(template, reply, switches)
    if shown is None or shown.output is None:
        return None
    content = reply.content if reply.content is not None and reply.content in shown.output else None
    parser = make_parser(spec)
    parser.prime(shown.tail)
    got = parse_full(parser, text=_ended(shown.output, _parts(reply), turn_end(template) if reply.calls else ""))
    return _agrees(got, SampleReply(reply.reasoning, content, reply.calls), shown.whole)


def _ended(output: str, parts: Sequence[str], end: str) -> str:
    """Return a reply up to the first end of a turn behind all its parts: some templates write on."""
    last = max((output.rfind(part) for part in parts), default=0)
    place = output.find(end, last) if end.strip() else -1
    return output if place < 0 else output[:place]


def _agrees(got: Folded, reply: SampleReply, whole: str) -> bool:
    """Whether what was read is the reply, but for what ends the turn."""
    if reply.reasoning is not None and got.reasoning != reply.reasoning:
        return False
    content, wanted = (got.content or "").strip(), reply.content or ""
    if not content.startswith(wanted) or not whole.rstrip().endswith(content.removeprefix(wanted)):
        return False
    calls = [(call.name, _loaded(call.arguments)) for call in got.tool_calls]
    return calls == [(call.name, dict(call.arguments)) for call in reply.calls]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def describe(found: Derived) -> Iterator[tuple[str, str]]:
    """Say what was derived, for `dovetail info`."""
    if found.regions is not None:
        yield "regions", ", ".join(field.part for field in found.regions.fields)
    if (markers := found.reasoning) is not None:
        yield (
            "thinking",
            f"{markers.start + markers.after_start!r} … {markers.before_end + markers.end + markers.after_end!r}",
        )
    if (answer := found.answer) is not None:
        yield "answer", f"{answer.start + answer.after_start!r} … {answer.before_end + answer.end!r}"
    if (calls := found.calls) is not None:
        yield "calls", f"{calls.kind}, {calls.before + calls.start!r} … {calls.end!r}"
        yield from ((f"  {key}", repr(value)) for key, value in calls.shown.items())
