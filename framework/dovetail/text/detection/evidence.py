"""What a chat template says of replies: only there do the texts count by which a parser knows the template.

A template may name other families' tags and never write them: in its system message, in a branch that no conversation
reaches, in a constant that it does not print. So conversations are rendered, with and without what a text is to be
evidence of, and a text counts where it stands more often with it. Names in the template's code count, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.output import SampleReply
from dovetail.sdk.formats.samples import ANSWERED, CALLED_BEHIND, NAMES, SWITCHES, THOUGHTS, TWICE, UNIT, tools_of
from dovetail.text.chat.deterministic import frozen_render
from dovetail.text.chat.rendered import QUESTION, message_of
from dovetail.text.chat.template import ChatTemplate

Conversation = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, Mapping[str, Any]]
"""Messages, tools, `chat_template_kwargs`."""
SYSTEM = {"role": "system", "content": "dovetail instruction"}
RESULT = {"role": "tool", "tool_call_id": "abcdef000", "name": NAMES[0], "content": "dovetail result"}
THINKING = (*SWITCHES, {"enable_thinking": False, "thinking": False})
_ASKED: Conversation = ([QUESTION], None, {})
_BEFORE, _BEHIND = "dovetail before ", " dovetail behind"
_BRACKETS = frozenset("<>[]◁▷")
_TAUGHT = re.compile(r"\s*[^\s\w]*\s*(?!(?:and|or|nor|to|with)\b)\w")
"""How a thought is shown between two tags: a word stands behind the first that does not only join it to the next."""


class TemplateEvidence:
    """What one template says of thinking, and of calls. It renders at first use, each conversation once."""

    def __init__(self, template: ChatTemplate, declared: str = "") -> None:
        """Take the template.

        Args:
            template: With the limits of a start.
            declared: What the tokenizer says of replies; all of it counts.
        """
        self._template, self._declared = template, declared
        self._rendered: dict[str, str | None] = {}
        self._known: dict[tuple[str, str], bool] = {}

    def says(self, text: str, kind: str) -> bool:
        """Whether a text is evidence for parsers of a kind.

        Where the template refuses a conversation with calls, or draws lots, all that it may print is.
        """
        key = text, kind
        if key not in self._known:
            self._known[key] = text in self._declared or text in self._template.code or self._writes(text, kind)
        return self._known[key]

    def _writes(self, text: str, kind: str) -> bool:
        if any(more.count(text) > less.count(text) for less, more in self._pairs):
            return True
        prompt = self._text(_ASKED)
        if kind == "reasoning_parser" and prompt is not None:
            if self._is_taught(text, prompt) or self._is_read(text) or text in prompt.partition(" ")[0]:
                return True
        elif prompt is not None and self._shows_calls:
            return False
        return text in self._template.printable and text not in (prompt or "")

    @cached_property
    def _shows_calls(self) -> bool:
        """Whether the template takes a conversation with calls."""
        return self._text(([QUESTION, message_of(TWICE), RESULT], tools_of((TWICE,)), {})) is not None

    @cached_property
    def _pairs(self) -> list[tuple[str, str]]:
        """Texts of conversations without and with what the evidence is of."""
        tails = [("", tail) for tail in self.tails]
        pairs = [(self._text(less), self._text(more)) for less, more in _conversations()]
        return tails + [(less, more) for less, more in pairs if less is not None and more is not None]

    @cached_property
    def tails(self) -> list[str]:
        """What the template appends to a prompt, with thinking switched each way."""
        found = []
        for switches in () if self._template.varies else THINKING:
            try:
                with frozen_render():
                    found.append(self._template.render([QUESTION], template_kwargs=switches).tail or "")
            except RequestError:
                continue
        return found

    def _text(self, conversation: Conversation) -> str | None:
        """Render a conversation, without the header of a next reply; None where the template refuses or draws lots."""
        if self._template.varies:
            return None
        key, (messages, tools, switches) = json.dumps(conversation), conversation
        if key not in self._rendered:
            try:
                with frozen_render():
                    self._rendered[key] = self._template.render(
                        messages, tools=tools, template_kwargs=switches, add_generation_prompt=False
                    ).text
            except RequestError:
                self._rendered[key] = None
        return self._rendered[key]

    def _is_read(self, text: str) -> bool:
        """Whether the template looks for it in a reply of the history: what stands around it does not come back."""
        said = [f"{_BEFORE}{_BEHIND}", f"{_BEFORE}{text}{_BEHIND}"]
        replies = [[QUESTION, message_of(SampleReply(content=each)), QUESTION, message_of(ANSWERED)] for each in said]
        plain, held = (self._text((messages, None, {})) for messages in replies)
        return said[0] in (plain or "") and held is not None and said[1] not in held

    def _is_taught(self, text: str, prompt: str) -> bool:
        """Whether a prompt shows it as one of two tags with a thought between them, or, if it is no tag, holds it."""
        if not _BRACKETS & set(text):
            return text in prompt
        for unit in UNIT.finditer(prompt) if (name := text.strip("<>[]/")) else ():
            end = prompt.find(unit[0][0] + "/" + unit[0][1:], unit.end())
            if end > 0 and name in unit[0] and _TAUGHT.match(prompt, unit.end(), end):
                return True
        return False


def _conversations() -> Iterator[tuple[Conversation, Conversation]]:
    """Yield conversations without and with calls or thinking."""
    tools = tools_of((TWICE,))
    for before in ([QUESTION], [SYSTEM, QUESTION]):
        yield (before, None, {}), (before, tools, {})
    for reply in (TWICE, *CALLED_BEHIND):
        yield _ASKED, ([QUESTION, message_of(reply)], tools, {})
        yield _ASKED, ([QUESTION, message_of(reply), RESULT], tools, {})
    for switches in THINKING:
        yield _ASKED, ([QUESTION], None, switches)
        for reply in (*THOUGHTS, ANSWERED):
            yield ([QUESTION], None, switches), ([QUESTION, message_of(reply)], None, switches)
