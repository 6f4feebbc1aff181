"""The prompts of a request as they are once its body has been read: all that the engine needs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.errors import RequestError
from dovetail.processing.sampling import check_token_ids

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's ids, its text where that is shown, and where the second of its two texts begins."""

    ids: list[int]
    text: str = ""
    second: int = 0


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


def read_each(
    given: Any, text: Processor, param: str, *, has_echo: bool = False, special: bool = True, keeps: bool = False
) -> list[Prompt]:
    """Return every prompt of a field, whichever of the four forms was sent: a text, token ids, or a list of either.

    `keeps` as of `Tokenizer.encode`.

    Raises:
        RequestError: Empty, too big, or an id outside the vocabulary.
    """
    if isinstance(given, str):
        items: Sequence[Any] = [given]
    elif isinstance(given[0], int):
        items = [given]
    else:
        items = given
    names = [param] if len(items) == 1 else [f"{param}[{i}]" for i in range(len(items))]
    return [
        read_one(item, text, name, has_echo=has_echo, special=special, keeps=keeps)
        for item, name in zip(items, names, strict=True)
    ]


def read_one(
    item: str | list[int],
    text: Processor,
    param: str,
    *,
    has_echo: bool = False,
    special: bool = True,
    keeps: bool = False,
) -> Prompt:
    """Return one prompt.

    Raises:
        RequestError: See `read_each`.
    """
    if isinstance(item, str):
        result = Prompt(text.encode(item, param, add_special_tokens=special, keeps=keeps), item)
    else:
        check_token_ids(item, text.limits.vocab_size, param)
        result = Prompt(item, text.tokenizer.decode(item, skip_special_tokens=False) if has_echo else "")
    if not result.ids:
        raise empty(param)
    return result


def empty(param: str) -> RequestError:
    """Refuse a prompt without tokens."""
    return RequestError(f"{param} is empty; send at least one token", param=param, code="invalid_value")
