"""What bodies of several APIs say alike, read into the parts of a `Request`."""

from __future__ import annotations

from typing import Any

from dovetail.contracts.requests import Cut, JsonObject, Sampling
from dovetail.grammar.spec.fields import NAMES
from dovetail.processing.refusals import unsupported, wrong

SAMPLED = tuple(name for name in Sampling.__struct_fields__ if name != "keeps_stop")


def same_field(request: Any, name: str, alias: str) -> Any:
    """Return the value of a field with two names, of which some requests have the first only.

    Raises:
        RequestError: Both are given and differ.
    """
    first, second = getattr(request, name), getattr(request, alias, None)
    if first is not None and second is not None and first != second:
        raise wrong(f"{name} and {alias} are one setting and differ; give one", alias)
    return first if first is not None else second


def sampling_of(body: Any) -> Sampling:
    """Return how a body of `SamplingFields` has tokens chosen.

    Raises:
        RequestError: Two names of one field differ.
    """
    given = body.__dict__
    values = {name: value for name in SAMPLED if (value := given[name]) is not None}
    return Sampling(keeps_stop=bool(same_field(body, "no_stop_trim", "include_stop_str_in_output")), **values)


def grammar_of(body: Any) -> JsonObject:
    """Return what a body says of the form of its reply, as it says it."""
    given = body.__dict__
    return {name: value for name in NAMES if (value := given.get(name)) is not None}


def cut_of(body: Any) -> Cut | None:
    """Return how a body of `PromptFields` has its prompts cut: by default they are not."""
    most = body.truncate_prompt_tokens
    if not most:
        return None
    return Cut(most=most, side=body.truncation_side or "left")


def clamping_of(body: Any, clamps: bool) -> dict[str, Any]:
    """Return the fields of a `Request` that say what becomes of a limit beyond the context.

    Args:
        body: Of `PromptFields`.
        clamps: What the API's clients expect.
    """
    behavior = body.context_length_exceeded_behavior
    return {"clamps": clamps, "clamps_by_default": True} if behavior is None else {"clamps": behavior == "truncate"}


def service_of(body: Any) -> dict[str, Any]:
    """Return the fields of a `Request` that say how it is served.

    Raises:
        RequestError: Two names of one field differ.
    """
    return {
        "rid": same_field(body, "rid", "request_id"),
        "priority": body.priority or 0,
        "cache_salt": same_field(body, "cache_salt", "extra_key") or "",
        "stream": bool(body.stream),
    }


def usage_wishes(body: Any) -> JsonObject:
    """Return what a writer has to know of the tokens used: whether a stream ends with them, and each chunk has them."""
    options = body.stream_options
    if options is None:
        return {}
    made = {"ends_with_usage": options.include_usage, "has_usage": options.continuous_usage_stats}
    return {name: value for name, value in made.items() if value is not None}


def refuse_stream_mix(body: Any) -> None:
    """Refuse what a stream does not carry; `stream_options` only say how one would be written.

    Raises:
        RequestError: Naming the field.
    """
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "a stream does not carry them; leave out stream")
