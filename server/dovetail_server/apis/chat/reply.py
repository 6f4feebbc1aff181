"""`/v1/chat/completions`: from a reply's steps to bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dovetail.contracts.output import ContentDelta, ReasoningDelta
from dovetail.contracts.replies import ChoiceView, Failure, Reply, StepView, TokenLogprob, Writer
from dovetail_server.apis.chat.chunks import ChatChunks, CustomChunks
from dovetail_server.apis.chat.logprobs import chat_logprobs, logprob_bytes
from dovetail_server.apis.chat.schema import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Custom,
    Function,
    ReplyMessage,
    ToolCall,
)
from dovetail_server.apis.custom import custom_input
from dovetail_server.apis.dropped import notes_of
from dovetail_server.apis.logprobs import prompt_logprobs
from dovetail_server.apis.parts import DONE, end_fields, error_event, head_of, is_cut_by_context, report_field, usage_of

encode = msgspec.json.Encoder().encode
NO_FIELDS = b"null", b""


class ChatWriter(Writer):
    """Writes a chat completion.

    `Request.reply` may have: `ends_with_usage` and `has_usage`, of a stream; `is_legacy`, calls go out as the
    deprecated `function_call`; `has_ids`, token ids are told; `names_ids`, log probabilities name tokens by their ids;
    `hides_reasoning`; `customs`, the names of custom tools, with `unenforced` and `preferred`, see `CustomTools`.
    """

    def __init__(self, reply: Reply) -> None:
        """Read the wishes."""
        super().__init__(reply)
        wishes = reply.requests[0].reply
        self._is_legacy: bool = wishes.get("is_legacy", False)
        self._has_ids: bool = wishes.get("has_ids", False)
        self._names_ids: bool = wishes.get("names_ids", False)
        self._hides_reasoning: bool = wishes.get("hides_reasoning", False)
        self._has_usage: bool = wishes.get("has_usage", False)
        self._ends_with_usage: bool = wishes.get("ends_with_usage", reply.sends_usage)
        self._has_rows = reply.requests[0].logprobs is not None
        self._head = head_of(reply)
        self._chunks = ChatChunks(
            self._head, has_usage=self._ends_with_usage or self._has_usage, is_legacy=self._is_legacy
        )
        self._customs = CustomChunks(wishes["customs"]) if "customs" in wishes else None
        self._rows: list[list[TokenLogprob]] = [[] for _ in reply.choices]
        self._pending_fields = [PendingFields() for _ in reply.choices] if self._has_rows or self._has_ids else []

    def open(self) -> bytes:
        """Return the role chunk of every choice; the first carries what is told of the whole request."""
        choices, usage = self.reply.choices, self._usage() if self._has_usage else None
        top = b',"prompt_token_ids":' + encode(choices[0].prompt.ids) if self._has_ids else b""
        if (notes := notes_of(self.reply.requests[0])) is not msgspec.UNSET:
            top += b',"dovetail":' + encode(notes)
        parts = [self._chunks.role(choice.index, usage, b"" if choice.index else top) for choice in choices]
        said = self._chunks.inside(ContentDelta(echo)) if (echo := choices[0].prompt.text) else None
        if said is not None:
            parts += [self._chunks.delta(choice.index, said, b"null", b"", usage) for choice in choices]
        return b"".join(parts)

    def step(self, steps: Sequence[StepView]) -> bytes:
        """Return the chunks of steps. What belongs to tokens rides on the next chunk there is."""
        usage, parts, hides = self._usage() if self._has_usage else None, [], self._hides_reasoning
        for step in steps:
            choice, at = step.choice, step.choice.index
            if self.reply.is_kept:
                self._rows[at] += step.visible
            if self._pending_fields:
                self._pending_fields[at].add(step)
            for event in step.events:
                if hides and isinstance(event, ReasoningDelta):
                    continue
                inside = None if self._customs is None else self._customs.inside(at, event)
                if inside is None:
                    inside = self._chunks.inside(event)
                if inside:
                    pending_fields = self._take_pending_fields(choice) if self._pending_fields else NO_FIELDS
                    parts.append(self._chunks.delta(at, inside, *pending_fields, usage))
            if step.is_last:
                rows, extra = self._take_pending_fields(choice) if self._pending_fields else NO_FIELDS
                extra += end_fields(choice)
                parts.append(self._chunks.finish(at, self._reason(choice), choice.matched_stop, rows, extra, usage))
        return b"".join(parts)

    def close(self) -> bytes:
        """Return the tokens used, if they are wanted, and the end."""
        return self._chunks.usage(encode(usage_of(self.reply))) + DONE if self._ends_with_usage else DONE

    def take(self, steps: Sequence[StepView]) -> None:
        """Keep the log probabilities."""
        for step in steps:
            self._rows[step.choice.index] += step.visible

    def whole(self) -> bytes:
        """Return the full reply: the fold of what a stream would have carried."""
        choices = self.reply.choices
        rows = choices[0].prompt_logprobs
        completion = ChatCompletion(
            **self._head,
            choices=[self._choice(choice) for choice in choices],
            usage=usage_of(self.reply),
            prompt_logprobs=msgspec.UNSET if rows is None else prompt_logprobs(rows, self.reply.tokenizer),
            prompt_token_ids=choices[0].prompt.ids if self._has_ids else msgspec.UNSET,
            dovetail=notes_of(self.reply.requests[0]),
        )
        return encode(completion)

    @classmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        """Return an event with the error, and the end."""
        return error_event(failure) + DONE

    def _usage(self) -> bytes:
        return encode(usage_of(self.reply))

    def _choice(self, choice: ChoiceView) -> ChatChoice:
        calls = [self._call(call.id, call.name, call.arguments) for call in choice.tool_calls]
        content = choice.text if choice.text or choice.is_dropped else None
        reasoning = None if self._hides_reasoning else choice.reasoning
        message = ReplyMessage(
            content=echo + (content or "") if (echo := choice.prompt.text) else content,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls if calls and not self._is_legacy else msgspec.UNSET,
            function_call=calls[0].function if calls and self._is_legacy else msgspec.UNSET,
        )
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=self._logprobs(choice, self._rows[choice.index]) if self._has_rows else None,
            finish_reason=self._reason(choice),
            matched_stop=choice.matched_stop,
            structured_output=report_field(choice),
            context_exceeded=is_cut_by_context(choice) or msgspec.UNSET,
            token_ids=choice.token_ids if self._has_ids else msgspec.UNSET,
        )

    def _call(self, call_id: str, name: str, arguments: str) -> ToolCall:
        if self._customs is not None and name in self._customs.names:
            return ToolCall(id=call_id, type="custom", custom=Custom(name, custom_input(arguments)))
        return ToolCall(id=call_id, function=Function(name, arguments))

    def _logprobs(self, choice: ChoiceView, rows: Sequence[TokenLogprob]) -> ChatLogprobs:
        return ChatLogprobs(chat_logprobs(rows, choice.num_top, self.reply.tokenizer, as_ids=self._names_ids))

    def _take_pending_fields(self, choice: ChoiceView) -> tuple[bytes, bytes]:
        """Return `logprobs` and the token ids gathered since the last chunk of a choice."""
        rows, ids = self._pending_fields[choice.index].pop()
        logprobs = b"null"
        if self._has_rows and rows:
            write = logprob_bytes(self.reply.tokenizer, self._names_ids)  # type: ignore[arg-type]  # same if identical
            logprobs = write(rows, choice.num_top)
        return logprobs, b',"token_ids":' + encode(ids) if self._has_ids else b""

    def _reason(self, choice: ChoiceView) -> Any:
        """Return OpenAI's word for the end of a choice."""
        reason = choice.finish_reason
        return "function_call" if self._is_legacy and reason == "tool_calls" else reason


class PendingFields:
    """What has come for tokens of a choice, and waits for the next chunk."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.ids: list[int] = []
        self.rows: list[TokenLogprob] = []

    def add(self, step: StepView) -> None:
        """Take a step's."""
        self.ids += step.ids
        self.rows += step.visible

    def pop(self) -> tuple[list[TokenLogprob], list[int]]:
        """Return and forget them."""
        found = self.rows, self.ids
        self.rows, self.ids = [], []
        return found
