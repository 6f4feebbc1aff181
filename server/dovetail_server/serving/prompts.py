"""The prompts of a request that generates nothing, as they are once its body has been read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.contracts.errors import RequestError
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
        is_batch: They came as a list.
    """

    prompts: list[Prompt]
    is_batch: bool = False


def read_one(
    item: str | list[int],
    text: Processor,
    param: str,
    *,
    special: bool = True,
) -> Prompt:
    """Return one prompt.

    Raises:
        RequestError: Empty, too big, or an id outside the vocabulary.
    """
    if isinstance(item, str):
        result = Prompt(text.encode(item, param, add_special_tokens=special))
    else:
        check_token_ids(item, text.limits.vocab_size, param)
        result = Prompt(item)
    if not result.ids:
        raise empty(param)
    return result


def empty(param: str) -> RequestError:
    """Refuse a prompt without tokens."""
    return RequestError(f"{param} is empty; send at least one token", param=param, code="invalid_value")
