"""The prompts of a request as they are once its body has been read: all that the engine needs of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's ids, and its text where that is echoed."""

    ids: list[int]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """What takes time and memory in proportion to a body, done.

    Attributes:
        prompts: In the order of the request.
        tail: What the chat template appended, for the output parser.
        is_batch: They came as a list.
        items: The input of a response as it is stored, JSON.
    """

    prompts: list[Prompt]
    tail: str = ""
    is_batch: bool = False
    items: bytes = b""

    @property
    def only(self) -> Prompt:
        """The prompt of a conversation."""
        return self.prompts[0]
