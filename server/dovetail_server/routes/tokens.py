"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.apis.tokens.schema import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest, TokenizerInfo
from dovetail_server.openapi.document import json_route
from dovetail_server.reading.request import finished
from dovetail_server.reading.tasks import DETOKENIZE, TOKENIZE
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["native"])
State = Annotated[ServerState, Depends(get_ready_state)]


@json_route(router, "/v1/tokenize", body=TokenizeRequest, reply=Tokenized, place="any")
@json_route(router, "/tokenize", body=TokenizeRequest, reply=Tokenized, place="any")
async def tokenize(request: Request, state: State) -> Response:
    """Return the token ids of a text, of several, or of a conversation as the model sees it."""
    return await finished(request, state, TOKENIZE)


@json_route(router, "/v1/detokenize", body=DetokenizeRequest, reply=Detokenized, place="any")
@json_route(router, "/detokenize", body=DetokenizeRequest, reply=Detokenized, place="any")
async def detokenize(request: Request, state: State) -> Response:
    """Return the text of token ids; of several lists, several texts."""
    return await finished(request, state, DETOKENIZE)


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
