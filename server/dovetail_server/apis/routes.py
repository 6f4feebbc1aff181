"""The built-in APIs: the routes that generate, as data."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.contracts.api import Api, Route
from dovetail.contracts.replies import Failure
from dovetail_server.apis.chat.reply import ChatWriter
from dovetail_server.apis.chat.request import read as read_chat
from dovetail_server.apis.chat.schema import ChatCompletion, ChatRequest
from dovetail_server.apis.completions.reply import CompletionWriter
from dovetail_server.apis.completions.request import read as read_completion
from dovetail_server.apis.completions.schema import Completion, CompletionRequest
from dovetail_server.apis.generate.reply import GenerateWriter
from dovetail_server.apis.generate.request import read as read_generate
from dovetail_server.apis.generate.schema import Generated, GenerateRequest
from dovetail_server.apis.messages.errors import error_reply
from dovetail_server.apis.messages.reply import MessagesWriter
from dovetail_server.apis.messages.request import read as read_message
from dovetail_server.apis.messages.schema import AnthropicError, MessageReply, MessagesRequest
from dovetail_server.apis.responses.objects import ResponseObject
from dovetail_server.apis.responses.reply import ResponsesWriter
from dovetail_server.apis.responses.request import read as read_response
from dovetail_server.apis.responses.schema import ResponsesRequest
from dovetail_server.schema.tags import OPENAI

CHAT = Route(
    name="chat_completions",
    path="/v1/chat/completions",
    about="Answer a conversation, whole or as a stream.",
    body=ChatRequest,
    read=read_chat,
    writer=ChatWriter,
    reply=ChatCompletion,
    id_prefix="chatcmpl-",
    tag=OPENAI,
)
COMPLETIONS = Route(
    name="create_completion",
    path="/v1/completions",
    about="Continue one or several prompts, whole or as a stream.",
    body=CompletionRequest,
    read=read_completion,
    writer=CompletionWriter,
    reply=Completion,
    id_prefix="cmpl-",
    renders_list=True,
    tag=OPENAI,
)
GENERATE = Route(
    name="generate_text",
    path="/generate",
    about="Continue a text or token ids; a batch gives a list.",
    body=GenerateRequest,
    read=read_generate,
    writer=GenerateWriter,
    reply=Generated,
    id_prefix="gen-",
    may_list=True,
    tag="native",
)
MESSAGES = Route(
    name="create_message",
    path="/v1/messages",
    about="Answer a conversation in the form of Anthropic's API, whole or as a stream.",
    body=MessagesRequest,
    read=read_message,
    writer=MessagesWriter,
    reply=MessageReply,
    id_prefix="msg_",
    is_named_by_client=False,
    tag="messages",
    error=AnthropicError,
)
RESPONSES = Route(
    name="create_response",
    path="/v1/responses",
    about="Answer items, whole, as a stream or in the background; the reply is kept unless `store` is false.",
    body=ResponsesRequest,
    read=read_response,
    writer=ResponsesWriter,
    reply=ResponseObject,
    id_prefix="resp_",
    is_named_by_client=False,
    tag="responses",
)
"""Served by `routes/responses.py`, for what a body refers to is looked up first."""


class OpenAI(Api):
    """OpenAI's chat and text completions."""

    def routes(self) -> Sequence[Route]:
        """Return them."""
        return CHAT, COMPLETIONS


class Anthropic(Api):
    """Anthropic's messages."""

    owns = ("/v1/messages",)

    def routes(self) -> Sequence[Route]:
        """Return them."""
        return (MESSAGES,)

    def failed(self, failure: Failure, request_id: str | None) -> tuple[int, AnthropicError]:
        """Return an error as Anthropic has it."""
        return error_reply(failure, request_id)


class SGLang(Api):
    """SGLang's native `/generate`."""

    def routes(self) -> Sequence[Route]:
        """Return them."""
        return (GENERATE,)


BUILT_IN: tuple[Api, ...] = (OpenAI(), Anthropic(), SGLang())
