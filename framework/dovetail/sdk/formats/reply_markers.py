r"""Markers and newlines around thinking and answers, read off what a chat template writes.

```
<|im_start|>assistant\n<think>\n THOUGHT \n</think>\n\n ANSWER <|im_end|>\n
                      ------- -            -----------          -----------
                      start   after_start  end, its newlines    the turn's end
```

What is read off is put to the test: it must read the same replies back, or it is dropped. A template that refuses,
fails or draws lots gives nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dovetail.contracts.output import FormatSpec, Markers, TemplateView
from dovetail.sdk.formats.matcher import common_len
from dovetail.sdk.formats.samples import ANSWER, ANSWERED, SWITCHES, THOUGHT, THOUGHTS, UNIT, read_back

_PARTNERS = (("</", "<"), ("[/", "["), ("◁/", "◁"), ("END", "START"), ("suffix", "prefix"), ("end", "begin"))


@dataclass(frozen=True, slots=True)
class ReplyMarkers:
    """What a template writes around the parts of a reply; None for what it does not show.

    Attributes:
        reasoning: Where thinking stands.
        answer: What stands around an answer.
        head: A conversation up to the answer alone.
        turn_end: What stands behind a reply; empty where the template shows none.
    """

    reasoning: Markers | None = None
    answer: Markers | None = None
    head: str | None = None
    turn_end: str = ""


@lru_cache(maxsize=8)
def reply_markers(template: TemplateView) -> ReplyMarkers:
    """Read markers off a template; empty where it cannot be rendered or says nothing."""
    plain = template.written(ANSWERED) if template.source else None
    if plain is None or plain.output is None or ANSWER not in plain.whole:
        return ReplyMarkers()
    head, _, turn_end = plain.whole.rpartition(ANSWER)
    reasoning, answer = _thinking(template, head, turn_end)
    spec = FormatSpec(reasoning=reasoning, answer=answer)
    if reasoning is not None and not all(read_back(template, spec, reply) is not False for reply in THOUGHTS):
        reasoning = answer = None
    return ReplyMarkers(reasoning, answer, head, turn_end)


def _thinking(template: TemplateView, head: str, turn_end: str) -> tuple[Markers | None, Markers | None]:
    """Read the markers of thinking, and of an answer if it has any, off a reply with both."""
    for switches in SWITCHES:
        shown = template.written(THOUGHTS[0], switches)
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
        start = _start(before, end, head) or _in_prompt(shown.appended, before) or _added(before, head)
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
    units = UNIT.findall(before.rstrip())
    last = units[-1] if units and before.rstrip().endswith(units[-1]) else ""
    for closing, opening in _PARTNERS:
        if closing in end and end.replace(closing, opening, 1) in (last, *UNIT.findall(before)[-2:]):
            return end.replace(closing, opening, 1)
    if last and not head.rstrip().endswith(last):
        return last
    return next((end.replace(c, o, 1) for c, o in _PARTNERS if c in end and UNIT.fullmatch(end)), "")


def _added(before: str, head: str) -> str:
    """Return what stands before thinking and not before an answer alone, for markers that look like none."""
    common = common_len(before, head)
    return "" if any(unit.start() < common < unit.end() for unit in UNIT.finditer(before)) else before[common:]


def _in_prompt(tail: str, before: str) -> str:
    """Return what opens thinking in the prompt, where the template leaves it out of a history."""
    shared = next((size for size in range(len(tail), 0, -1) if before.endswith(tail[:size])), 0)
    return tail[shared:] if shared else ""


def _answer_start(between: str, head: str) -> str:
    """Return what stands before every answer, with thinking and without: a marker of its own and its newlines."""
    common = between[len(between) - common_len(between[::-1], head[::-1]) :]
    units = UNIT.findall(common)
    if not units or common.strip() == between.strip() or not common.rstrip().endswith(units[-1]):
        return ""
    return common[common.rfind(units[-1]) :]


def _answer(start: str, turn_end: str) -> Markers | None:
    """Return the markers around an answer."""
    if not start.strip():
        return None
    units = UNIT.findall(turn_end)
    if len(units) < 2:
        return None
    before, _, after = turn_end.partition(units[0])
    return Markers(
        start.strip(), units[0], start[len(start.rstrip()) :], before, after[: len(after) - len(after.lstrip())]
    )
