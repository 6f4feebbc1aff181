"""`/v1/completions`: from a body to a request."""

from __future__ import annotations

from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Ids, Names, Prompt, Request, Text
from dovetail_server.apis import fields
from dovetail_server.apis.completions.schema import CompletionRequest

DEFAULT_MAX_TOKENS = 16


def read(body: CompletionRequest) -> Request:
    """Return the request that a body makes.

    Raises:
        RequestError: It asks for what is not served here, or its fields contradict each other.
    """
    check(body)
    has_rows = body.logprobs is not None
    reply = {"echoes": bool(body.echo), "has_ids": body.return_token_ids, "names_ids": body.return_tokens_as_token_ids}
    reply["has_prompt_rows"] = body.prompt_logprobs is not None
    return Request(
        prompts=prompts_of(body),
        model=body.model,
        n=body.n or 1,
        candidates=body.best_of or 0,
        sampling=fields.sampling_of(body),
        limit=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        **({"clamps": True} if body.max_tokens is None else fields.clamping_of(body, False)),
        cut=fields.cut_of(body),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo and has_rows else body.prompt_logprobs,
        named_ids=body.logprob_token_ids or [],
        tracks_offsets=has_rows,
        grammar=fields.grammar_of(body),
        grammar_backend=body.grammar_backend,
        names=Names(prompt="prompt"),
        reply=fields.usage_wishes(body) | {name: True for name, is_given in reply.items() if is_given},
        **fields.service_of(body),
    )


def prompts_of(body: CompletionRequest) -> list[Prompt]:
    """Return the prompts, whichever of the four forms was sent: a text, token ids, or a list of either."""
    given: Any = body.prompt
    items: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    special, suffix, has_text = body.add_special_tokens is not False, body.suffix or "", bool(body.echo)
    return [
        Text(text=item, adds_special_tokens=special, suffix=suffix)
        if isinstance(item, str)
        else Ids(ids=item, has_text=has_text, suffix=suffix)
        for item in items
    ]


def check(body: CompletionRequest) -> None:
    """Refuse what is not supported or does not fit together.

    Raises:
        RequestError: Naming the field.
    """
    fields.refuse_stream_mix(body)
    n, best_of = body.n or 1, body.best_of or None
    if best_of is not None and best_of < n:
        raise RequestError(f"best_of is {best_of}, below n, which is {n}", param="best_of", code="invalid_value")
    if best_of is not None and best_of > n and body.stream:
        raise RequestError("best_of above n cannot be streamed", param="best_of", code="invalid_value")
    if not body.suffix:
        return
    others = {
        "truncate_prompt_tokens": bool(body.truncate_prompt_tokens),
        "prompt_logprobs": body.prompt_logprobs is not None,
        "echo": bool(body.echo) and body.logprobs is not None,
    }
    if (name := next((name for name, is_there in others.items() if is_there), None)) is not None:
        why = f"{name} is about the prompt's tokens, and suffix puts others around them; leave one of them out"
        raise RequestError(why, param=name, code="invalid_value")
