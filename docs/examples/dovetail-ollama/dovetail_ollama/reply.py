"""Replies in the words of Ollama's API, what it shows of the server, and its routes.

A stream is NDJSON: a line of JSON for each piece, the last with `"done": true`; one that cannot go on ends with a line
`{"error": …}`.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from dovetail.contracts.api import Api, Route, ServerFacts, View
from dovetail.contracts.errors import RequestError
from dovetail.contracts.output import ContentDelta, Event, Malformed, ReasoningDelta, ToolArgs, ToolEnd, ToolStart
from dovetail.contracts.replies import Failure, Reply, StepView, TokenLogprob, Writer
from dovetail.contracts.requests import JsonObject
from dovetail_ollama.request import converted, read_chat, read_generate, unsupported, wrong

encode = msgspec.json.Encoder().encode
FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


class OllamaError(Struct):
    """An error's body, and the last line of a stream that cannot go on."""

    error: str


class Token(Struct):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenRow(Token):
    """A token, and the most likely ones in its place."""

    top_logprobs: list[Token] | UnsetType = UNSET


class CalledFunction(Struct):
    """A function and what it is called with."""

    index: int
    name: str
    arguments: JsonObject


class ToolCall(Struct):
    """A tool call."""

    id: str
    function: CalledFunction


class Message(Struct):
    """What the model said."""

    content: str
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Line(Struct, kw_only=True):
    """A whole reply, or a line of a stream, whose last has all but what was said. Durations are nanoseconds."""

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenRow] | UnsetType = UNSET
    structured_output: JsonObject | UnsetType = UNSET


class ChatLine(Line, kw_only=True):
    """Of `/api/chat`."""

    message: Message


class GenerateLine(Line, kw_only=True):
    """Of `/api/generate`."""

    response: str
    thinking: str | UnsetType = UNSET


class ShowBody(Struct, forbid_unknown_fields=True):
    """Body of `/api/show`; `name` is the old name of `model`."""

    model: str = ""
    name: str = ""
    verbose: bool | None = None


class Piece(NamedTuple):
    """Something that was said."""

    content: str = ""
    thinking: str = ""
    call: ToolCall | None = None


class Calls:
    """Puts the pieces of tool calls together: a call goes out when it has ended."""

    def __init__(self) -> None:
        """None has begun."""
        self._open: dict[int, tuple[ToolStart, list[str]]] = {}
        self._num = 0

    def take(self, event: Event) -> Piece | None:
        """Return what an event says; None if nothing can be said yet. Arguments that are no object are content."""
        match event:
            case ContentDelta() | Malformed():
                return Piece(content=event.text)
            case ReasoningDelta():
                return Piece(thinking=event.text)
            case ToolStart():
                self._open[event.index] = event, []
            case ToolArgs():
                self._open[event.index][1].append(event.json)
            case ToolEnd():
                start, pieces = self._open.pop(event.index)
                return self._ended(start, "".join(pieces))
        return None

    def _ended(self, start: ToolStart, text: str) -> Piece:
        try:
            arguments = msgspec.json.decode(text or "{}")
        except msgspec.DecodeError:
            arguments = None  # the model was cut off, or wrote none
        if not isinstance(arguments, dict):
            return Piece(content=text)
        function = CalledFunction(index=self._num, name=start.name, arguments=arguments)
        self._num += 1
        return Piece(call=ToolCall(start.id, function))


class OllamaWriter(Writer):
    """Writes a reply. `Request.reply` may have `loads`: there is no prompt, and nothing is said."""

    media_type = "application/x-ndjson"
    keep_alive = b""

    def __init__(self, reply: Reply) -> None:
        """Begin: nothing was said."""
        super().__init__(reply)
        self._request, self._choice = reply.requests[0], reply.choices[0]
        self._created_at = datetime.fromtimestamp(reply.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._calls = Calls()
        self._rows: list[TokenLogprob] = []
        self._said: list[Piece] = []

    def step(self, steps: Sequence[StepView]) -> bytes:
        """Return a line for each piece; log probabilities stand in the next line there is."""
        lines = []
        for step in steps:
            for piece in self._pieces(step):
                line = self.line([piece])
                line.logprobs = self._logprobs()
                lines.append(encode(line) + b"\n")
        return b"".join(lines)

    def close(self) -> bytes:
        """Return the last line."""
        return encode(self._ended(self.line([]))) + b"\n"

    def take(self, steps: Sequence[StepView]) -> None:
        """Keep what was said."""
        for step in steps:
            self._said += self._pieces(step)

    def whole(self) -> bytes:
        """Return the reply."""
        return encode(self._ended(self.line(self._said)))

    @classmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        """Return a line with the error."""
        return encode(OllamaError(failure.message)) + b"\n"

    def line(self, pieces: Sequence[Piece]) -> Line:
        """Return a line that says `pieces`, which are at most one in a stream."""
        raise NotImplementedError

    def head(self) -> dict[str, Any]:
        """Return what all lines have."""
        return {"model": self.reply.model, "created_at": self._created_at}

    def _pieces(self, step: StepView) -> list[Piece]:
        if step.choice.is_dropped:
            return []
        if self._request.logprobs is not None:
            self._rows += step.visible
        return [piece for event in step.events if (piece := self._calls.take(event)) is not None]

    def _logprobs(self) -> list[TokenRow] | UnsetType:
        """Return and forget the rows since the last line."""
        rows, self._rows = self._rows, []
        return [self._row(row) for row in rows] if rows else UNSET

    def _row(self, row: TokenLogprob) -> TokenRow:
        top = [self._token(one.token_id, one.logprob) for one in row.top[: self._choice.num_top]]
        token = self._token(row.token_id, row.logprob)
        return TokenRow(token.token, token.logprob, token.bytes, top or UNSET)

    def _token(self, token_id: int, logprob: float | None) -> Token:
        raw = self.reply.tokenizer.token_bytes(token_id)
        return Token(raw.decode(errors="replace"), max(FLOOR, FLOOR if logprob is None else logprob), list(raw))

    def _ended(self, line: Line) -> Line:
        """Add why the reply ended, and what it took."""
        choice, tokens = self._choice, self.reply.tokens
        line.done = True
        line.logprobs = self._logprobs()
        if self._request.reply.get("loads"):
            line.done_reason = "load"
            return line
        line.done_reason = "length" if choice.finish_reason == "length" else "stop"
        first_at = choice.first_at or choice.finished_at
        line.total_duration = nanoseconds(choice.finished_at - self.reply.began)
        line.load_duration = 0
        line.prompt_eval_count, line.eval_count = tokens.prompt, tokens.completion
        line.prompt_eval_duration = nanoseconds(first_at - self.reply.began)
        line.eval_duration = nanoseconds(choice.finished_at - first_at)
        line.structured_output = UNSET if choice.structured_output is None else choice.structured_output
        return line


class ChatWriter(OllamaWriter):
    """Of `/api/chat`."""

    def line(self, pieces: Sequence[Piece]) -> ChatLine:
        """Return a line with a message."""
        content, thinking = said(pieces)
        calls = [piece.call for piece in pieces if piece.call is not None]
        return ChatLine(**self.head(), message=Message(content, thinking=thinking or UNSET, tool_calls=calls or UNSET))


class GenerateWriter(OllamaWriter):
    """Of `/api/generate`, which has no tools."""

    def line(self, pieces: Sequence[Piece]) -> GenerateLine:
        """Return a line with a text."""
        content, thinking = said(pieces)
        return GenerateLine(**self.head(), response=content, thinking=thinking or UNSET)


def said(pieces: Sequence[Piece]) -> tuple[str, str]:
    """Return the content and the thinking of pieces."""
    return "".join([piece.content for piece in pieces]), "".join([piece.thinking for piece in pieces])


def nanoseconds(seconds: float) -> int:
    """Return a duration, which a clock may have made negative by a rounding."""
    return max(0, round(seconds * 1e9))


def tags(facts: ServerFacts, body: JsonObject) -> Mapping[str, Any]:
    """Return the models: a server has one, and perhaps several names of it."""
    return {
        "models": [
            {
                "name": name,
                "model": name,
                "modified_at": started(facts),
                "size": facts.weight_bytes,
                "details": details(facts),
            }
            for name in facts.models
        ]
    }


def show(facts: ServerFacts, body: JsonObject) -> Mapping[str, Any]:
    """Return what is known of the model.

    Raises:
        RequestError: It is not the one that is served.
    """
    given = converted(body, ShowBody)
    name = given.model or given.name
    if not name:
        raise wrong("model is required", "model")
    if name not in facts.models:
        text = f"model {name[:256]!r} not found; served: {', '.join(facts.models)}"
        raise RequestError(text, param="model", code="model_not_found", status=404)
    if given.verbose:
        raise unsupported("verbose", "the vocabulary is not shown; leave it out")
    able = ["completion", *["tools"] * facts.calls_tools, *["thinking"] * facts.thinks, *["vision"] * facts.sees]
    return {
        "modified_at": started(facts),
        "template": facts.template,
        "details": details(facts),
        "model_info": {
            "general.architecture": facts.architecture,
            f"{facts.architecture}.context_length": facts.context_len,
            f"{facts.architecture}.vocab_size": facts.vocab_size,
        },
        "capabilities": able,
    }


def version(facts: ServerFacts, body: JsonObject) -> Mapping[str, Any]:
    """Return Dovetail's version: it is no Ollama's."""
    return {"version": facts.version}


def details(facts: ServerFacts) -> JsonObject:
    """Return what both lists say of the model."""
    packed = facts.quantization or facts.dtype
    return {"family": facts.architecture, "families": [facts.architecture], "quantization_level": packed}


def started(facts: ServerFacts) -> str:
    """Return when the server started, since when the model is what it is."""
    return datetime.fromtimestamp(facts.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Ollama(Api):
    """Ollama's API."""

    owns = ("/api",)

    def routes(self) -> Sequence[Route | View]:
        """Return the routes."""
        common: dict[str, Any] = {"error": OllamaError, "tag": "ollama"}
        return (
            Route(
                name="ollama_chat",
                path="/api/chat",
                about="Answer a conversation; a stream unless it says stream: false.",
                read=read_chat,
                writer=ChatWriter,
                reply=ChatLine,
                **common,
            ),
            Route(
                name="ollama_generate",
                path="/api/generate",
                about="Answer or continue a text; a stream unless it says stream: false.",
                read=read_generate,
                writer=GenerateWriter,
                reply=GenerateLine,
                **common,
            ),
            View(name="ollama_tags", path="/api/tags", about="The models.", show=tags, **common),
            View(name="ollama_show", path="/api/show", about="The model's facts.", show=show, method="POST", **common),
            View(name="ollama_version", path="/api/version", about="The server's version.", show=version, **common),
        )

    def failed(self, failure: Failure, request_id: str | None) -> tuple[int, OllamaError]:
        """Return an error as Ollama has it."""
        return failure.status, OllamaError(failure.message)
