"""From a Messages request to a chat request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.errors import RequestError
from dovetail_server import errors
from dovetail_server.anthropic.errors import NO_THREADS
from dovetail_server.anthropic.schema import (
    AnthropicMessage,
    AnthropicTool,
    MessagesRequest,
    PromptFields,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from dovetail_server.openai.chat import ChatRequest
from dovetail_server.responses.items import decode_reasoning
from dovetail_server.serving.translate import chat_request

NAMES = {
    r"response_format\.json_schema": "output_config.format",
    "response_format": "output_config.format",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    "reasoning_effort": "output_config.effort",
    "thinking_budget": "thinking.budget_tokens",
    "continue_final_message": "messages",
    r"stop(?!_)": "stop_sequences",
}
SAME = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop_token_ids", "priority"),
    "grammar_backend",
)
ERROR_PREFIX = "Error: "
CLEARS_NOTHING = {"type": "clear_thinking_20251015", "keep": "all"}
"""The edit that clients send to have all thinking stay, which it does."""
AnyBlock = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


def check(request: PromptFields) -> None:
    """Refuse what would change the output and is not implemented, and what contradicts itself.

    Raises:
        RequestError: Naming the field.
    """
    if request.context_management not in (None, {}, {"edits": []}, {"edits": [CLEARS_NOTHING]}):
        why = "nothing is cleared out of a conversation here; possible: no edits, or clear_thinking that keeps all"
        raise errors.unsupported("context_management", why)
    if request.mcp_servers:
        raise errors.unsupported("mcp_servers", "this server calls no other; the client runs the tools")
    if request.thread is not None:
        text = "thread is not supported: no conversation is held here; send all messages"
        raise RequestError(text, param="thread", code=NO_THREADS)
    thinking = request.thinking
    if thinking is None:
        return
    if thinking.type == "between_tools":
        raise errors.unsupported("thinking.type 'between_tools'", "possible: enabled, disabled, adaptive")
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        text = "thinking.budget_tokens is required with type 'enabled'; or send type 'adaptive'"
        raise RequestError(text, param="thinking.budget_tokens", code="missing_required_parameter")
    if thinking.type != "enabled" and thinking.budget_tokens is not None:
        text = f"thinking.budget_tokens has no meaning with type {thinking.type!r}"
        raise RequestError(text, param="thinking.budget_tokens", code="invalid_value")


def check_generation(request: MessagesRequest) -> None:
    """As `check`, for what only generating needs.

    Raises:
        RequestError: Naming the field.
    """
    check(request)
    for name, why in (
        ("container", "no code is run here"),
        ("inference_geo", "this server is where it is; leave it out"),
        ("diagnostics", "this server compares no requests; usage tells what was cached"),
    ):
        if getattr(request, name) is not None:
            raise errors.unsupported(name, why)
    budget = None if request.thinking is None else request.thinking.budget_tokens
    if budget is not None and budget >= request.max_tokens:
        text = f"max_tokens must be above thinking.budget_tokens, {budget} (given: {request.max_tokens})"
        raise RequestError(text, param="max_tokens", code="invalid_value")


def prompt_fields(request: PromptFields, *, can_think: bool) -> dict[str, Any]:
    """Return the fields of a chat request that make up the prompt.

    Args:
        request: Checked.
        can_think: The server reads the model's thinking.

    Raises:
        RequestError: A block stands where it cannot, or a tool is none of the client's.
    """
    choice = request.tool_choice
    config = request.output_config
    messages = chat_messages(request)
    is_prefill = messages[-1]["role"] == "assistant"
    if is_prefill and messages[-1].get("tool_calls"):
        raise wrong("messages", "end with a tool_use; send its tool_result")
    if is_prefill and request.thinking is not None and request.thinking.type == "enabled":
        raise wrong("messages", "end with the assistant, which cannot think first; leave out thinking, or that message")
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "tools": [chat_tool(tool, at) for at, tool in enumerate(request.tools or ())] or None,
        "tool_choice": chat_choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "reasoning_effort": None if config is None else config.effort,
        "response_format": None if config is None or config.format is None else response_format(config.format.schema_),
        "add_generation_prompt": False if is_prefill else None,
        "continue_final_message": True if is_prefill else None,
    }
    return fields | thinking_fields(request.thinking, request.chat_template_kwargs, can_think=can_think)


def thinking_fields(thinking: Thinking | None, kwargs: dict[str, Any] | None, *, can_think: bool) -> dict[str, Any]:
    """Return the template's switches and the budget; `disabled` ends thinking at once where the template cannot."""
    if thinking is None:
        return {"chat_template_kwargs": kwargs}
    thinks = thinking.type != "disabled"
    budget = thinking.budget_tokens if thinks else 0 if can_think else None
    return {
        "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks, **(kwargs or {})},
        "thinking_budget": budget,
    }


def to_chat(request: MessagesRequest, message_id: str, *, can_think: bool, fills_context: bool) -> ChatRequest:
    """Return the chat request that gives this message.

    Args:
        request: Checked.
        message_id: The reply's.
        can_think: See `prompt_fields`.
        fills_context: Generate up to the context's end instead of `max_tokens`.

    Raises:
        RequestError: See `prompt_fields`.
    """
    fields = {name: getattr(request, name) for name in SAME}
    fields |= {
        "max_tokens": None if fills_context else request.max_tokens,
        "stop": request.stop_sequences or None,
        "user": None if request.metadata is None else request.metadata.user_id,
        "cache_salt": request.cache_salt,
        "rid": request.rid or message_id,
    }
    return chat_request(fields | prompt_fields(request, can_think=can_think))


def chat_messages(request: PromptFields) -> list[dict[str, Any]]:
    """Return the conversation as chat messages."""
    conversation = Conversation()
    if isinstance(request.system, str):
        conversation.add("system", [request.system])
    elif request.system:
        conversation.add("system", [block.text for block in request.system])
    for at, given in enumerate(request.messages):
        message = AnthropicMessage.model_validate(given)
        blocks: Sequence[AnyBlock] = (
            [TextBlock(type="text", text=message.content, citations=None)]
            if isinstance(message.content, str)
            else message.content
        )
        param = f"messages[{at}].content"
        if message.role == "assistant":
            conversation.add_assistant(blocks, param)
        else:
            conversation.add_user(message.role, blocks, param)
    return [turn.message() for turn in conversation.turns]


@dataclass(slots=True)
class Turn:
    """A chat message that still grows. Its texts are put together once, at the end: there may be ten thousand."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str | None = None
    """Of a tool's result."""

    def message(self) -> dict[str, Any]:
        """Return it as the chat API has it."""
        if self.role == "tool":
            return {"role": "tool", "tool_call_id": self.call_id, "content": self.texts[0]}
        if self.role != "assistant":
            return {"role": self.role, "content": content_of(self.texts)}
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.texts) if self.texts else None}
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class Conversation:
    """Turns of a Messages request: results of tools are turns of their own, what one role says in a row is one."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    def add(self, role: str, texts: Sequence[str]) -> None:
        """Add texts; a user's turn right before takes them in."""
        if texts:
            self._turn(role, goes_on=role == "user").texts.extend(texts)

    def add_assistant(self, blocks: Sequence[AnyBlock], param: str) -> None:
        """Add an assistant's message."""
        turn = self._turn("assistant", goes_on=True)
        for at, block in enumerate(blocks):
            if isinstance(block, TextBlock):
                turn.texts.append(block.text)
            elif isinstance(block, ThinkingBlock):
                turn.thoughts.append(thought(block))
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                turn.calls.append({"id": block.id, "type": "function", "function": function})
            else:
                raise wrong(f"{param}[{at}]", "is a tool_result, which only a user's message has")

    def add_user(self, role: str, blocks: Sequence[AnyBlock], param: str) -> None:
        """Add a user's or a system message."""
        texts: list[str] = []
        for at, block in enumerate(blocks):
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolResultBlock) and role == "user":
                self.add(role, texts)
                texts = []
                content = result_text(block, f"{param}[{at}].content")
                self.turns.append(Turn("tool", [content], call_id=block.tool_use_id))
            else:
                raise wrong(f"{param}[{at}]", f"is a {block.type}, which a message of role {role!r} cannot have")
        self.add(role, texts)

    def _turn(self, role: str, *, goes_on: bool) -> Turn:
        if not (goes_on and self.turns and self.turns[-1].role == role):
            self.turns.append(Turn(role))
        return self.turns[-1]


def content_of(texts: Sequence[str]) -> str | list[dict[str, Any]]:
    """Return texts as a message's content."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def thought(block: ThinkingBlock) -> str:
    """Return what a block says; one that was sent without its text has it in the signature."""
    if block.thinking or not block.signature:
        return block.thinking
    try:
        return decode_reasoning(block.signature)
    except ValueError:
        return ""


def result_text(block: ToolResultBlock, param: str) -> str:
    """Return a result as the model reads it.

    Raises:
        RequestError: A block in it is not text.
    """
    texts: list[str] = []
    if isinstance(block.content, str):
        texts = [block.content]
    for at, part in enumerate(block.content or () if not isinstance(block.content, str) else ()):
        if not isinstance(part, TextBlock):
            raise wrong(f"{param}[{at}]", f"is a {part.type}; a result holds text only")
        texts.append(part.text)
    return (ERROR_PREFIX if block.is_error else "") + "\n".join(texts)


def chat_tool(tool: AnthropicTool, at: int) -> dict[str, Any]:
    """Return a tool in the chat API's form.

    Raises:
        RequestError: The server would have to run it, or it asks for something that nothing here does.
    """
    param = f"tools[{at}]"
    if tool.type not in (None, "custom"):
        why = "this server runs no tools of its own; describe it with an input_schema"
        raise errors.unsupported(f"{param}.type {tool.type!r}", why)
    if tool.input_schema is None:
        text = f"{param}.input_schema is required"
        raise RequestError(text, param=f"{param}.input_schema", code="missing_required_parameter")
    if tool.defer_loading:
        raise errors.unsupported(f"{param}.defer_loading", "all tools stand in the prompt")
    if tool.input_examples:
        raise errors.unsupported(f"{param}.input_examples", "no chat template has a place for them; use description")
    if tool.allowed_callers not in (None, ["direct"]):
        raise errors.unsupported(f"{param}.allowed_callers", 'only the model calls here; send ["direct"] or nothing')
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    function["strict"] = tool.strict
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def chat_choice(choice: ToolChoice | None) -> Any:
    """Return `tool_choice` in the chat API's form.

    Raises:
        RequestError: It should name a tool and does not, or the reverse.
    """
    if choice is None:
        return None
    if (choice.type == "tool") != (choice.name is not None):
        text = "tool_choice.name belongs to type 'tool', and to no other"
        raise RequestError(text, param="tool_choice.name", code="invalid_value")
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema as the chat API's `response_format`: a format is a promise here, without a `strict`."""
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}


def wrong(param: str, why: str) -> RequestError:
    """Return the error for a block or message that stands where it cannot."""
    return RequestError(f"{param} {why}", param=param, code="invalid_value")
