"""From a conversation to the tokens of its prompt, and how a prompt that is too long is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Chat, Cut, Ids
from dovetail.messages.media import MediaSpan
from dovetail.processing.image_parts import PlainPlaceholders, expanded, images_of, with_images
from dovetail.processing.processor import Processor
from dovetail.processing.refusals import TOO_LONG
from dovetail.processing.sampling import SamplingLimits, check_token_ids
from dovetail.processing.tools import Tools

TAIL_TOKENS = 64
"""Of a prompt that comes as tokens: enough to see whether thinking has begun."""


class ChatTokens(NamedTuple):
    """The prompt of a conversation: its tokens, what the template appended to the conversation, and its images."""

    ids: list[int]
    tail: str
    media: tuple[MediaSpan, ...] = ()


def chat_prompt(
    processor: Processor,
    chat: Chat,
    *,
    tools: Tools = (),
    template_kwargs: Mapping[str, Any],
    keeps: bool = False,
    salt: str = "",
) -> ChatTokens:
    """Render and tokenize a conversation; where the model sees, load its images.

    Args:
        processor: The model's.
        chat: The conversation.
        tools: Those that the model is shown.
        template_kwargs: The template's variables.
        keeps: As of `Tokenizer.encode`.
        salt: Requests with different ones share no images that are kept.

    Raises:
        RequestError: A message means nothing, there is no template, the text cannot fit the context, or an image
            cannot be had.
        InlineCostError: It has images, which are not loaded here.
    """
    processor.check_size(chat.messages)
    images, seeing, plain = [], processor.images, None
    given: dict[str, Any] = {"messages": chat.messages, "tools": tools, "documents": chat.documents}
    given["template_kwargs"] = template_kwargs
    if seeing is not None:
        given["messages"] = with_images(chat.messages, processor.load_images, salt)
        if images := images_of(given["messages"]):
            processor.begun = None  # where the text has an image, the engine gets others
        plain = PlainPlaceholders(processor, seeing.placeholder_id)
        given = {name: plain.marked(value) for name, value in given.items()}
    rendered = processor.template.render(
        **given, add_generation_prompt=chat.add_generation_prompt, continue_final_message=chat.continues
    )
    special, tail = chat.adds_special_tokens, rendered.tail
    if (ids := chat.input_ids) is not None:
        check_token_ids(ids, processor.limits.vocab_size, "input_ids")
        tail = processor.tokenizer.decode(ids[-TAIL_TOKENS:], skip_special_tokens=False)
    elif plain is not None:
        ids, tail = plain.encode(rendered.text, add_special_tokens=special, keeps=keeps), plain.unmarked(tail)
    else:
        ids = processor.encode(rendered.text, "messages", add_special_tokens=special, keeps=keeps)
    if seeing is None or not images:
        return ChatTokens(ids, tail)
    hint = "this model's template does not show an image where the request has one"
    made = expanded(ids, seeing, images, "messages", hint)
    return ChatTokens(made.ids, tail, made.media)


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
