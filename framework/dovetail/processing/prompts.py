"""From a conversation to the tokens of its prompt, and how a prompt that is too long is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Chat, Cut, Ids
from dovetail.processing.processor import Processor
from dovetail.processing.refusals import TOO_LONG
from dovetail.processing.sampling import SamplingLimits, check_token_ids
from dovetail.processing.tools import Tools

TAIL_TOKENS = 64
"""Of a prompt that comes as tokens: enough to see whether thinking has begun."""


def chat_prompt(
    processor: Processor,
    chat: Chat,
    *,
    tools: Tools = (),
    template_kwargs: Mapping[str, Any],
    keeps: bool = False,
) -> tuple[list[int], str]:
    """Render and tokenize a conversation.

    Args:
        processor: The model's.
        chat: The conversation.
        tools: Those that the model is shown.
        template_kwargs: The template's variables.
        keeps: As of `Tokenizer.encode`.

    Returns:
        The prompt's tokens, and what the template appended to the conversation.

    Raises:
        RequestError: A message means nothing, there is no template, or the text cannot fit the context.
    """
    processor.check_size(chat.messages)
    rendered = processor.template.render(
        chat.messages,
        tools=tools,
        documents=chat.documents,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continues,
        template_kwargs=template_kwargs,
    )
    if chat.input_ids is None:
        special = chat.adds_special_tokens
        ids = processor.encode(rendered.text, "messages", add_special_tokens=special, keeps=keeps)
        return ids, rendered.tail
    check_token_ids(chat.input_ids, processor.limits.vocab_size, "input_ids")
    tail = processor.tokenizer.decode(chat.input_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    return chat.input_ids, tail


def cut_to(ids: list[int], cut: Cut, limit: int | None, limits: SamplingLimits) -> list[int]:
    """Return a prompt as a request has it cut, with room for `limit` tokens of a reply."""
    room = limits.context_len - max(limit or 1, 1)
    most = max(1, min(room, len(ids) if cut.most < 0 else cut.most))
    return ids[:most] if cut.side == "right" else ids[-most:]


def last_words(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message, if that is one of the assistant's."""
    message = messages[-1]
    content = message.get("content") or ""
    if message["role"] != "assistant":
        return ""
    parts = [content] if isinstance(content, str) else content
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in parts)


def without_oldest(attempt: Callable[[list[dict[str, Any]]], Ids], messages: list[dict[str, Any]]) -> Ids:
    """Leave out as few of the oldest turns as let the rest fit the context.

    A turn begins with a user's message; system messages before the first one stay.

    Args:
        attempt: Makes the prompt of some messages.
        messages: All of them.

    Raises:
        RequestError: Not even the last turn fits.
    """
    starts = [at for at, message in enumerate(messages) if message["role"] == "user"]
    try:
        return attempt(messages)
    except RequestError as error:
        if error.code != TOO_LONG or len(starts) < 2:
            raise
    kept = messages[: starts[0]]
    low, high = 1, len(starts) - 1
    best: Ids | None = None
    while low < high:
        middle = (low + high) // 2
        try:
            best, high = attempt([*kept, *messages[starts[middle] :]]), middle
        except RequestError as error:
            if error.code != TOO_LONG:
                raise
            best, low = None, middle + 1
    return best if best is not None else attempt([*kept, *messages[starts[low] :]])
