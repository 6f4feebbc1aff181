"""Conversations as clients send them, made into what chat templates read.

Clients send OpenAI's shape; templates were written against what transformers passes. So: missing content is an empty
string, or None beside calls for a template that shows them only then; the arguments of a tool call in the history are
an object rather than JSON text; reasoning stands under both names in use; content has the form (text or parts) that the
template handles.

Clients also send back what their libraries made of a reply, parsed arguments and objects included. A template that
prints a whole call would print those, too, so the prompt of such a message is that of the reply as it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeGuard

from dovetail.contracts.errors import RequestError
from dovetail.text.tokenizer.tokenizer import check_text

ArgumentsFormat = Literal["object", "string"]
"""Whether a template reads the arguments of a call as an object or as JSON text."""
ContentFormat = Literal["string", "parts", "both"]
_PLAIN = {"role", "content"}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_THOUGHTS = {"thinking": "thinking", "reasoning": "reasoning", "redacted_thinking": ""}
"""Parts with what an assistant thought, and where they have it: Mistral's, Anthropic's and LangChain's."""
_OF_LIBRARIES = ("parsed",)
"""What libraries keep in a message beside what was said."""
_NO_TEXT = ("images", "audio", "videos")
IMAGE_PARTS = ("image_url", "input_image", "image")
"""Content parts of images: OpenAI's two APIs', and transformers'."""
_VIDEO_PARTS = ("video", "video_url", "input_video")
_AUDIO_PARTS = ("audio", "audio_url", "input_audio")
NO_IMAGES = "this model is served for text only"
_PLACE = re.compile(r"[A-Za-z0-9_.\[\]]{1,256}")


class ImagePart(dict[str, Any]):
    """A content part whose image has been loaded; no client can send one. `image` is what was loaded."""

    def __init__(self, image: object) -> None:
        """Keep what stands for the image."""
        super().__init__(type="image", image=image)


def place_of(part: Mapping[str, Any], param: str) -> str:
    """Return a part's place in the request: `param`, unless an API's reader has moved the part and says so in it."""
    found = part.get("param")
    return found if isinstance(found, str) and _PLACE.fullmatch(found) else param


def template_messages(
    messages: Sequence[Mapping[str, Any]],
    content_format: ContentFormat,
    arguments_format: ArgumentsFormat = "object",
    beside_calls: str | None = "",
    no_images: str = NO_IMAGES,
) -> list[dict[str, Any]]:
    """Convert a conversation. The input is not changed.

    Args:
        messages: As clients send them.
        content_format: See `ChatTemplate`.
        arguments_format: See `ChatTemplate`.
        beside_calls: The content of a reply that is calls alone.
        no_images: Why there can be no images.

    Raises:
        RequestError: A part is neither text nor a loaded image, or text is not Unicode; `param` names the place.
    """
    made = [
        _message(message, content_format, arguments_format, f"messages[{at}]", no_images)
        for at, message in enumerate(messages)
    ]
    if beside_calls is None:
        return [{**each, "content": each["content"] or None} if each.get("tool_calls") else each for each in made]
    return made


def _message(
    message: Mapping[str, Any],
    content_format: ContentFormat,
    arguments_format: ArgumentsFormat,
    param: str,
    no_images: str,
) -> dict[str, Any]:
    if content_format != "parts" and _is_plain(message):
        text = message["content"]
        if "\0" in text or not text.isascii():  # plain ASCII, which most messages are, costs no call
            check_text(text, param=f"{param}.content")
        return message  # a template changes nothing that it is given, and there may be tens of thousands
    message = _of_today(message)
    result = {key: value for key, value in message.items() if value is not None and key not in _OF_LIBRARIES}
    for name in _NO_TEXT:
        if result.get(name):
            why = no_images or "send images as parts of the content"
            raise RequestError(f"{name} of a message are not read: {why}", param=f"{param}.{name}")
    content, thoughts = _said(message, f"{param}.content")
    result["content"] = _content(content, content_format, f"{param}.content", no_images)
    reasoning = message.get("reasoning_content") or message.get("reasoning") or thoughts
    if isinstance(reasoning, str):
        check_text(reasoning, param=f"{param}.reasoning_content")
        result["reasoning_content"] = result["reasoning"] = reasoning
    if calls := result.get("tool_calls"):
        if not isinstance(calls, (list, tuple)):
            text = f"tool_calls must be a list of calls, not {type(calls).__name__}"
            raise RequestError(text, param=f"{param}.tool_calls", code="invalid_type")
        result["tool_calls"] = [_tool_call(call, arguments_format, f"{param}.tool_calls") for call in calls]
    else:
        result.pop("tool_calls", None)
    return result


def _is_plain(message: Mapping[str, Any]) -> TypeGuard[dict[str, Any]]:
    """Whether a message is what templates read, as it is."""
    return type(message) is dict and message.keys() == _PLAIN and type(message["content"]) is str


def _of_today(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message of functions, as the API had them before tools, as one of tools, which templates show.

    A call had no identifier: the function's name ties the result to it.
    """
    call, role = message.get("function_call"), message.get("role")
    if role == "function":
        return {**message, "role": "tool", "tool_call_id": message.get("tool_call_id") or message.get("name")}
    if role != "assistant" or not isinstance(call, Mapping) or message.get("tool_calls"):
        return message
    rest = {key: value for key, value in message.items() if key != "function_call"}
    return {**rest, "tool_calls": [{"id": call.get("name"), "type": "function", "function": call}]}


def _said(message: Mapping[str, Any], param: str) -> tuple[Any, str | None]:
    """Return a message's content without what the assistant thought, and that; a tool's result as text."""
    content, role = message.get("content"), message.get("role")
    if role == "tool" and isinstance(content, Mapping):
        return json.dumps(content, ensure_ascii=False), None
    if role != "assistant" or not isinstance(content, (list, tuple)):
        return content, None
    is_thought = [isinstance(part, Mapping) and part.get("type") in _THOUGHTS for part in content]
    if not any(is_thought):
        return content, None
    thoughts = [_thought(part, f"{param}[{at}]") for at, part in enumerate(content) if is_thought[at]]
    rest = [part for part, is_one in zip(content, is_thought, strict=True) if not is_one]
    return rest or None, "\n".join(filter(None, thoughts)) or None


def _thought(part: Mapping[str, Any], param: str) -> str:
    field = _THOUGHTS[part["type"]]
    inner = part.get(field)
    if inner is None or isinstance(inner, str):
        return inner or ""
    if not isinstance(inner, (list, tuple)):
        raise RequestError(f"{field} must be text or a list of parts", param=f"{param}.{field}")
    return "".join(_part_text(one, f"{param}.{field}[{at}]") for at, one in enumerate(inner))


def _content(content: Any, content_format: ContentFormat, param: str, no_images: str) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        check_text(content, param=param)
        return [{"type": "text", "text": content}] if content_format == "parts" else content
    if not isinstance(content, (list, tuple)):
        text = f"content must be text or a list of parts, not {type(content).__name__}"
        raise RequestError(text, param=param, code="invalid_type")
    has_images = any(type(part) is ImagePart for part in content)
    if has_images and content_format == "string":
        text = "this model's chat template shows text only; serve with a template that shows images (--chat-template)"
        raise RequestError(text, param=param, code="unsupported")
    why = NO_IMAGES if has_images else no_images
    texts = [
        None if type(part) is ImagePart else _part_text(part, f"{param}[{at}]", why) for at, part in enumerate(content)
    ]
    if content_format == "string":
        return "\n".join(text for text in texts if text is not None)
    return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts]


def _part_text(part: Any, param: str, no_images: str = NO_IMAGES) -> str:
    if isinstance(part, str):
        text: Any = part
    elif not isinstance(part, Mapping):
        raise RequestError(f"a content part must be an object, not {type(part).__name__}", param=param)
    else:
        kind = part.get("type", "text")
        if kind not in _TEXT_PARTS:
            raise _unsupported(kind, f"{place_of(part, param)}.type", no_images)
        text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError("a text part needs a string in `text`", param=f"{param}.text")
    check_text(text, param=param)
    return text


def _unsupported(kind: Any, param: str, no_images: str) -> RequestError:
    """Return the refusal of a content part that is no text."""
    possible = "text" if no_images else "text, images"
    if kind in IMAGE_PARTS:
        place = param.removesuffix(".type")
        text = f"{place}: an image cannot be read here: {no_images or 'only parts of messages are images'}; send text"
    elif kind in _VIDEO_PARTS or kind in _AUDIO_PARTS:
        what = "video" if kind in _VIDEO_PARTS else "audio"
        text = f"content part {kind!r} is not supported: this server reads no {what}; possible: {possible}"
    else:
        text = f"content part {kind!r} is not supported; possible: {possible}"
    return RequestError(text, param=param, code="unsupported")


def _tool_call(call: Any, arguments_format: ArgumentsFormat, param: str) -> dict[str, Any]:
    """Parse the arguments of a call in the history. Text that is no JSON object stays as the client sent it."""
    if not isinstance(call, Mapping):
        raise RequestError(f"a tool call must be an object, not {type(call).__name__}", param=param)
    function = call.get("function")
    if function is None:
        return dict(call)
    if not isinstance(function, Mapping):
        raise RequestError(f"function of a tool call must be an object, not {type(function).__name__}", param=param)
    arguments = _arguments(function.get("arguments"))
    if arguments_format == "string" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    named = {} if call.get("id") is None else {"id": call["id"]}
    return {**named, "type": "function", "function": {"name": function.get("name"), "arguments": arguments}}


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
