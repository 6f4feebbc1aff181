"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from dovetail.errors import RequestError
from dovetail_server.body import json_body
from dovetail_server.native.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from dovetail_server.openapi import json_route
from dovetail_server.serving.chat import plain_message
from dovetail_server.serving.params import check_token_ids, same_field
from dovetail_server.serving.text import TextTools
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["native"])
State = Annotated[ServerState, Depends(get_ready_state)]


@json_route(router, "/tokenize", body=TokenizeRequest, reply=Tokenized)
async def tokenize(body: Annotated[TokenizeRequest, Depends(json_body(TokenizeRequest))], state: State) -> Response:
    """Return the token ids of a text, or of a conversation as the model sees it."""
    state.check_model(body.model)

    def work() -> bytes:
        ids = token_ids(body, state.text)
        return msgspec.json.encode(Tokenized(ids, len(ids), state.text.limits.context_len))

    return Response(await asyncio.to_thread(work), media_type="application/json")


@json_route(router, "/detokenize", body=DetokenizeRequest, reply=Detokenized)
async def detokenize(
    body: Annotated[DetokenizeRequest, Depends(json_body(DetokenizeRequest))], state: State
) -> Response:
    """Return the text of token ids."""
    state.check_model(body.model)

    def work() -> bytes:
        check_token_ids(body.tokens, state.text.limits.vocab_size, "tokens")
        skip = body.skip_special_tokens is True
        text = state.text.tokenizer.decode(body.tokens, skip_special_tokens=skip)
        return msgspec.json.encode(Detokenized(text, text))

    return Response(await asyncio.to_thread(work), media_type="application/json")


def token_ids(body: TokenizeRequest, text: TextTools) -> list[int]:
    """Tokenize what the request holds.

    Raises:
        RequestError: Neither or both of a text and messages are there.
    """
    prompt = same_field(body, "prompt", "text")
    if (prompt is None) == (body.messages is None):
        raise RequestError("send one of prompt and messages", param="prompt", code="invalid_value")
    if prompt is not None:
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt"):
            if getattr(body, name) is not None:
                text_ = f"{name} belongs to messages; a text goes through no template"
                raise RequestError(text_, param=name, code="invalid_value")
        return text.encode(prompt, "prompt", add_special_tokens=body.add_special_tokens is not False)
    messages = [plain_message(message) for message in body.messages or ()]
    text.check_size(messages)
    rendered = text.template.render(
        messages,
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        add_generation_prompt=body.add_generation_prompt,
        template_kwargs=text.template_kwargs(None, body.chat_template_kwargs),
    )
    return text.encode(rendered.text, "messages", add_special_tokens=body.add_special_tokens is True)
