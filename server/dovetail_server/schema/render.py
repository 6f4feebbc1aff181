"""`…/render`: the reply, as vLLM has it: what the engine would be given."""

from __future__ import annotations

from typing import Any

import msgspec


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as token ids, with its sampling parameters. Nothing has been generated."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    cache_salt: str | msgspec.UnsetType = msgspec.UNSET
    priority: int
