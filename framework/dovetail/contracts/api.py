"""What an API is to the server: routes, each with a `read` from a body to a `Request` and a `Writer` of replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dovetail.contracts.replies import Reply, Writer
from dovetail.contracts.requests import Request

Placing = Literal["prefix", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A route that generates.

    Attributes:
        name: Its name in the OpenAPI document, and between processes.
        path: Where it is, such as `/v1/chat/completions`. POST.
        about: What it does, in a sentence, for the OpenAPI document.
        body: What a body is checked by: a pydantic model, or a msgspec struct.
        read: Makes of a checked body a request; of a batch whose prompts want different things, several.
        writer: Writes a reply.
        reply: The struct of a whole reply, for the OpenAPI document.
        id_prefix: What an identifier of a reply begins with.
        is_named_by_client: A reply has the identifier that the client gave the request, if it gave one.
        place: Where a gateway sends it: `prefix`, to the worker that knows the beginning of its prompt, or `any`.
        resumes: A gateway takes a stream to another worker when its own dies.
        may_list: A whole reply may be a list of replies.
        renders_list: `…/render` gives a list, as there may be several prompts.
        tag: The section of the OpenAPI document.
        error: The struct of an error's body, for the OpenAPI document; None: OpenAI's.
    """

    name: str
    path: str
    about: str
    body: type[Any]
    read: Callable[[Any], Request | list[Request]]
    writer: Callable[[Reply], Writer]
    reply: type[Any]
    id_prefix: str
    is_named_by_client: bool = True
    place: Placing = "prefix"
    resumes: bool = True
    may_list: bool = False
    renders_list: bool = False
    tag: str = "openai"
    error: type[Any] | None = None

    def requests(self, body: Any) -> list[Request]:
        """Return the requests that a checked body makes.

        Raises:
            RequestError: It asks for what this API does not serve.
        """
        made = self.read(body)
        return [made] if isinstance(made, Request) else made


Routes = Sequence[Route]
