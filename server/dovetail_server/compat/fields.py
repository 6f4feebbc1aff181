"""Fields that SGLang's, vLLM's and their gateways' clients put into bodies, beyond those of our own schemas.

A schema that has a field of such a name goes first. A field at a value that means nothing is dropped; at any other it
is a 400 with the reason. What nobody knows gets the nearest name of the schema.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dovetail_server.compat.dialects import SAID
from dovetail_server.compat.known import FIELDS, SENT

ELSEWHERE: dict[str, str] = {
    "prompt": "a prompt goes to /v1/completions; /generate takes text or input_ids",
    "messages": "a conversation goes to /v1/chat/completions or /v1/messages",
}
"""Inputs of other routes: what is said of them where they are no field."""

OURS: dict[str, tuple[str, ...]] = {
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    **dict.fromkeys(("response_format", "output_format", "text_format"), ("text.format", "output_config.format")),
    **dict.fromkeys(("reasoning_effort", "effort"), ("reasoning.effort", "output_config.effort")),
    "reasoning_summary": ("reasoning.summary",),
    **dict.fromkeys(("verbosity", "text_verbosity"), ("text.verbosity",)),
    **dict.fromkeys(("thinking_budget", "max_thinking_tokens"), ("thinking.budget_tokens",)),
    **dict.fromkeys(("enable_thinking", "think"), ("thinking", "reasoning.effort")),
    "thinking": ("reasoning",),
    "reasoning": ("thinking",),
    "stop": ("stop_sequences",),
    **dict.fromkeys(("system_prompt", "system"), ("system", "instructions")),
    "parallel_tool_calls": ("tool_choice.disable_parallel_tool_use",),
    "functions": ("tools",),
    "repeat_penalty": ("repetition_penalty",),
    "response_id": ("previous_response_id",),
}
"""Fields of the other of our APIs, and of its dialects: what says the same where a route has not this one."""


def ours(name: str, known: Collection[str]) -> str | None:
    """Return the field of a route's schema that says what one of another API does; None where there is none.

    Args:
        name: The field, which the schema does not have.
        known: Fields of the schema.
    """
    return next((other for other in OURS.get(name, ()) if other.partition(".")[0] in known), None)


def means_nothing(name: str, value: Any) -> bool:
    """Tell whether a field that a schema does not have may be dropped."""
    known = FIELDS.get(name)
    return value is None if known is None else value is None or known.means_nothing(value)


def refusal(name: str) -> str | None:
    """Return why a field is not supported; None for one that no peer knows."""
    if name in SAID:
        return "this route has no field that says it; see /v1/chat/completions"
    known = FIELDS.get(name) or SENT.get(name)
    return None if known is None else known.why
