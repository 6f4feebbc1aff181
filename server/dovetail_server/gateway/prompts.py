"""What of a request's body decides which worker may have its prefix cached: the text that its prompt begins with."""

from __future__ import annotations

import msgspec

MAX_PARSED_BYTES = 1 << 20
"""Larger bodies are not looked into, which would hold up every other request."""
MAX_TEXT_BYTES = 1 << 15
"""Enough to tell prompts apart: two that are equal so far share some eight thousand tokens."""


class Prompt(msgspec.Struct):
    """The fields that prompts are made of, as they were written, of all APIs."""

    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()


ORDER = Prompt.__struct_fields__
decode = msgspec.json.Decoder(Prompt).decode


def beginning(body: bytes) -> str | None:
    """Return what a body's prompt begins with, in the order of templates; None if the body says nothing of it.

    Prompts that are equal to a place give texts that are equal to a place, if one client wrote both: nothing of a body
    is normalised.
    """
    if len(body) > MAX_PARSED_BYTES:
        return body[:MAX_TEXT_BYTES].decode("utf-8", "replace")
    try:
        prompt = decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None  # the worker says what is wrong with it
    text = b"".join(bytes(getattr(prompt, name))[:MAX_TEXT_BYTES] for name in ORDER)[:MAX_TEXT_BYTES]
    return text.decode("utf-8", "replace") or None
