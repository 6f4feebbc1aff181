"""`context_management` of `/v1/messages`: old results of tools and old thinking are cleared out of the prompt.

Clearing happens before a prompt is tokenized, so tokens are estimated here: `BYTES` of JSON count as one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from dovetail.contracts.requests import JsonObject
from dovetail.processing.refusals import unsupported, wrong
from dovetail_server.apis.messages.schema import (
    ClearThinking,
    ClearToolUses,
    Compact,
    KeptTurns,
    MessagesPrompt,
    Trigger,
)

P = TypeVar("P", bound=MessagesPrompt)
Messages = list[JsonObject]
BYTES = 4
PLACEHOLDER = "[Old tool result content cleared]"
"""Stands in the place of a result."""
USES = Trigger(type="input_tokens", value=100_000)
"""When tool uses are cleared where a request does not say, …"""
KEPT_USES, KEPT_TURNS = 3, 1
"""… how many stay, and how many turns with their thinking."""
encode = msgspec.json.encode


def check_edits(body: MessagesPrompt) -> None:
    """Refuse edits that are not served here, and lists of them that contradict themselves.

    Raises:
        RequestError: Naming the edit.
    """
    edits = () if body.context_management is None else body.context_management.edits
    for at, edit in enumerate(edits):
        param = f"context_management.edits[{at}]"
        if isinstance(edit, Compact):
            why = "messages are not summed up here; /v1/responses compacts, and clear_tool_uses_20250919 shortens"
            raise unsupported(f"{param}.type {edit.type!r}", why)
        if at and isinstance(edit, ClearThinking):
            raise wrong(f"{param} is a {edit.type}, which must be the first edit", param)
        if isinstance(edit, ClearThinking) and isinstance(edit.keep, KeptTurns):
            check_kept(edit.keep, f"{param}.keep")
        if any(type(edit) is type(before) for before in edits[:at]):
            raise wrong(f"{param} is a second {edit.type}; send one", param)


def check_kept(keep: KeptTurns, param: str) -> None:
    """Refuse a number where all turns stay, and none where some do.

    Raises:
        RequestError: Naming the field.
    """
    if (keep.type == "thinking_turns") != (keep.value is not None):
        raise wrong(f"{param}.value belongs to type 'thinking_turns', and to no other", f"{param}.value")


def edited(body: P) -> tuple[P, list[JsonObject] | None]:
    """Return a body whose edits have been made, and what they cleared; None where it asks for none.

    Args:
        body: Checked, `check_edits` too; it stays as it is.
    """
    if body.context_management is None or not body.context_management.edits:
        return body, None
    messages, applied = body.messages, []
    for edit in body.context_management.edits:
        if isinstance(edit, ClearThinking):
            messages, found = without_thinking(messages, edit)
        elif isinstance(edit, ClearToolUses):
            beside = [body.system, [tool.model_dump(exclude_none=True) for tool in body.tools or ()]]
            messages, found = without_uses(messages, edit, len(encode(beside)))
        else:
            raise RuntimeError(f"{edit.type} has not been refused")
        applied += found
    return body.model_copy(update={"messages": messages}), applied


def without_thinking(messages: Messages, edit: ClearThinking) -> tuple[Messages, list[JsonObject]]:
    """Clear the thinking of all but the last turns of the model that have some."""
    num_kept = KEPT_TURNS if edit.keep is None else edit.keep.value if isinstance(edit.keep, KeptTurns) else None
    if num_kept is None:
        return messages, []
    turns = turns_of(messages)
    thinking = sorted({turns[at] for at, _, block in blocks_of(messages) if is_thinking(block)})
    blocks = set(thinking[:-num_kept])
    cleared, num_bytes = [], 0
    for at, message in enumerate(messages):
        content = message["content"]
        if turns[at] in blocks and isinstance(content, list):
            left = [block for block in content if not is_thinking(block)]
            num_bytes += len(encode(content)) - len(encode(left))
            if not left:
                continue  # a message of thinking alone
            message = {**message, "content": left}
        cleared.append(message)
    if not blocks:
        return messages, []
    applied = {
        "type": edit.type,
        "cleared_thinking_turns": len(blocks),
        "cleared_input_tokens": num_bytes // BYTES,
    }
    return cleared, [applied]


def without_uses(messages: Messages, edit: ClearToolUses, num_beside: int) -> tuple[Messages, list[JsonObject]]:
    """Clear the results of all but the last uses of tools, and their inputs where that is asked for, if it is time."""
    uses = {block["id"]: block["name"] for _, _, block in blocks_of(messages) if block.get("type") == "tool_use"}
    results = [block["tool_use_id"] for _, _, block in blocks_of(messages) if block.get("type") == "tool_result"]
    trigger = edit.trigger or USES
    num = (num_beside + len(encode(messages))) // BYTES if trigger.type == "input_tokens" else len(results)
    if num <= trigger.value:
        return messages, []
    kept = KEPT_USES if edit.keep is None else edit.keep.value
    spared = set(edit.exclude_tools or ())
    blocks = {key for key in results[: len(results) - kept] if uses.get(key) not in spared}
    inputs: Container[str] = set(uses.values()) if edit.clear_tool_inputs is True else edit.clear_tool_inputs or ()

    def change(block: JsonObject) -> JsonObject:
        if block.get("type") == "tool_result" and block["tool_use_id"] in blocks:
            return {**block, "content": PLACEHOLDER}
        if block.get("type") == "tool_use" and block["id"] in blocks and block["name"] in inputs:
            return {**block, "input": {}}
        return block

    cleared = changed(messages, change)
    num_tokens = max(0, len(encode(messages)) - len(encode(cleared))) // BYTES
    if not num_tokens or (edit.clear_at_least is not None and num_tokens < edit.clear_at_least.value):
        return messages, []
    return cleared, [{"type": edit.type, "cleared_tool_uses": len(blocks), "cleared_input_tokens": num_tokens}]


def changed(messages: Messages, change: Callable[[JsonObject], JsonObject]) -> Messages:
    """Return messages with every block changed."""
    return [
        {**message, "content": [change(block) for block in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def blocks_of(messages: Messages) -> Iterator[tuple[int, int, JsonObject]]:
    """Yield every block with the number of its message and its own."""
    for at, message in enumerate(messages):
        if isinstance(message["content"], list):
            for place, block in enumerate(message["content"]):
                yield at, place, block


def is_thinking(block: JsonObject) -> bool:
    """Whether a block is something that the model thought."""
    return block.get("type") in ("thinking", "redacted_thinking")


def turns_of(messages: Sequence[JsonObject]) -> list[int]:
    """Return of each message the number of the model's turn that it is part of: results of tools do not end one."""
    turns, turn = [], 0
    for message in messages:
        content: Any = message["content"]
        only_results = isinstance(content, list) and all(block.get("type") == "tool_result" for block in content)
        if message["role"] != "assistant" and not only_results:
            turn += 1
        turns.append(turn)
    return turns
