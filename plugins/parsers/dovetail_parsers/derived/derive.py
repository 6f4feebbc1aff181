"""A reply's format, read off the chat template that teaches it, and off `response_template` where that shows nothing.

Thinking's markers are those that the core reads off every template (`dovetail.sdk.formats.reply_markers`). The shape of
calls is read off what the template writes for replies made of sentinels, and put to the test: it must read the same
replies back, or it is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dovetail.contracts.output import FormatSpec, Markers, SampleReply, TemplateView, WrittenReply
from dovetail.sdk.formats.matcher import common_len
from dovetail.sdk.formats.reply_markers import ReplyMarkers, reply_markers
from dovetail.sdk.formats.samples import ANSWER, ANSWERED_AND_CALLED, CALLED, NAMES, TWICE, UNIT, reads_all, tools_of
from dovetail_parsers.derived.call_shape import CallShape, read_shape
from dovetail_parsers.derived.regions import Regions
from dovetail_parsers.derived.response_template import TemplateFormat, declared


@dataclass(frozen=True, slots=True)
class Derived:
    """What is known of replies; None for what is not.

    Attributes:
        reasoning: Where thinking stands.
        answer: What stands around an answer.
        calls: How calls are written.
        regions: What `response_template` says, where the template shows nothing, and markers do not say it.
    """

    reasoning: Markers | None = None
    answer: Markers | None = None
    calls: CallShape | None = None
    regions: Regions | None = None

    def spec(self, tools: Sequence[Mapping[str, Any]] = ()) -> FormatSpec:
        """Return the format of a request."""
        if self.regions is not None:
            return self.regions.spec(tools)
        calls = self.calls.tool_format(tools) if self.calls is not None and tools else None
        return FormatSpec(reasoning=self.reasoning, answer=self.answer, tools=calls)


@lru_cache(maxsize=8)
def derive(template: TemplateView) -> Derived:
    """Read a format off a template; what it does not show is taken from the model's own description of replies."""
    found = _shown(template)
    said = declared(template.response_template) if template.source else TemplateFormat()
    if said.regions is not None and found.reasoning is None and found.calls is None:
        return replace(found, regions=said.regions)
    parts = {name: getattr(said, name) for name in ("reasoning", "calls") if getattr(found, name) is None}
    if parts.get("reasoning") is not None and found.answer is None:
        parts["answer"] = said.answer
    return replace(found, **{name: part for name, part in parts.items() if part is not None})


def _shown(template: TemplateView) -> Derived:
    """Return what the template shows."""
    markers = reply_markers(template)
    found = Derived(markers.reasoning, markers.answer)
    return found if markers.head is None else replace(found, calls=_calls(template, markers, found))


def _calls(template: TemplateView, markers: ReplyMarkers, found: Derived) -> CallShape | None:
    """Read the shape of calls off two of them, or one, behind an answer or alone; None where none reads them back."""
    for calls in (TWICE.calls, TWICE.calls[:1]):
        for reply in (SampleReply(content=ANSWER, calls=calls), SampleReply(calls=calls)):
            shown = template.written(reply)
            if shown is None:
                continue
            shape = read_shape(_from_calls(shown, reply, markers.head or ""), markers.turn_end)
            if shape is None:
                continue
            spec = replace(found, calls=shape).spec(tools_of((TWICE,)) or ())
            wanted = CALLED if shape.bare else (*CALLED, ANSWERED_AND_CALLED)  # what is bare stands alone
            if reads_all(template, spec, wanted, {}):
                return shape
    return None


def _from_calls(shown: WrittenReply, reply: SampleReply, head: str) -> str:
    """Return what the template writes from the first call on, as far as can be told."""
    if reply.content and 0 <= shown.whole.rfind(reply.content) < shown.whole.rfind(NAMES[0]):
        return shown.whole.rpartition(reply.content)[2]
    if shown.output is not None:
        return shown.output
    common = common_len(head, shown.whole)
    for unit in UNIT.finditer(shown.whole):
        if unit.start() < common < unit.end():
            common = unit.start()
    return shown.whole[common:]


def thinking_lines(found: Derived) -> dict[str, str]:
    """Say of thinking, and of what is in regions, what `dovetail info` shows."""
    lines = {}
    if found.regions is not None:
        lines["regions"] = ", ".join(field.part for field in found.regions.fields)
    if (markers := found.reasoning) is not None:
        start, end = markers.start + markers.after_start, markers.before_end + markers.end + markers.after_end
        lines["thinking"] = f"{start!r} … {end!r}"
    if (answer := found.answer) is not None:
        lines["answer"] = f"{answer.start + answer.after_start!r} … {answer.before_end + answer.end!r}"
    return lines


def call_lines(found: Derived) -> dict[str, str]:
    """Say the same of calls."""
    if (calls := found.calls) is None:
        return {}
    first = f"{calls.kind}, {calls.before + calls.start!r} … {calls.end!r}"
    return {"calls": first, **{f"  {key}": repr(value) for key, value in calls.shown.items()}}
