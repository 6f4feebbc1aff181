"""Sample replies for a chat template to write, and reading them back: the test of a format against a template.

The replies are made of sentinels, so that a marker is what stands between them. `reply_markers.py` reads thinking's off
what the template wrote. Whether a format is the model's is told by `reads_all`: the format reads, of every reply that
the template shows behind a prompt, what was given to the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from dovetail.contracts.output import FormatSpec, SampleCall, SampleReply, TemplateView, WrittenReply
from dovetail.sdk.formats.output import make_parser, parse_full
from dovetail.sdk.formats.reply import Folded

THOUGHT, ANSWER = "dovetail thought", "dovetail answer"
NAMES = ("dovetail_alpha", "dovetail_beta")
KEYS = ("dovetail_key_one", "dovetail_key_two", "dovetail_key_three")
VALUES = ("dovetail value one", "dovetail value two", "dovetail value three")
FIRST = {KEYS[0]: VALUES[0], KEYS[1]: VALUES[1]}
SECOND = {KEYS[2]: VALUES[2]}
SWITCHES: tuple[Mapping[str, Any], ...] = ({}, {"enable_thinking": True, "thinking": True})
"""`chat_template_kwargs` with which a template may show thinking."""
UNIT = re.compile(r"<{1,3}[^<>\s][^<>]*>{1,3}|\[/?[A-Z_]{2,}\]|◁[^◁▷]*▷")
"""A text that looks like a marker."""
_ONE, _TWO = SampleCall(NAMES[0], FIRST), SampleCall(NAMES[1], SECOND)
ANSWERED = SampleReply(content=ANSWER)
TWICE = SampleReply(calls=(_ONE, _TWO))
THOUGHTS = (SampleReply(THOUGHT, ANSWER),)
CALLED = (SampleReply(calls=(_ONE,)), TWICE)
ANSWERED_AND_CALLED = SampleReply(content=ANSWER, calls=(_ONE,))
CALLED_BEHIND = (SampleReply(content=ANSWER, calls=(_ONE, _TWO)), ANSWERED_AND_CALLED)


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


@lru_cache(maxsize=8)
def _turn_end(template: TemplateView) -> str:
    """Return what the template writes behind an answer; empty where it shows none."""
    plain = template.written(ANSWERED)
    return "" if plain is None else plain.whole.rpartition(ANSWER)[2] if ANSWER in plain.whole else ""


def read_back(
    template: TemplateView, spec: FormatSpec, reply: SampleReply, switches: Mapping[str, Any] | None = None
) -> bool | None:
    """Say whether a format reads back a reply that the template renders; None where the template does not show it."""
    results = [_read_back(template, spec, reply, each) for each in ((switches,) if switches is not None else SWITCHES)]
    return False if False in results else True if True in results else None


def reads_all(
    template: TemplateView, spec: FormatSpec, replies: Sequence[SampleReply], switches: Mapping[str, Any] | None = None
) -> bool | None:
    """Whether a format reads back every one of the replies that the template shows; None where it shows none."""
    results = [read_back(template, spec, reply, switches) for reply in replies]
    return False if False in results else True if True in results else None


def shown_text(template: TemplateView, replies: Sequence[SampleReply], switches: Mapping[str, Any]) -> str:
    """Return the replies that a template shows, each with what the prompt begins of it; empty where it shows none."""
    shown = [_shown(template, reply, switches) for reply in replies]
    return "\n".join(one.tail + (one.output or "") for one in shown if one is not None)


def _shown(template: TemplateView, reply: SampleReply, switches: Mapping[str, Any]) -> WrittenReply | None:
    """Return a reply of which the template writes all parts but the answer behind the prompt; None: it does not."""
    shown = template.written(reply, switches)
    return shown if shown is not None and shown.output and all(part in shown.output for part in _parts(reply)) else None


def _parts(reply: SampleReply) -> list[str]:
    """Return the thinking of a reply, and the names and texts of its calls."""
    thoughts = [] if reply.reasoning is None else [reply.reasoning]
    values = [value for call in reply.calls for value in call.arguments.values() if isinstance(value, str)]
    return [*thoughts, *(call.name for call in reply.calls), *values]


def _read_back(
    template: TemplateView, spec: FormatSpec, reply: SampleReply, switches: Mapping[str, Any]
) -> bool | None:
    shown = _shown(template, reply, switches)
    if shown is None or shown.output is None:
        return None
    content = reply.content if reply.content is not None and reply.content in shown.output else None
    parser = make_parser(spec)
    parser.prime(shown.tail)
    got = parse_full(parser, text=_ended(shown.output, _parts(reply), _turn_end(template) if reply.calls else ""))
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
