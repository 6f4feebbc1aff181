"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from dovetail.errors import RequestError
from dovetail_server.body import json_body
from dovetail_server.native.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest, TokenizerInfo
from dovetail_server.openapi import json_route
from dovetail_server.serving.chat import plain_message
from dovetail_server.serving.params import check_token_ids, same_field
from dovetail_server.serving.text import TextTools
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["native"])
State = Annotated[ServerState, Depends(get_ready_state)]
TEMPLATE_FIELDS = (
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "reasoning_effort",
)


@json_route(router, "/v1/tokenize", body=TokenizeRequest, reply=Tokenized)
@json_route(router, "/tokenize", body=TokenizeRequest, reply=Tokenized)
async def tokenize(body: Annotated[TokenizeRequest, Depends(json_body(TokenizeRequest))], state: State) -> Response:
    """Return the token ids of a text, of several, or of a conversation as the model sees it."""
    state.check_model(body.model)
    data = await asyncio.to_thread(lambda: msgspec.json.encode(tokenized(body, state.text)))
    return Response(data, media_type="application/json")


@json_route(router, "/v1/detokenize", body=DetokenizeRequest, reply=Detokenized)
@json_route(router, "/detokenize", body=DetokenizeRequest, reply=Detokenized)
async def detokenize(
    body: Annotated[DetokenizeRequest, Depends(json_body(DetokenizeRequest))], state: State
) -> Response:
    """Return the text of token ids; of several lists, several texts."""
    state.check_model(body.model)

    def work() -> bytes:
        text = detokenized(body, state.text)
        return msgspec.json.encode(Detokenized(text, text))

    return Response(await asyncio.to_thread(work), media_type="application/json")


@json_route(router, "/tokenizer_info", reply=TokenizerInfo, methods=("GET",))
async def tokenizer_info(state: State) -> Response:
    """Describe the tokenizer and the chat template that are in use."""
    tokenizer = state.text.tokenizer
    info = TokenizerInfo(
        tokenizer_class="PreTrainedTokenizerFast",
        vocab_size=tokenizer.vocab_size,
        model_max_length=state.text.limits.context_len,
        added_tokens=dict(tokenizer.added_tokens),
        chat_template=state.text.template.source or None,
    )
    return Response(msgspec.json.encode(info), media_type="application/json")


def detokenized(body: DetokenizeRequest, text: TextTools) -> str | list[str]:
    """Decode one list of ids, or each of several.

    Raises:
        RequestError: An id outside the vocabulary.
    """
    given: list[Any] = list(body.tokens)
    several = bool(given) and isinstance(given[0], list)
    rows: list[list[int]] = given if several else [given]
    for row in rows:
        check_token_ids(row, text.limits.vocab_size, "tokens")
    texts = [text.tokenizer.decode(row, skip_special_tokens=body.skip_special_tokens is True) for row in rows]
    return texts if several else texts[0]


def tokenized(body: TokenizeRequest, text: TextTools) -> Tokenized:
    """Tokenize what the request holds.

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
        return Tokenized(rows, [len(row) for row in rows], text.limits.context_len, strings)
    if prompt is not None:
        ids = text.encode(prompt, "prompt", add_special_tokens=special)
    else:
        ids = conversation_ids(body, text)
    strs = strings_of(ids, text) if body.return_token_strs else msgspec.UNSET
    return Tokenized(ids, len(ids), text.limits.context_len, strs)


def strings_of(ids: list[int], text: TextTools) -> list[str]:
    """Return each token's text."""
    return [text.tokenizer.token_text(token_id) for token_id in ids]


def conversation_ids(body: TokenizeRequest, text: TextTools) -> list[int]:
    """Return the ids of a conversation as the model sees it."""
    messages = [plain_message(message) for message in body.messages or ()]
    text.check_size(messages)
    rendered = text.template.render(
        messages,
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=text.template_kwargs(body.reasoning_effort, body.chat_template_kwargs),
    )
    return text.encode(rendered.text, "messages", add_special_tokens=body.add_special_tokens is True)
