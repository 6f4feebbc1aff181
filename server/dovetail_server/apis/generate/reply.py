"""`/generate`: from a reply's steps to bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from dovetail.contracts.replies import ChoiceView, Failure, Reply, StepView, TokenLogprob, Writer
from dovetail.messages import TopLogprob
from dovetail_server.apis.generate.schema import Generated, MetaInfo, NativeFinish, TokenRow
from dovetail_server.apis.logprobs import finite
from dovetail_server.apis.parts import DONE, error_event, report_field

# Log probabilities in the words of `/generate`.

TextOf = Callable[[int], str]


def native_rows(rows: Sequence[TokenLogprob | TopLogprob], text_of: TextOf | None) -> list[TokenRow]:
    """Write rows as `[logprob, token_id, text or null]`."""
    return [
        (None if r.logprob is None else finite(r.logprob), r.token_id, text_of(r.token_id) if text_of else None)
        for r in rows
    ]


def native_top(rows: Sequence[TokenLogprob], num_top: int, text_of: TextOf | None) -> list[list[TokenRow] | None]:
    """Write the alternatives of each row."""
    return [None if row.logprob is None else native_rows(row.top[:num_top], text_of) for row in rows]


def native_named(rows: Sequence[TokenLogprob], text_of: TextOf | None) -> list[list[TokenRow] | None]:
    """Write the tokens of each row that the request names."""
    return [None if row.logprob is None else native_rows(row.named, text_of) for row in rows]


encode = msgspec.json.Encoder().encode


class GenerateWriter(Writer):
    """Writes native replies: each chunk of a stream has all the text so far.

    `Request.reply` has: `is_batch`, prompts came as a list; `shows_text`, log probabilities name tokens by their texts,
    too.
    """

    reports_aborts = True

    def __init__(self, reply: Reply) -> None:
        """Read the wishes."""
        super().__init__(reply)
        self._rows: list[list[TokenLogprob]] = [[] for _ in reply.choices]
        self._is_single = len(reply.choices) == 1 and not reply.requests[0].reply["is_batch"]
        self._text_of = reply.tokenizer.token_text if reply.requests[0].reply["shows_text"] else None

    def step(self, steps: Sequence[StepView]) -> bytes:
        """Return a chunk for each choice that went on."""
        self.take(steps)
        changed = {step.choice.index: step.choice for step in steps}.values()
        chunks = [self._generated(choice, has_index=not self._is_single) for choice in changed]
        return b"".join([b"data: " + encode(chunk) + b"\n\n" for chunk in chunks])

    def close(self) -> bytes:
        """Return the end."""
        return DONE

    def take(self, steps: Sequence[StepView]) -> None:
        """Keep the log probabilities."""
        for step in steps:
            self._rows[step.choice.index] += step.logprobs

    def whole(self) -> bytes:
        """Return an object, or a list for a batch."""
        if self._is_single:
            return encode(self._generated(self.reply.choices[0], has_index=False))
        return encode([self._generated(choice, has_index=False) for choice in self.reply.choices])

    @classmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        """Return an event with the error, and the end."""
        return error_event(failure) + DONE

    def _generated(self, choice: ChoiceView, *, has_index: bool) -> Generated:
        """Return everything so far."""
        meta = MetaInfo(
            id=choice.rid,
            finish_reason=None,
            prompt_tokens=choice.num_prompt,
            completion_tokens=choice.num_completion,
            cached_tokens=choice.num_cached,
            reasoning_tokens=choice.num_reasoning,
            num_retractions=choice.num_retractions,
        )
        if reason := choice.finish_reason:
            meta.finish_reason = native_finish(choice, reason)
            meta.structured_output = report_field(choice)
            meta.e2e_latency = choice.finished_at - self.reply.began
        if choice.request.logprobs is not None:
            self._add_logprobs(choice, meta)
        index = choice.index if has_index else msgspec.UNSET
        return Generated(text=choice.text, output_ids=choice.token_ids, meta_info=meta, index=index)

    def _add_logprobs(self, choice: ChoiceView, meta: MetaInfo) -> None:
        prompt, rows, text_of = choice.prompt_logprobs or [], self._rows[choice.index], self._text_of
        meta.input_token_logprobs = native_rows(prompt, text_of)
        meta.output_token_logprobs = native_rows(rows, text_of)
        if most := choice.num_top:
            meta.input_top_logprobs = native_top(prompt, most, text_of)
            meta.output_top_logprobs = native_top(rows, most, text_of)
        if choice.request.named_ids:
            meta.input_token_ids_logprobs = native_named(prompt, text_of)
            meta.output_token_ids_logprobs = native_named(rows, text_of)


def native_finish(choice: ChoiceView, reason: str) -> NativeFinish:
    """Return why a choice ended."""
    if reason == "length":
        return NativeFinish(type=reason, length=choice.num_completion)
    if reason == "abort":
        return NativeFinish(type=reason, message=choice.abort_message or "aborted")
    return NativeFinish(type=reason, matched=choice.matched_stop)
