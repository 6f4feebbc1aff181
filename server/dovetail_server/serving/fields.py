"""What only a body says: fields of two names, what a stream does not carry, how a prompt is cut."""

from __future__ import annotations

from dovetail.processing.sampling import SamplingLimits
from dovetail_server import errors
from dovetail_server.openai.common import PromptFields, ServiceFields


def refuse_stream_mix(request: ServiceFields, prompt_logprobs: int | None) -> None:
    """Refuse what a stream does not carry; `stream_options` only say how one would be written.

    Raises:
        RequestError: Naming the field.
    """
    if request.stream and prompt_logprobs is not None:
        raise errors.unsupported("prompt_logprobs", "a stream does not carry them; leave out stream")


def truncated(ids: list[int], request: PromptFields, max_tokens: int | None, limits: SamplingLimits) -> list[int]:
    """Return a prompt cut as the request asks for, with room for `max_tokens`: by default it is not."""
    wanted = request.truncate_prompt_tokens
    if wanted is None or wanted == 0:
        return ids
    room = limits.context_len - max(max_tokens or 1, 1)
    most = max(1, min(room, len(ids) if wanted < 0 else wanted))
    return ids[:most] if request.truncation_side == "right" else ids[-most:]
