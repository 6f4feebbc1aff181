"""`context_management` of `/v1/messages`: what a request may have cleared."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from dovetail.processing.bounds import MAX_TOKENS
from dovetail_server.schema.common import Name, RequestModel

Names = Annotated[list[Name], Field(max_length=1024)]


class NumTokens(RequestModel):
    """A number of tokens; four bytes of JSON count as one."""

    type: Literal["input_tokens"]
    value: int = Field(ge=0, le=MAX_TOKENS)


class NumToolUses(RequestModel):
    """A number of tool uses that have their results."""

    type: Literal["tool_uses"]
    value: int = Field(ge=0, le=MAX_TOKENS)


class Trigger(RequestModel):
    """Either of these."""

    type: Literal["input_tokens", "tool_uses"]
    value: int = Field(ge=0, le=MAX_TOKENS)


class KeptTurns(RequestModel):
    """A number of the model's turns, or all."""

    type: Literal["thinking_turns", "all"]
    value: int | None = Field(None, ge=1, le=MAX_TOKENS, description="Of `thinking_turns`.")


class ClearToolUses(RequestModel):
    """Clear old results of tools: a line of text takes their place."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Trigger | None = Field(None, description="Beyond it. Default: 100,000 input tokens.")
    keep: NumToolUses | None = Field(None, description="Of the last uses. Default: 3.")
    clear_at_least: NumTokens | None = Field(None, description="Else nothing is cleared.")
    exclude_tools: Names | None = Field(None, description="Whose results stay.")
    clear_tool_inputs: bool | Names | None = Field(None, description="Clear the inputs as well, of all tools or some.")


class ClearThinking(RequestModel):
    """Clear old thinking. The first of the edits."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeptTurns | None = Field(None, description="Of the last turns with thinking. Default: 1.")


class Compact(RequestModel):
    """Not supported."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["compact_20260112"]


class ContextEdits(RequestModel):
    """What is cleared out of the prompt."""

    edits: Annotated[
        list[Annotated[ClearToolUses | ClearThinking | Compact, Field(discriminator="type")]], Field(max_length=64)
    ] = Field(default_factory=list)
