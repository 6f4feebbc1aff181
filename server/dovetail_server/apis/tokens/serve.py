"""`/tokenize` and `/detokenize`: from a request to its reply; CPU work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Chat
from dovetail.processing.prompts import chat_prompt
from dovetail.processing.sampling import check_token_ids
from dovetail_server.apis.chat.request import with_functions
from dovetail_server.apis.fields import same_field
from dovetail_server.apis.tokens.schema import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor

encode = msgspec.json.encode
TEMPLATE_FIELDS = (
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "reasoning_effort",
)


def detokenized(text: Processor, body: DetokenizeRequest) -> bytes:
    """Decode one list of ids, or each of several, and return the reply.

    Raises:
        RequestError: An id outside the vocabulary.
    """
    given: list[Any] = body.tokens
    several = bool(given) and isinstance(given[0], list)
    rows: list[list[int]] = given if several else [given]
    for row in rows:
        check_token_ids(row, text.limits.vocab_size, "tokens")
    texts = []
    for row in rows:
        texts.append(text.tokenizer.decode(row, skip_special_tokens=body.skip_special_tokens is True))
        row.clear()  # the numbers take more memory than the reply
    found = texts if several else texts[0]
    return encode(Detokenized(found, found))


def tokenized(text: Processor, body: TokenizeRequest) -> bytes:
    """Tokenize what the request holds, and return the reply.

    Raises:
        RequestError: Neither or both of a text and messages are there.
    """
    prompt = same_field(body, "prompt", "text")
    if (prompt is None) == (body.messages is None):
        raise RequestError("send one of prompt and messages", param="prompt", code="invalid_value")
    special = body.add_special_tokens is not False
    for name in TEMPLATE_FIELDS:
        if prompt is not None and getattr(body, name) is not None:
            text_ = f"{name} belongs to messages; a text goes through no template"
            raise RequestError(text_, param=name, code="invalid_value")
    if isinstance(prompt, list):
        rows = [text.encode(item, f"prompt[{i}]", add_special_tokens=special) for i, item in enumerate(prompt)]
        strings = [strings_of(row, text) for row in rows] if body.return_token_strs else msgspec.UNSET
        return encode(Tokenized(rows, [len(row) for row in rows], text.limits.context_len, strings))
    if prompt is not None:
        ids = text.encode(prompt, "prompt", add_special_tokens=special)
    else:
        ids = conversation_ids(body, text)
    strs = strings_of(ids, text) if body.return_token_strs else msgspec.UNSET
    return encode(Tokenized(ids, len(ids), text.limits.context_len, strs))


def strings_of(ids: list[int], text: Processor) -> list[str]:
    """Return each token's text."""
    return [text.tokenizer.token_text(token_id) for token_id in ids]


def conversation_ids(body: TokenizeRequest, text: Processor) -> list[int]:
    """Return the ids of a conversation as the model sees it."""
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    chat = Chat(
        messages=with_functions(body.messages or []),
        add_generation_prompt=body.add_generation_prompt,
        continues=bool(body.continue_final_message),
        adds_special_tokens=body.add_special_tokens is True,
    )
    kwargs = text.template_kwargs(body.reasoning_effort, body.chat_template_kwargs)
    return chat_prompt(text, chat, tools=tools, template_kwargs=kwargs)[0]
