"""What the author of an API implements: `Api`, whose routes each read a body into a `Request` and write its reply.

```python
class Ollama(Api):
    def routes(self):
        return [
            Route(name="ollama_chat", path="/api/chat", about="Answer a conversation.", read=read, writer=ChatWriter),
            View(name="ollama_version", path="/api/version", about="The version.", show=version),
        ]

    def failed(self, failure, request_id):
        return failure.status, {"error": failure.message}
```

The class is named in the entry-point group `dovetail.apis.v1` and served where `--apis` names it. Everything between
`read` and the writer is the server's: keys and limits, large bodies and hostile templates in processes of their own,
rendering, grammars, the engine, resumed streams, observers. Importing this takes no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dovetail.contracts.options import Configurable
from dovetail.contracts.replies import Failure, Writer
from dovetail.contracts.requests import JsonObject, Request

Placing = Literal["prefix", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A route that generates: POST, a JSON body.

    Attributes:
        name: Its name in the OpenAPI document, and between processes; letters, digits and `_`.
        path: Where it is, such as `/v1/chat/completions`.
        about: What it does, in a sentence, for the OpenAPI document.
        read: Makes of a body a request; of a batch whose prompts want different things, several. Raises `RequestError`
            for what the API does not serve. The body is a `dict`, strict JSON, or what `body` makes of it.
        writer: Writes a reply.
        body: A pydantic model that a body is checked by before `read` gets it; None: `read` checks it.
        reply: The msgspec struct of a whole reply, for the OpenAPI document.
        error: The struct of an error's body, for the OpenAPI document; None: OpenAI's, or of any form on a path that
            the API owns.
        id_prefix: What an identifier of a reply begins with.
        is_named_by_client: A reply has the identifier that the client gave the request, if it gave one.
        place: Where a gateway sends it: `prefix`, to the worker that knows the beginning of its prompt, or `any`.
        may_list: A whole reply may be a list of replies.
        only_streams: Every reply is a stream: `read` gives requests with `stream` only, and no batch runs the route.
        renders_list: `…/render` gives a list, as there may be several prompts.
        tag: The section of the OpenAPI document. Names of models for one API (`--served-model-name openai=…`) are those
            of a tag, too, so that only OpenAI's routes have `openai`.
    """

    name: str
    path: str
    about: str
    read: Callable[[Any], Request | list[Request]]
    writer: type[Writer]
    body: type[Any] | None = None
    reply: type[Any] | None = None
    error: type[Any] | None = None
    id_prefix: str = "reply-"
    is_named_by_client: bool = True
    place: Placing = "prefix"
    may_list: bool = False
    renders_list: bool = False
    only_streams: bool = False
    tag: str = "plugins"

    def requests(self, body: Any) -> list[Request]:
        """Return the requests that a body makes.

        Raises:
            RequestError: It asks for what this API does not serve.
        """
        made = self.read(body)
        return [made] if isinstance(made, Request) else made


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server is, for what APIs show of it.

    Attributes:
        version: Dovetail's.
        models: The names that requests may give the model; the first is the usual one.
        created: When the server started, in seconds since 1970.
        architecture: The model's, as in its `config.json`.
        dtype: Of its weights.
        weight_bytes: Of its weights in memory.
        context_len: Most tokens of a prompt and its reply.
        vocab_size: Tokens that it knows.
        quantization: How its weights are packed; "" if they are not.
        template: The chat template's source; "" if there is none.
        calls_tools: Its tool calls are read.
        thinks: Its thinking is read.
        sees: It takes images.
    """

    version: str
    models: tuple[str, ...]
    created: int
    architecture: str
    dtype: str
    weight_bytes: int
    context_len: int
    vocab_size: int
    quantization: str
    template: str
    calls_tools: bool
    thinks: bool
    sees: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A route that shows something of the server and changes nothing. Its reply is JSON.

    Attributes:
        name: As of `Route`.
        path: As of `Route`.
        about: As of `Route`.
        show: Given the server's facts and the body, an empty object where there is none, returns the reply. Called in
            a thread. Raises `RequestError` where the body asks for what is not there.
        method: `GET`, or `POST` for a route with a small body.
        error: As of `Route`.
        tag: As of `Route`.
    """

    name: str
    path: str
    about: str
    show: Callable[[ServerFacts, JsonObject], Mapping[str, Any]]
    method: Literal["GET", "POST"] = "GET"
    error: type[Any] | None = None
    tag: str = "plugins"


class Api(Configurable, ABC):
    """An API. Made once in the HTTP process and in each that reads large bodies."""

    owns: ClassVar[tuple[str, ...]] = ()
    """Paths whose errors, and those of all paths below them, are told in this API's words: `("/api",)`. Whatever goes
    wrong there is: a missing key and a body that is too large, too. Of an API that has none they are OpenAI's."""

    def __str__(self) -> str:
        """Return what messages call it: its class."""
        return type(self).__name__

    @abstractmethod
    def routes(self) -> Sequence[Route | View]:
        """Return its routes, the same each time."""

    def failed(self, failure: Failure, request_id: str | None) -> tuple[int, Any]:
        """Return the HTTP status of an error on a path that it owns, and the body, which becomes JSON.

        Args:
            failure: What went wrong, with the status and the kind that OpenAI's API would have.
            request_id: As the header `x-request-id` names it.
        """
        raise NotImplementedError
