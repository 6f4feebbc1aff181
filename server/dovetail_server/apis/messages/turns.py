"""A Messages conversation as the chat API has it: results of tools are turns of their own, parts of a turn are one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.messages import schema as ms
from dovetail_server.apis.responses.items import decode_reasoning

ERROR_PREFIX = "Error: "
Readable = ms.TextBlock | ms.DocumentBlock | ms.SearchResultBlock
Part = str | dict[str, Any]
"""A text, or an image's part."""
AnyBlock = Readable | ms.ImageBlock | ms.ThinkingBlock | ms.RedactedThinkingBlock | ms.ToolUseBlock | ms.ToolResultBlock


def chat_messages(request: ms.MessagesPrompt) -> list[dict[str, Any]]:
    """Return the conversation as chat messages."""
    conversation = TurnMerger()
    if isinstance(request.system, str):
        conversation.add("system", [request.system])
    elif request.system:
        conversation.add("system", [block.text for block in request.system])
    for at, given in enumerate(request.messages):
        message = ms.AnthropicMessage.model_validate(given)
        blocks: Sequence[AnyBlock] = (
            [ms.TextBlock(type="text", text=message.content, citations=None)]
            if isinstance(message.content, str)
            else message.content
        )
        param = f"messages[{at}].content"
        if message.role == "assistant":
            conversation.add_assistant(blocks, param)
        else:
            conversation.add_user(message.role, blocks, param)
    return [turn.message() for turn in conversation.turns]


@dataclass(slots=True)
class Turn:
    """A chat message that still grows. Its texts are put together once, at the end: there may be ten thousand."""

    role: str
    texts: list[Part] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str | None = None
    """Of a tool's result."""

    def message(self) -> dict[str, Any]:
        """Return it as the chat API has it."""
        if self.role == "tool":
            return {"role": "tool", "tool_call_id": self.call_id, "content": content_of(self.texts)}
        if self.role != "assistant":
            return {"role": self.role, "content": content_of(self.texts)}
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(map(str, self.texts)) if self.texts else None,
        }
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class TurnMerger:
    """Turns of a Messages request: results of tools are turns of their own, what one role says in a row is one."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    def add(self, role: str, texts: Sequence[Part]) -> None:
        """Add texts and images; a user's turn right before takes them in."""
        if texts:
            self._turn(role, goes_on=role == "user").texts.extend(texts)

    def add_assistant(self, blocks: Sequence[AnyBlock], param: str) -> None:
        """Add an assistant's message."""
        turn = self._turn("assistant", goes_on=True)
        for at, block in enumerate(blocks):
            if isinstance(block, ms.TextBlock):
                turn.texts.append(block.text)
            elif isinstance(block, ms.ThinkingBlock):
                turn.thoughts.append(thought(block))
            elif isinstance(block, ms.ToolUseBlock):
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                turn.calls.append({"id": block.id, "type": "function", "function": function})
            elif not isinstance(block, ms.RedactedThinkingBlock):
                raise wrong(f"{param}[{at}]", f"is a {block.type}, which only a user's message has")

    def add_user(self, role: str, blocks: Sequence[AnyBlock], param: str) -> None:
        """Add a user's or a system message."""
        texts: list[Part] = []
        for at, block in enumerate(blocks):
            if isinstance(block, ms.TextBlock) or (isinstance(block, Readable) and role == "user"):
                texts.append(text_of(block))
            elif isinstance(block, ms.ImageBlock) and role == "user":
                texts.append(image_part(block, f"{param}[{at}]"))
            elif isinstance(block, ms.ToolResultBlock) and role == "user":
                self.add(role, texts)
                texts = []
                content = result_content(block, f"{param}[{at}].content")
                self.turns.append(Turn("tool", content, call_id=block.tool_use_id))
            else:
                raise wrong(f"{param}[{at}]", f"is a {block.type}, which a message of role {role!r} cannot have")
        self.add(role, texts)

    def _turn(self, role: str, *, goes_on: bool) -> Turn:
        if not (goes_on and self.turns and self.turns[-1].role == role):
            self.turns.append(Turn(role))
        return self.turns[-1]


def content_of(texts: Sequence[Part]) -> str | list[dict[str, Any]]:
    """Return texts and images as a message's content."""
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    return [{"type": "text", "text": text} if isinstance(text, str) else text for text in texts]


def image_part(block: ms.ImageBlock, param: str) -> dict[str, Any]:
    """Return an image as the chat API has it, with its place."""
    source = block.source
    if isinstance(source, ms.Base64Source):
        found = {"url": f"data:{source.media_type};base64,{source.data}"}
    else:
        found = {"file_id": source.file_id} if isinstance(source, ms.FileSource) else {"url": source.url}
    return {"type": "image_url", "image_url": found, "param": param}


def text_of(block: Readable) -> str:
    """Return a block as the model reads it: what names it and where it is from stand in lines above its text."""
    if isinstance(block, ms.TextBlock):
        return block.text
    if isinstance(block, ms.SearchResultBlock):
        heads, parts = [block.title, block.source], [part.text for part in block.content]
    else:
        heads, source = [head for head in (block.title, block.context) if head], block.source
        content = source.content if isinstance(source, ms.ContentSource) else source.data
        parts = [content] if isinstance(content, str) else [part.text for part in content]
    return "\n".join([*heads, *parts])


def thought(block: ms.ThinkingBlock) -> str:
    """Return what a block says; one that was sent without its text has it in the signature."""
    if block.thinking or not block.signature:
        return block.thinking
    try:
        return decode_reasoning(block.signature)
    except ValueError:
        return ""


def result_content(block: ms.ToolResultBlock, param: str) -> list[Part]:
    """Return a result as the model reads it: one text, or texts between images.

    Raises:
        RequestError: A block in it is neither text nor an image.
    """
    parts: list[Part] = [ERROR_PREFIX] if block.is_error else []
    texts = [block.content] if isinstance(block.content, str) else []
    for at, part in enumerate(block.content or () if not isinstance(block.content, str) else ()):
        if isinstance(part, ms.ImageBlock):
            parts += [*_joined(texts), image_part(part, f"{param}[{at}]")]
            texts = []
        elif isinstance(part, Readable):
            texts.append(text_of(part))
        else:
            raise wrong(f"{param}[{at}]", f"is a {part.type}; a result holds text, images, documents, search results")
    if not any(isinstance(part, dict) for part in parts):
        return ["".join([*map(str, parts), "\n".join(texts)])]
    return [*parts, *_joined(texts)]


def _joined(texts: Sequence[str]) -> list[Part]:
    return ["\n".join(texts)] if texts else []


def wrong(param: str, why: str) -> RequestError:
    """Return the error for a block or message that stands where it cannot."""
    return RequestError(f"{param} {why}", param=param, code="invalid_value")
