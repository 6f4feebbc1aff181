"""Routes whose bodies a process of bodies reads: it makes the whole answer, or what the engine pools of each prompt."""

from __future__ import annotations

from functools import partial
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.apis.embeddings.schema import EmbeddingRequest, Embeddings
from dovetail_server.apis.messages.schema import AnthropicError, CountTokensRequest, TokenCount
from dovetail_server.apis.parsing.schema import (
    ParsedCalls,
    ParseFunctionCallRequest,
    SeparatedReasoning,
    SeparateReasoningRequest,
)
from dovetail_server.apis.rerank.schema import Classes, ClassifyRequest, PairScores, Reranked, RerankRequest
from dovetail_server.apis.score.schema import ScoreRequest, Scores
from dovetail_server.apis.tokens.schema import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest, TokenizerInfo
from dovetail_server.openapi.document import json_route
from dovetail_server.reading import tasks
from dovetail_server.reading.request import finished, prepared, prompt_body
from dovetail_server.schema.pooled import PooledFields
from dovetail_server.serving.sse import cancel_on_disconnect
from dovetail_server.state import ReadyState, ServerState

router = APIRouter()
worked = partial(json_route, router, place="any")
"""A route that any worker of a gateway may answer."""
M = TypeVar("M", bound=PooledFields)
OPENAI, NATIVE, MESSAGES = ("openai",), ("native",), ("messages",)


@worked(
    "/v1/messages/count_tokens",
    body=CountTokensRequest,
    reply=TokenCount,
    error=AnthropicError,
    tags=MESSAGES,
)
async def count_tokens(request: Request, state: ReadyState) -> Response:
    """Count the tokens of a prompt."""
    return await finished(request, state, tasks.COUNT_TOKENS)


@worked("/v1/embeddings", body=EmbeddingRequest, reply=Embeddings, tags=OPENAI)
async def create_embeddings(
    request: Request, body: Annotated[EmbeddingRequest, Depends(prompt_body(tasks.EMBEDDINGS))], state: ReadyState
) -> Response:
    """Give the vector of one or several texts."""
    return await _answered(request, tasks.EMBEDDINGS, body, state)


@worked("/v1/rerank", body=RerankRequest, reply=Reranked, tags=OPENAI)
@worked("/v2/rerank", body=RerankRequest, reply=Reranked, tags=OPENAI)
@worked("/rerank", body=RerankRequest, reply=Reranked, tags=OPENAI)
async def rerank_documents(
    request: Request, body: Annotated[RerankRequest, Depends(prompt_body(tasks.RERANK))], state: ReadyState
) -> Response:
    """Order documents by how well they go with a query."""
    return await _answered(request, tasks.RERANK, body, state)


@worked("/v1/classify", body=ClassifyRequest, reply=Classes, tags=OPENAI)
@worked("/classify", body=ClassifyRequest, reply=Classes, tags=OPENAI)
async def classify_texts(
    request: Request, body: Annotated[ClassifyRequest, Depends(prompt_body(tasks.CLASSIFY))], state: ReadyState
) -> Response:
    """Score the labels of one or several texts."""
    return await _answered(request, tasks.CLASSIFY, body, state)


async def _answered(request: Request, task: tasks.PooledTask[M], body: M, state: ServerState) -> Response:
    model = state.check_model(body.model)
    job = await prepared(request, task, lambda made: task.prepare(state, body, model, made))
    return Response(await cancel_on_disconnect(request, job.reply()), media_type="application/json")


@worked("/v1/score", body=ScoreRequest, reply=Scores, other_reply=PairScores, tags=NATIVE)
@worked("/score", body=ScoreRequest, reply=Scores, other_reply=PairScores, tags=NATIVE)
async def score_items(
    request: Request, body: Annotated[ScoreRequest, Depends(prompt_body(tasks.SCORE))], state: ReadyState
) -> Response:
    """Tell how well two texts go together, or how likely each of some tokens is to follow a query and an item."""
    return await _answered(request, tasks.SCORE, body, state)


@worked("/v1/tokenize", body=TokenizeRequest, reply=Tokenized, tags=NATIVE)
@worked("/tokenize", body=TokenizeRequest, reply=Tokenized, tags=NATIVE)
async def tokenize(request: Request, state: ReadyState) -> Response:
    """Return the token ids of a text, of several, or of a conversation as the model sees it."""
    return await finished(request, state, tasks.TOKENIZE)


@worked("/v1/detokenize", body=DetokenizeRequest, reply=Detokenized, tags=NATIVE)
@worked("/detokenize", body=DetokenizeRequest, reply=Detokenized, tags=NATIVE)
async def detokenize(request: Request, state: ReadyState) -> Response:
    """Return the text of token ids; of several lists, several texts."""
    return await finished(request, state, tasks.DETOKENIZE)


@json_route(router, "/tokenizer_info", reply=TokenizerInfo, methods=("GET",), tags=NATIVE)
async def tokenizer_info(state: ReadyState) -> Response:
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


@worked(
    "/separate_reasoning",
    body=SeparateReasoningRequest,
    reply=SeparatedReasoning,
    tags=NATIVE,
)
async def separate(request: Request, state: ReadyState) -> Response:
    """Split a finished output into reasoning and text."""
    return await finished(request, state, tasks.SEPARATE_REASONING)


@worked("/parse_function_call", body=ParseFunctionCallRequest, reply=ParsedCalls, tags=NATIVE)
async def parse(request: Request, state: ReadyState) -> Response:
    """Find the tool calls in a finished output."""
    return await finished(request, state, tasks.PARSE_CALLS)
