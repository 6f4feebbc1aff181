"""The endpoints that can be driven: how a request is written, and what an event or a whole reply says.

An event of a stream is one JSON object after `data:`. `/v1/completions` and `/v1/chat/completions` put deltas into
`choices` and, where asked, `usage` into the last event or all of them; `/generate` (SGLang's own, and ours) sends the
reply so far, with counts in `meta_info`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Prompt = str | list[int] | list[dict[str, Any]]
"""Text, token ids, or the messages of a conversation."""
PATHS: dict[str, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "generate": "/generate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSampling:
    """What all requests of a run have in common.

    `ignore_eos` goes with showing special tokens: a model of random weights may say nothing else, and a token without
    text has no event in which its time could be seen.
    """

    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    stream: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of OpenAI's endpoints, which take precedence."""


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """Tokens of a reply as the server counted them."""

    prompt: int
    completion: int
    cached: int


def body_of(endpoint: str, prompt: Prompt, output_len: int, sampling: BenchSampling, *, counts_events: bool) -> Any:
    """Return a request's body; `counts_events` asks for the tokens so far in every event."""
    if endpoint == "generate":
        params = {
            "temperature": sampling.temperature,
            "max_new_tokens": output_len,
            "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": not sampling.ignore_eos,
        }
        key = "text" if isinstance(prompt, str) else "input_ids"
        return {key: prompt, "sampling_params": params, "stream": sampling.stream}
    body: dict[str, Any] = {
        "model": sampling.model,
        "temperature": sampling.temperature,
        "max_tokens": output_len,
        "stream": sampling.stream,
    }
    if sampling.ignore_eos:
        body |= {"ignore_eos": True, "skip_special_tokens": False}
    if sampling.stream:
        body["stream_options"] = {"include_usage": True}
        if counts_events:
            body["stream_options"]["continuous_usage_stats"] = True
    if endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    else:
        body["prompt"] = prompt
    return body | dict(sampling.extra)


def counts_of(reply: Any) -> UsageCounts | None:
    """Return the counts in an event or a whole reply, None where there are none."""
    if not isinstance(reply, dict):
        return None
    if isinstance(meta := reply.get("meta_info"), dict):
        found, cached = meta, meta.get("cached_tokens")
    elif isinstance(usage := reply.get("usage"), dict):
        found, cached = usage, (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    else:
        return None
    prompt, completion = found.get("prompt_tokens"), found.get("completion_tokens")
    if not isinstance(prompt, int) or not isinstance(completion or 0, int):
        return None
    return UsageCounts(prompt, completion or 0, cached if isinstance(cached, int) else 0)


def error_of(reply: Any) -> str | None:
    """Return the message of an error in an event or a reply."""
    if not isinstance(reply, dict):
        return None
    error = reply.get("error")
    if isinstance(error, dict):
        return str(error.get("message") or error)
    if isinstance(error, str):
        return error
    return str(reply.get("message") or reply) if reply.get("object") == "error" else None


def has_tokens(event: dict[str, Any]) -> bool:
    """Tell whether an event brings tokens: not the one that names the role, nor the ends of a stream."""
    if "meta_info" in event:
        counts = counts_of(event)
        return counts is not None and counts.completion > 0
    choices = event.get("choices")
    if not choices:
        return False
    choice = choices[0]
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


def is_finish(event: dict[str, Any]) -> bool:
    """Tell whether an event says why the reply ended."""
    if isinstance(meta := event.get("meta_info"), dict):
        return meta.get("finish_reason") is not None
    choices = event.get("choices") or [{}]
    return choices[0].get("finish_reason") is not None
