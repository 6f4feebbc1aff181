"""The prompts that `LLM` takes: text, token ids, or a mapping of one of them, as vLLM's are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.contracts.errors import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`."""


def prompt_ids(prompts: Prompt | Sequence[Prompt], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Return the token ids of one prompt or many: a list of ints is one prompt. `encode` makes them of texts.

    Raises:
        RequestError: A prompt is none of these; it says which.
    """
    is_one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    many: Sequence[Any] = [prompts] if is_one else prompts  # type: ignore[assignment]
    return [_ids(index, prompt, encode) for index, prompt in enumerate(many)]


def _ids(index: int, prompt: Any, encode: Callable[[str], list[int]]) -> list[int]:
    if isinstance(prompt, Mapping):
        given = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
        strange = sorted(map(str, prompt.keys() - {"prompt", "prompt_token_ids"}))
        if strange or not given:
            problem = f"has {strange[0]!r}" if strange else "is empty"
            raise RequestError(f"prompt {index} {problem}; a mapping has 'prompt' or 'prompt_token_ids'")
        prompt = prompt[given[-1]]  # the ids, where both are given: they are the text's
    if isinstance(prompt, str):
        return encode(prompt)
    try:
        ids = list(prompt)
    except TypeError:
        ids = None
    if ids is None or not all(hasattr(i, "__index__") for i in ids):
        raise RequestError(
            f"prompt {index} is of type {type(prompt).__name__}; give text, token ids, or a mapping with 'prompt' or "
            "'prompt_token_ids'"
        )
    return [int(i) for i in ids]
