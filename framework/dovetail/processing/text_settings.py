"""Settings of what stands before an engine: how prompts are made of requests, and what requests may ask for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

from dovetail.base.settings import setting
from dovetail.processing.plugin_settings import PluginSettings

SamplingName = Literal["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]


def read_object(value: object) -> object:
    """Accept a JSON object as text, as flags and environment variables write it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"is no JSON object: {error}") from None


JsonObject = Annotated[dict[str, Any], NoDecode, BeforeValidator(read_object)]
Sampling = Annotated[dict[SamplingName, float], NoDecode, BeforeValidator(read_object)]


class TextSettings(PluginSettings):
    """Settings that the server, batches and `LLM` share."""

    default_chat_template_kwargs: JsonObject = setting(default_factory=dict)
    """Chat template variables as a JSON object, such as {"enable_thinking": false}; those of a request override them.
    """
    compact_json: bool = setting(False, "constrained-json-disable-any-whitespace")
    """Generate JSON without whitespace between its tokens for requests with a schema, unless the request sets it."""
    sampling_defaults: Literal["model", "openai"] = setting("model")
    """Source of sampling parameters that a request omits: the model's generation_config.json, or OpenAI's defaults."""
    preferred_sampling_params: Sampling = setting(..., "override-generation-config", default_factory=dict)
    """Sampling parameters for requests that omit them, as a JSON object; they override --sampling-defaults."""
    max_prompt_bytes: int | None = setting(None, ge=1, le=1 << 34)
    """Maximum size of a prompt's text before tokenization. Default: 32 bytes per token of context."""
    max_logprobs: int = setting(20, ge=-1, le=1 << 20)
    """Maximum top alternatives per token that a request may ask for; -1: the whole vocabulary."""
    max_tokens_beyond: Literal["clamp", "refuse"] | None = setting(None)
    """Handling of a request for more tokens than the context holds after its prompt. `clamp`: end the response with the
    context; `refuse`: 400. Default: clamp for chats, because agents ask for 32,000 tokens and more; refuse for
    /v1/completions, /v1/responses and /generate.
    """


def template_switches(reasoning_effort: str | None, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `chat_template_kwargs` with what `reasoning_effort` stands for; explicit switches win.

    Templates know thinking as `enable_thinking`, `thinking` or `reasoning_effort`: all are set; `none` turns it off.
    """
    given = dict(kwargs or {})
    if reasoning_effort is None:
        return given
    if reasoning_effort == "none":
        return {"enable_thinking": False, "thinking": False} | given
    return {"enable_thinking": True, "thinking": True, "reasoning_effort": reasoning_effort} | given
