"""What a chat template wrote: a prompt, or a reply behind one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.output import SampleReply, WrittenReply
from dovetail.sdk.formats.matcher import common_len
from dovetail.sdk.formats.samples import UNIT
from dovetail.text.chat.deterministic import frozen_render

QUESTION = {"role": "user", "content": "dovetail question"}


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation.

    Attributes:
        text: The prompt. Tokenize it with `add_special_tokens=False`.
        tail: What the template appended after the conversation, for priming the output parser: the generation prompt,
            or the assistant's header and partial message when continuing one.
    """

    text: str
    tail: str


def message_of(reply: SampleReply) -> dict[str, Any]:
    """Return a reply as it stands in a history."""
    calls = [
        {
            "id": f"abcdef{number:03}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for number, call in enumerate(reply.calls)
    ]
    reasoning = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
    return {"role": "assistant", "content": reply.content, **reasoning} | ({"tool_calls": calls} if calls else {})


@lru_cache(maxsize=64)
def written(render: Callable[..., RenderedChat], message: str, tools: str, switches: str) -> WrittenReply | None:
    """Render a reply behind the prompt for it, at one moment; None where the template refuses or fails.

    Every parser is asked whether it reads the same few replies back: a template writes each of them once.

    Args:
        render: `ChatTemplate.render`.
        message: The reply's message, as JSON.
        tools: Those of the prompt, as JSON.
        switches: `chat_template_kwargs`, as JSON.
    """
    reply, given = json.loads(message), {"tools": json.loads(tools), "template_kwargs": json.loads(switches)}
    try:
        with frozen_render():
            prompt = render([QUESTION], **given)
            whole = render([QUESTION, reply], **given, add_generation_prompt=False).text
    except RequestError:
        return None
    found = None if "'role'" in whole else behind(prompt, whole, reply.get("reasoning_content"))
    # Where the role's name stands in quotes, the template writes data.
    if found is None:
        return WrittenReply(whole, None, prompt.tail, prompt.tail)
    return WrittenReply(whole, found[1], found[0], prompt.tail)


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
    for unit in UNIT.finditer(whole, max(common - 80, 0)):
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
