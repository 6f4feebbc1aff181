"""Items of the Responses API, and the conversation of chat messages that they stand for.

Items are kept as the API shows them, as plain dictionaries: those of the request are brought into that form here, with
ids, those of replies have it. One function makes messages of both, so a stored conversation and one that the client
sends whole give the model the same prompt.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.responses.item_schema import (
    AdditionalToolsItem,
    CompactionItem,
    InputPart,
    ItemReference,
    KeptItem,
    MessageItem,
    ReasoningItem,
    ResultItem,
    item_model,
)
from dovetail_server.apis.responses.tools import call_result, function_call
from dovetail_server.storage.paths import new_id

Item = dict[str, Any]
AnyItem = MessageItem | KeptItem | AdditionalToolsItem | ResultItem | ReasoningItem | CompactionItem | ItemReference
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
IMAGE_PART = "input_image"
PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs", "compaction": "cmp",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco", "local_shell_call": "lsh", "shell_call": "sh",
    "shell_call_output": "sho", "apply_patch_call": "apc", "apply_patch_call_output": "apco", "web_search_call": "ws",
    "additional_tools": "at", "compaction_trigger": "cmpt",
}  # fmt: skip
CALLS = ("function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call")
RESULTS = tuple(f"{kind}_output" for kind in CALLS)
OPEN = ("queued", "in_progress")
"""Of a response that is not done."""
SUMMARY = "Summary of the conversation so far:\n"
"""What stands before a summary where the model reads it, as if it had written it itself, and …"""
RECALL, GO_ON = "What has happened in our conversation so far?", "Go on from this summary."
"""… what the user seems to say before and behind it, if nothing of theirs stands there: many templates want turns."""
UNSEEN = ("web_search_call", "additional_tools", "compaction_trigger")
"""Items that the model is not shown."""
UNSENT = ("compaction", "compaction_trigger", "item_reference")
"""Items that no compacted conversation holds."""
_OWN_ID = re.compile(r"[a-z]+_([0-9a-f]{40})[io][0-9a-f]{4,}")


_READ: Item = {}
"""Stands in the place of what has been read."""
decode_items = msgspec.json.Decoder(list[Item]).decode
decode_item = msgspec.json.Decoder(Item).decode


class ImageItem(dict[str, Any]):
    """A part that is an image, as a request has it. Its place there is no part of it: nobody stores that."""

    def __init__(self, part: InputPart, param: str) -> None:
        """Keep where the image is."""
        given = part.model_extra or {}
        named = {name: given[name] for name in ("image_url", "file_id") if given.get(name) is not None}
        detail = "auto" if given.get("detail") is None else given["detail"]
        super().__init__(type="input_image", detail=detail, **named)
        self.param = param


class Output(msgspec.Struct):
    """The part of a stored response that others continue."""

    output: list[Item]


decode_output = msgspec.json.Decoder(Output).decode


def turn_items(own: bytes, body: bytes) -> list[Item]:
    """Return the items of a stored response: its own input, and its output."""
    return [*decode_items(own), *decode_output(body).output]


def new_response_id() -> str:
    """Return the identifier of a response."""
    return new_id("resp_")


def missing(response_id: str, param: str = "response_id") -> RequestError:
    """Return the 404 of a response."""
    text = f"no response {response_id!r} here: it was not stored, was deleted, or has been given up as too old"
    code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
    return RequestError(text, param=param, code=code, status=404)


def item_id(response_id: str, kind: str, side: str, index: int) -> str:
    """Return the identifier of an item; it names its response.

    Args:
        response_id: The response's.
        kind: The item's type.
        side: `i` for items of the input, `o` for items of the output.
        index: Its place.
    """
    return f"{PREFIXES[kind]}_{response_id.removeprefix('resp_')}{side}{index:04x}"


def response_of_item(identifier: str) -> str | None:
    """Return the identifier of the response that an item belongs to, or None where the id is none of ours."""
    found = _OWN_ID.fullmatch(identifier)
    return None if found is None else f"resp_{found[1]}"


def input_items(given: str | Sequence[dict[str, Any]], response_id: str, field: str = "input") -> Iterator[Item]:
    """Yield a request's input, of the body's `field`, as items; references stay as they are.

    Models are made of one at a time, and what has been read is let go: a list is empty of meaning afterwards.

    Raises:
        RequestError: A part is not text, or reasoning holds nothing that can be read.
    """
    if isinstance(given, str):
        yield {
            "type": "message",
            "id": item_id(response_id, "message", "i", 0),
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_text", "text": given}],
        }
        return
    for at, item in enumerate(given):
        read = item_model(item)
        if isinstance(given, list):
            given[at] = _READ
        yield _item(read, response_id, at, f"{field}[{at}]")


def images_in(items: Iterable[Item]) -> Iterator[ImageItem]:
    """Yield the images of items that a request has."""
    for item in items:
        for part in item.get("content") or item.get("output") or ():
            if isinstance(part, ImageItem):
                yield part


def _item(item: AnyItem, response_id: str, at: int, param: str) -> Item:
    if isinstance(item, ItemReference):
        return {"type": "item_reference", "id": item.id}
    result: Item = {"type": item.type, "id": item.id or item_id(response_id, item.type, "i", at)}
    if isinstance(item, MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        result |= {"role": item.role, "content": _parts(item.content, kind, f"{param}.content")}
    elif isinstance(item, KeptItem | AdditionalToolsItem):
        result |= item.model_dump(exclude={"type", "id", "status", "parsed_arguments"}, exclude_none=True)
    elif isinstance(item, ResultItem):
        output = item.output if isinstance(item.output, str) else _parts(item.output, "input_text", f"{param}.output")
        result |= {"call_id": item.call_id, "output": output}
    elif isinstance(item, CompactionItem):
        result["encrypted_content"] = item.encrypted_content
        for _ in opened(result, param):
            pass  # refused here, where its place is known
        return result
    else:
        result |= _reasoning(item, param)
    return {**result, "status": item.status or "completed"}


def _parts(content: str | Sequence[InputPart], kind: str, param: str) -> list[Item]:
    """Return text or parts as parts of one kind; images, which no assistant sends, stay images."""
    if isinstance(content, str):
        return [_part(kind, content)]
    made: list[Item] = []
    for at, part in enumerate(content):
        if part.type == IMAGE_PART and kind != "output_text":
            made.append(ImageItem(part, f"{param}[{at}]"))
        else:
            found, text = _text(part, f"{param}[{at}]")
            made.append(_part(found if found == "refusal" else kind, text))
    return made


def _part(kind: str, text: str) -> Item:
    if kind == "refusal":
        return {"type": "refusal", "refusal": text}
    extra: Item = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **extra}


def _text(part: InputPart, param: str) -> tuple[str, str]:
    if part.type not in TEXT_PARTS:
        text = f"{param}.type {part.type!r} is not supported; possible: {', '.join((*TEXT_PARTS, IMAGE_PART))}"
        raise RequestError(text, param=f"{param}.type", code="unsupported_parameter")
    name = "refusal" if part.type == "refusal" else "text"
    value = part.refusal if part.type == "refusal" else part.text
    if value is None:
        raise RequestError(f"{param}.{name} is required", param=f"{param}.{name}", code="missing_required_parameter")
    return part.type, value


def _reasoning(item: ReasoningItem, param: str) -> Item:
    if not item.summary and not item.content and item.encrypted_content is not None:
        _check_encrypted(item.encrypted_content, param)
    content = None if item.content is None else [part.model_dump() for part in item.content]
    summary = [part.model_dump() for part in item.summary]
    return {"summary": summary, "content": content, "encrypted_content": item.encrypted_content}


def _check_encrypted(data: str, param: str) -> None:
    try:
        decode_reasoning(data)
    except ValueError:
        text = f"{param}.encrypted_content was not written by this server; leave the item out"
        raise RequestError(text, param=f"{param}.encrypted_content", code="invalid_value") from None


def encode_reasoning(text: str) -> str:
    """Return reasoning as `encrypted_content`: opaque to clients, not secret, for it is in the reply anyway."""
    return base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode("ascii")


def decode_reasoning(data: str) -> str:
    """Undo `encode_reasoning`.

    Raises:
        ValueError: It was not written so.
    """
    try:
        return base64.b64decode(data.encode("ascii"), altchars=b"-_", validate=True).decode("utf-8")
    except (UnicodeError, binascii.Error) as error:
        raise ValueError(str(error)) from None


def opened(item: Item, param: str) -> Iterator[Item]:
    """Yield what a compaction item stands for, and any other item itself.

    First comes what it does to the items before it: `window` ends them, `users` leaves messages of users, system and
    developer. A `summary` is the text that the model wrote.

    Raises:
        RequestError: Another server wrote it.
    """
    if item["type"] != "compaction":
        yield item
        return
    try:
        found = unseal(item["encrypted_content"])
        before, after = ([_unsealed(one, param) for one in side] for side in (found.before, found.after))
    except (ValueError, RequestError):  # of pydantic, too
        text = f"{param}.encrypted_content was not written by this server; send the items that it stands for"
        raise RequestError(text, param=f"{param}.encrypted_content", code="invalid_value") from None
    yield {"type": "window" if found.replaces else "users"}
    yield from before
    yield {"type": "summary", "text": found.summary}
    yield from after


def all_opened(items: Iterable[Item], place: str) -> Iterator[tuple[int, Item]]:
    """Yield items with what compaction items stand for, each with its place in the list."""
    for at, item in enumerate(items):
        for one in opened(item, f"{place}[{at}]"):
            yield at, one


def _unsealed(item: Item, param: str) -> Item:
    read = item_model(item)
    if read.type in UNSENT:
        raise ValueError(f"it holds {read.type}")
    return _item(read, "", 0, param)


def stays(item: Item) -> bool:
    """Whether an item stays beside a summary: what the user, system and developer say, and tools."""
    return bool(item["type"] == "additional_tools" or (item["type"] == "message" and item["role"] != "assistant"))


def messages_of(items: Iterable[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Return the chat messages that `opened` items stand for: one assistant message per turn of the model."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    num_first = len(messages)
    turn: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    thoughts: list[str] = []
    for item in items:
        kind = item["type"]
        if kind in UNSEEN:
            continue
        if kind in RESULTS:
            output = call_result(item)
            content = output if isinstance(output, str) else _content(output)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id") or item["id"], "content": content})
            turn = None
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _content(item["content"])})
            turn = None
        elif kind == "window":
            del messages[num_first:]
            turn = summary = None
        elif kind == "users":
            messages = joined(message for message in messages if message["role"] not in ("assistant", "tool"))
            turn = summary = None
        elif kind == "summary":
            if item["text"]:
                summary = {"role": "assistant", "content": SUMMARY + item["text"]}
                messages.append(summary)
            turn = None
        else:
            if turn is None or not _fits(turn, kind):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            if kind == "reasoning":
                if (text := reasoning_text(item)) and "reasoning_content" not in turn:
                    turn["reasoning_content"] = thoughts = []
                if text:
                    thoughts.append(text)  # joined at the end: there may be thousands in a row
            else:
                _add(turn, item)
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return messages if summary is None else _embedded(messages, summary)


def joined(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with those of the user that follow each other as one."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if found and found[-1]["role"] == message["role"] == "user":
            message = {"role": "user", "content": [*_texts(found.pop()), *_texts(message)]}
        found.append(message)
    return found


def _texts(message: dict[str, Any]) -> list[Item]:
    content = message["content"]
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _embedded(messages: list[dict[str, Any]], summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return messages with a user's one before and behind the summary: see `RECALL`."""
    at = next(at for at, message in enumerate(messages) if message is summary)
    head, tail = messages[:at], messages[at + 1 :]
    if not head or head[-1]["role"] != "user":
        head.append({"role": "user", "content": RECALL})
    if not tail or tail[0]["role"] in ("assistant", "tool"):
        tail.insert(0, {"role": "user", "content": GO_ON})
    return [*head, summary, *tail]


def _fits(turn: dict[str, Any], kind: str) -> bool:
    """Whether an item goes on with a turn: reasoning comes first, then text, then calls."""
    if kind == "reasoning":
        return turn["content"] is None and "tool_calls" not in turn
    return kind in CALLS or (turn["content"] is None and "tool_calls" not in turn)


def _add(turn: dict[str, Any], item: Item) -> None:
    if item["type"] == "message":
        turn["content"] = _content(item["content"])
    else:
        name, arguments = function_call(item)
        function = {"name": name, "arguments": arguments}
        turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def reasoning_text(item: Item) -> str:
    """Return what a reasoning item says: its text, else its summary, else what is encoded."""
    parts = item.get("content") or item.get("summary") or []
    if parts:
        return "".join(part["text"] for part in parts)
    data = item.get("encrypted_content")
    return decode_reasoning(data) if data else ""


def _content(parts: Sequence[Item]) -> str | list[Item]:
    """Return parts as a message's content: one part is plain text."""
    made = [_chat_part(part) for part in parts]
    return made[0]["text"] if len(made) == 1 and made[0]["type"] == "text" else made


def _chat_part(part: Item) -> Item:
    if part["type"] == IMAGE_PART:
        return {**part, "param": part.param if isinstance(part, ImageItem) else "input"}  # of an earlier turn
    return {"type": "text", "text": part["refusal" if part["type"] == "refusal" else "text"]}


# What `encrypted_content` of a `compaction` item holds: encoded, neither secret nor signed.
#
# A client may send any conversation that it likes, so an item that it has changed gives it nothing; what is in one is
# checked as if it stood in the input itself.

PREFIX = "dovetail-compaction-1."
"""Tells our items from those of other servers."""


class Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A conversation that has been compacted.

    Attributes:
        summary: What the model wrote.
        replaces: Everything before the item is replaced; else messages of users, system and developer there stay.
        before: Items that stand before the summary, where it replaces everything, and …
        after: … behind it.
    """

    summary: str
    replaces: bool = False
    before: list[dict[str, Any]] = []
    after: list[dict[str, Any]] = []


_decode = msgspec.json.Decoder(Sealed).decode


def seal(content: Sealed) -> str:
    """Return it as `encrypted_content`."""
    return PREFIX + base64.urlsafe_b64encode(msgspec.json.encode(content)).decode("ascii")


def unseal(data: str) -> Sealed:
    """Undo `seal`. The items are as they were sent: nobody has checked them.

    Raises:
        ValueError: It was not written so.
    """
    if not data.startswith(PREFIX):
        raise ValueError("another server wrote it")
    try:
        return _decode(base64.b64decode(data[len(PREFIX) :].encode("ascii"), altchars=b"-_", validate=True))
    except (msgspec.MsgspecError, RecursionError, UnicodeError, binascii.Error) as error:
        raise ValueError(str(error)) from None
