"""`/generate`: from a body to requests, one for each prompt."""

from __future__ import annotations

from typing import Any, TypeVar

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Ids, JsonObject, Names, Prompt, Request, Text
from dovetail.processing.refusals import unsupported
from dovetail_server.apis import fields
from dovetail_server.apis.generate.schema import ANY_MODEL, GenerateParams, GenerateRequest, ImageUrl
from dovetail_server.serving.common import choice_rid

T = TypeVar("T")
DEFAULT_MAX_TOKENS = 128


def read(body: GenerateRequest) -> list[Request]:
    """Return the requests that a body makes: options are one value for all prompts, or a list of values.

    Raises:
        RequestError: No prompt or two, a list whose length is not the batch's, or fields that contradict each other.
    """
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("send one of text and input_ids", param="text", code="invalid_value")
    param = "text" if body.text is not None else "input_ids"
    given: Any = body.text if body.text is not None else body.input_ids
    is_batch = not (isinstance(given, str) or isinstance(given[0], int))
    items: list[Any] = given if is_batch else [given]
    count = len(items)
    wants = spread(body.return_logprob, count, "return_logprob", False)
    tops = spread(body.top_logprobs_num, count, "top_logprobs_num", 0)
    named = named_of(body.token_ids_logprob, wants)
    starts = spread(body.logprob_start_len, count, "logprob_start_len", -1)
    params = spread(body.sampling_params, count, "sampling_params", GenerateParams.model_construct())
    shared = {id(one): Options(one) for one in params}
    images = images_of(body.image_data, count, is_batch)
    return [
        Request(
            prompts=[prompt_of(items[at], images[at])],
            model=None if body.model == ANY_MODEL else body.model,
            rid=rid,
            stream=bool(body.stream),
            logprobs=tops[at] if wants[at] else None,
            prompt_logprobs=tops[at] if wants[at] and starts[at] >= 0 else None,
            prompt_logprobs_start=max(starts[at], 0),
            named_ids=named[at],
            uses_defaults=False,
            priority=body.priority or 0,
            cache_salt=fields.same_field(body, "cache_salt", "extra_key") or "",
            names=names_of(f"{param}[{at}]" if count > 1 else param),
            reply={"is_batch": is_batch, "shows_text": bool(body.return_text_in_logprobs)},
            **shared[id(params[at])].values,
        )
        for at, rid in enumerate(rids_of(body.rid, count))
    ]


class Options:
    """What `sampling_params` say, read once for all prompts that share them."""

    def __init__(self, given: GenerateParams) -> None:
        """Read them.

        Raises:
            RequestError: Two names of one field differ, or a field belongs to other routes.
        """
        if given.prompt_logprobs is not None:
            raise unsupported("sampling_params.prompt_logprobs", "send return_logprob and logprob_start_len")
        limit = fields.same_field(given, "max_new_tokens", "max_tokens")
        seed = fields.same_field(given, "sampling_seed", "seed")
        min_tokens = fields.same_field(given, "min_new_tokens", "min_tokens")
        sampling = fields.sampling_of(given.model_copy(update={"seed": seed, "min_tokens": min_tokens}))
        self.values: JsonObject = {
            "n": given.n or 1,
            "sampling": sampling,
            "limit": DEFAULT_MAX_TOKENS if limit is None else limit,
            "clamps": limit is None,
            "clamps_by_default": limit is not None,
            "grammar": fields.grammar_of(given),
            "grammar_backend": given.grammar_backend,
        }


def names_of(prompt: str) -> Names:
    """Return what the body calls its fields."""
    return Names(prompt=prompt, limit="max_new_tokens", logprobs="top_logprobs_num", named_ids="token_ids_logprob")


def prompt_of(given: str | list[int], images: list[JsonObject]) -> Prompt:
    """Return one prompt with its images."""
    return Text(text=given, images=images) if isinstance(given, str) else Ids(ids=given, images=images)


def images_of(given: Any, count: int, is_batch: bool) -> list[list[JsonObject]]:
    """Return the images of each prompt as parts.

    Raises:
        RequestError: A batch has not one entry for each prompt.
    """
    if given is None:
        return [[]] * count
    if not is_batch:
        if isinstance(given, list) and any(isinstance(one, list) for one in given):
            why = "image_data holds lists, which a batch has: send a list of images"
            raise RequestError(why, param="image_data", code="invalid_value")
        return [_parts(given, "image_data")]
    if not isinstance(given, list):
        given = [given]
    return [_parts(one, f"image_data[{at}]") for at, one in enumerate(spread(given, count, "image_data", None))]


def _parts(given: Any, param: str) -> list[JsonObject]:
    if given is None:
        return []
    if not isinstance(given, list):
        return [_part(given, param)]
    return [_part(one, f"{param}[{at}]") for at, one in enumerate(given) if one is not None]


def _part(given: str | ImageUrl, param: str) -> JsonObject:
    """Return one image as a part: a text that is no URL is base64."""
    if isinstance(given, ImageUrl):
        return {"type": "image_url", "image_url": given.model_dump(exclude_none=True), "param": param}
    is_url = given[:5].lower() == "data:" or "://" in given[:16]
    return {"type": "image_url", "image_url": given if is_url else f"data:;base64,{given}", "param": param}


def named_of(given: Any, wants: list[bool]) -> list[list[int]]:
    """Return the tokens that each prompt names for log probabilities; one list is for all.

    Raises:
        RequestError: Nobody asked for log probabilities.
    """
    if not given:
        return [[] for _ in wants]
    several = not isinstance(given[0], int)
    rows = (
        [row or [] for row in spread(given, len(wants), "token_ids_logprob", None)] if several else [given] * len(wants)
    )
    if any(row and not wanted for row, wanted in zip(rows, wants, strict=True)):
        why = "token_ids_logprob needs return_logprob: true"
        raise RequestError(why, param="token_ids_logprob", code="invalid_value")
    return rows


def rids_of(given: str | list[str] | None, count: int) -> list[str | None]:
    """Return one identifier for each prompt.

    Raises:
        RequestError: Not one for each, or two that are equal.
    """
    if given is None:
        return [None] * count
    if isinstance(given, str):
        return [choice_rid(given, at, count) for at in range(count)]
    if len(given) != count or len(set(given)) != count:
        text = f"rid must hold {count} different identifiers, one per prompt (given: {len(given)})"
        raise RequestError(text, param="rid", code="invalid_value")
    return list(given)


def spread(value: T | list[T] | None, count: int, param: str, default: T) -> list[T]:
    """Return one value for each prompt.

    Raises:
        RequestError: A list of another length.
    """
    if isinstance(value, list):
        if len(value) != count:
            text = f"{param} has {len(value)} entries, but there are {count} prompts"
            raise RequestError(text, param=param, code="invalid_value")
        return value
    return [default if value is None else value] * count
