"""What is done with large bodies, by name: the same functions that serve small ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
from pydantic import BaseModel

from dovetail.contracts.api import Api, Route
from dovetail.contracts.errors import RequestError
from dovetail.processing.processor import Processor
from dovetail_server.apis.embeddings import serve as embeddings
from dovetail_server.apis.embeddings.schema import EmbeddingRequest
from dovetail_server.apis.loaded import generating
from dovetail_server.apis.messages.batches import to_lines
from dovetail_server.apis.messages.count import count_tokens
from dovetail_server.apis.messages.schema import CountTokensRequest
from dovetail_server.apis.parsing import serve as parsing
from dovetail_server.apis.parsing.schema import ParseFunctionCallRequest, SeparateReasoningRequest
from dovetail_server.apis.pooled import PooledJob
from dovetail_server.apis.rerank import serve as rerank
from dovetail_server.apis.rerank.schema import ClassifyRequest, RerankRequest
from dovetail_server.apis.responses import prompt
from dovetail_server.apis.responses import request as responses
from dovetail_server.apis.responses.references import ReferencedItems, references_of
from dovetail_server.apis.responses.request import ReadItems
from dovetail_server.apis.responses.schema import CompactRequest, InputTokensRequest, ResponsesRequest
from dovetail_server.apis.routes import BUILT_IN
from dovetail_server.apis.score import serve as score
from dovetail_server.apis.score.schema import ScoreRequest
from dovetail_server.apis.tokens import serve as tokens
from dovetail_server.apis.tokens.schema import DetokenizeRequest, TokenizeRequest
from dovetail_server.reading.wire import MAX_BESIDE
from dovetail_server.schema.tags import MESSAGES, OPENAI
from dovetail_server.serving.context import ServingContext
from dovetail_server.serving.prompts import Prompts
from dovetail_server.serving.served import Served

M = TypeVar("M", bound=BaseModel)
DROPPED = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyContext(Generic[M]):
    """One body, read.

    Attributes:
        text: Tokenizer, template and parsers.
        request: The body, checked by its schema.
        context: As the job's.
        ask: Gets what a response refers to, given the references in its input.
    """

    text: Processor
    request: M
    context: str
    ask: Callable[[list[tuple[str, int]]], ReferencedItems]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Generic[M]):
    """Something that takes time and memory in proportion to a body.

    Attributes:
        name: Its name.
        model: The body's schema.
        run: Returns prompts, or a whole reply.
        prompt_fields: Fields that prompts are made of, with what stands in their place afterwards.
        tag: Of its route, as of `Route`.
    """

    name: str
    model: type[M]
    run: Callable[[BodyContext[M]], Prompts | ReadItems | bytes]
    prompt_fields: Mapping[str, Any] = field(default_factory=dict)
    tag: str = OPENAI

    def beside(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a body that no prompt is made of."""
        return {name: value for name, value in data.items() if name not in self.prompt_fields}

    def light(self, beside: Mapping[str, Any]) -> bytes:
        """Return a body without what prompts are made of, given its other fields.

        Raises:
            RequestError: What is left is large, too.
        """
        places = {name: value for name, value in self.prompt_fields.items() if value is not DROPPED}
        light = msgspec.json.encode({**beside, **places})
        if len(light) > MAX_BESIDE:
            text = f"the fields beside the prompt have {len(light)} bytes; at most {MAX_BESIDE} are allowed"
            raise RequestError(text, code="body_too_large", status=413)
        return light


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledTask(Task[M]):
    """One whose prompts need no tokens of a reply; `prepare` makes its engine's requests, in a worker thread."""

    prepare: Callable[[ServingContext, M, str, Prompts | None], PooledJob]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTask:
    """Something that is done with a body as it was sent: its values are not looked at.

    Attributes:
        name: Its name.
        run: Returns what becomes of it, given the names of the models, too.
    """

    name: str
    run: Callable[[bytes, Served], bytes]


def no_answer(references: list[tuple[str, int]]) -> ReferencedItems:
    """Refuse to be asked: for tasks that refer to nothing."""
    raise RuntimeError("this task refers to nothing")


def _respond(call: BodyContext[ResponsesRequest]) -> ReadItems:
    references = references_of(call.request)
    return prompt.read_prompt(call.text, call.request, call.context, call.ask(references))


def _count_response(call: BodyContext[InputTokensRequest]) -> bytes:
    references = references_of(call.request)
    return responses.count(call.text, call.request, call.context, call.ask(references))


RESPONSES = Task(name="responses", model=ResponsesRequest, run=_respond, prompt_fields={"input": ""})
COUNT_TOKENS = Task(
    name="count_tokens",
    model=CountTokensRequest,
    run=lambda call: count_tokens(call.text, call.request),
    tag=MESSAGES,
)
INPUT_TOKENS = Task(name="input_tokens", model=InputTokensRequest, run=_count_response, prompt_fields={"input": ""})
COMPACT = Task(
    name="compact",
    model=CompactRequest,
    run=lambda call: prompt.read_compact(call.text, call.request, call.context, call.ask(references_of(call.request))),
    prompt_fields={"input": DROPPED},
)
SCORE = PooledTask(
    name="score",
    model=ScoreRequest,
    run=lambda call: (rerank.read_score if rerank.is_pair(call.request) else score.read_prompts)(
        call.text, call.request
    ),
    prompt_fields=dict.fromkeys(("query", "items", "text_1", "text_2"), DROPPED),
    prepare=lambda state, request, *rest: (rerank.prepare if rerank.is_pair(request) else score.prepare)(
        state, request, *rest
    ),
)
RERANK = PooledTask(
    name="rerank",
    model=RerankRequest,
    run=lambda call: rerank.read_rerank(call.text, call.request),
    prompt_fields={"query": "", "documents": [""]},
    prepare=rerank.prepare,
)
CLASSIFY = PooledTask(
    name="classify",
    model=ClassifyRequest,
    run=lambda call: rerank.read_classify(call.text, call.request),
    prompt_fields={"input": ""},
    prepare=rerank.prepare,
)
EMBEDDINGS = PooledTask(
    name="embeddings",
    model=EmbeddingRequest,
    run=lambda call: embeddings.read_prompts(call.text, call.request),
    prompt_fields={"input": ""},
    prepare=embeddings.prepare,
)
TOKENIZE = Task(name="tokenize", model=TokenizeRequest, run=lambda call: tokens.tokenized(call.text, call.request))
DETOKENIZE = Task(
    name="detokenize", model=DetokenizeRequest, run=lambda call: tokens.detokenized(call.text, call.request)
)
SEPARATE_REASONING = Task(
    name="separate_reasoning",
    model=SeparateReasoningRequest,
    run=lambda call: parsing.separate_reasoning(call.text, call.request),
)
PARSE_CALLS = Task(
    name="parse_calls",
    model=ParseFunctionCallRequest,
    run=lambda call: parsing.parse_calls(call.text, call.request),
)
MESSAGE_BATCH = RawTask(name="message_batch", run=to_lines)
_OWN: tuple[Task[Any] | RawTask | Route, ...] = (
    RESPONSES,
    COUNT_TOKENS,
    INPUT_TOKENS,
    COMPACT,
    SCORE,
    EMBEDDINGS,
    RERANK,
    CLASSIFY,
    TOKENIZE,
    DETOKENIZE,
    SEPARATE_REASONING,
    PARSE_CALLS,
    MESSAGE_BATCH,
)
OWN_NAMES = frozenset(task.name for task in _OWN)
"""Those that belong to no API's routes."""
TASKS = {task.name: task for task in (*generating(BUILT_IN), *_OWN)}


def add_routes(apis: Sequence[Api]) -> None:
    """Have this process read bodies of these APIs, too."""
    TASKS.update((route.name, route) for route in generating(apis))
