"""Arguments of `LLM`'s calls, brought into one form; what has none is refused by its name and place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import msgspec
from pydantic import BaseModel

from dovetail.processing.bounds import POSITIVE
from dovetail.processing.checked import check_forms
from dovetail.processing.refusals import wrong

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`."""
Message = Mapping[str, Any]
PROMPT = "text, token ids, or a mapping with 'prompt' or 'prompt_token_ids'"
OPTIONAL = frozenset(
    ("max_tokens", "seed", "logprobs", "prompt_logprobs", "thinking_budget", "top_n", "truncate_prompt_tokens")
)
MESSAGES = "a list of messages, such as {'role': 'user', 'content': 'Hello'}"


def prompt_ids(prompts: Prompt | Sequence[Prompt], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Return the token ids of one prompt or many: a list of ints is one prompt. `encode` makes them of texts.

    Raises:
        RequestError: A prompt is none of these; it says which.
    """
    if isinstance(prompts, str | Mapping):
        return [_ids(0, prompts, encode)]
    many = listed(prompts, "prompts", f"{PROMPT}, or a list of these")
    if many and isinstance(many[0], Integral):
        return [_ids(0, many, encode)]
    return [_ids(index, prompt, encode) for index, prompt in enumerate(many)]


def _ids(index: int, prompt: Any, encode: Callable[[str], list[int]]) -> list[int]:
    if isinstance(prompt, Mapping):
        given = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
        strange = sorted(map(str, prompt.keys() - {"prompt", "prompt_token_ids"}))
        if strange or not given:
            problem = f"has {strange[0]!r}" if strange else "is empty"
            raise wrong(f"prompt {index} {problem}; a mapping has 'prompt' or 'prompt_token_ids'", "prompts")
        prompt = prompt[given[-1]]  # the ids, where both are given: they are the text's
        if given[-1] == "prompt_token_ids" and isinstance(prompt, str):
            raise wrong(f"prompt {index} has text as 'prompt_token_ids'; give token ids, or 'prompt'", "prompts")
    if isinstance(prompt, str):
        return encode(prompt)
    ids = listed(prompt, f"prompt {index}", PROMPT, "prompts")
    for at, one in enumerate(ids):
        if type(one) is not int and (isinstance(one, bool) or not isinstance(one, Integral)):
            kind = type(prompt).__name__
            raise wrong(f"prompt {index} is of type {kind} and has {one!r:.40} at {at}; give {PROMPT}", "prompts")
    return [int(one) for one in ids]


def messages_of(given: Any) -> list[list[dict[str, Any]]]:
    """Return the messages of one conversation or several; the clients' own objects of messages are read, too.

    Raises:
        RequestError: A conversation or a message has another form; it says which.
    """
    many = listed(given, "conversations", f"{MESSAGES}, or a list of such lists")
    if many and isinstance(many[0], Mapping | BaseModel):
        many = [many]
    return [_messages(index, each) for index, each in enumerate(many)]


def _messages(index: int, given: Any) -> list[dict[str, Any]]:
    place = f"prompt {index}: messages"
    found: list[dict[str, Any]] = []
    for at, message in enumerate(listed(given, place, MESSAGES, "messages")):
        if isinstance(message, BaseModel):
            found.append(message.model_dump(exclude_none=True))
        elif isinstance(message, Mapping):
            found.append(dict(message))
        else:
            kind = type(message).__name__
            raise wrong(f"{place}[{at}] is of type {kind}; give a mapping with 'role' and 'content'", "messages")
    if not found:
        raise wrong(f"{place} is empty; give at least one message", "messages")
    check_forms("messages", found, place)
    return found


def texts(given: Any, name: str) -> list[str]:
    """Return one text or many as a list.

    Raises:
        RequestError: One is no text; it says which.
    """
    if isinstance(given, str):
        return [given]
    found = listed(given, name, "a text, or a list of texts")
    for at, one in enumerate(found):
        if not isinstance(one, str):
            raise wrong(f"{name}[{at}] is of type {type(one).__name__}; give a text", name)
    return found


def listed(given: Any, name: str, possible: str, param: str | None = None) -> list[Any]:
    """Return what holds several values, in order; errors call it `name`, of the argument `param` if that is another.

    Raises:
        RequestError: It does not, or is text.
    """
    found = given.tolist() if hasattr(given, "tolist") else given  # arrays of NumPy, tensors
    if isinstance(found, Sequence) and not isinstance(found, str | bytes | bytearray | memoryview):
        return list(found)
    raise wrong(f"{name} is of type {type(given).__name__}; give {possible}", param or name)


def typed(value: Any, kind: Any, name: str) -> Any:
    """Return the value of a field as a type that JSON has.

    Raises:
        RequestError: It is of another one.
    """
    try:
        return msgspec.convert(_plain(value), kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        raise wrong(f"{name}{where.rstrip('`')}: {what[:1].lower()}{what[1:]}", name) from None
    except UnicodeEncodeError:
        raise wrong(f"{name} has text with half of a surrogate pair; give whole characters", name) from None


def _plain(value: Any) -> Any:
    """Return numbers of NumPy, and whatever holds several values, as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        return value
    return [_plain(each) for each in value]


def check_number(name: str, value: Any, least: float, most: float, *, is_whole: bool) -> None:
    """Refuse what is no number, or out of bounds.

    Raises:
        RequestError: Naming the field, its value and its bounds.
    """
    if value is None and name in OPTIONAL:
        return
    kind = Integral if is_whole else Real
    if not isinstance(value, kind) or isinstance(value, bool):
        raise wrong(f"{name} must be a {'whole ' if is_whole else ''}number, not {value!r}", name)
    number = float(value)
    if not least <= number <= most or (name in POSITIVE and number == least):
        above = "above" if name in POSITIVE else "from"
        raise wrong(f"{name} must be {above} {least:g} to {most:g}, not {value!r}", name)
