"""`/v1/completions`: from a reply's steps to bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec

from dovetail.contracts.output import ContentDelta, Event, Malformed, TokenizerView
from dovetail.contracts.replies import ChoiceView, Failure, Reply, StepView, Writer
from dovetail.messages import TokenLogprob
from dovetail_server.apis.completions.schema import Completion, CompletionChoice, CompletionLogprobs
from dovetail_server.apis.logprobs import finite, named, prompt_logprobs, text
from dovetail_server.apis.parts import DONE, end_fields, error_event, head_of, is_cut_by_context, report_field, usage_of

# Log probabilities in the words of the completion API.


class CompletionRows:
    """Builds `logprobs` of a completion, of which a stream takes pieces."""

    def __init__(
        self, num_top: int, tokenizer: TokenizerView, offsets: Sequence[int], echo_len: int, *, as_ids: bool = False
    ) -> None:
        """Prepare.

        Args:
            num_top: Rivals per token.
            tokenizer: The model's.
            offsets: Grows with the output: characters of it before each token.
            echo_len: Characters of the echoed prompt, which come before the output.
            as_ids: Name tokens by their ids.
        """
        self.num_top = num_top
        self.tokenizer = tokenizer
        self.offsets = offsets
        self.echo_len = echo_len
        self.as_ids = as_ids
        self.num_taken = 0
        self._rows: list[TokenLogprob] = []
        self._starts: list[int] = []

    def take_prompt(self, rows: Sequence[TokenLogprob]) -> None:
        """Add the echoed prompt's tokens."""
        at = 0
        for row in rows:
            self._starts.append(at)
            at += len(text(self.tokenizer.token_bytes(row.token_id)))
        self._rows += rows

    def take(self, rows: Sequence[TokenLogprob]) -> None:
        """Add generated tokens."""
        end = self.num_taken + len(rows)
        self._starts += [self.echo_len + offset for offset in self.offsets[self.num_taken : end]]
        self._rows += rows
        self.num_taken = end

    def pop(self) -> CompletionLogprobs | None:
        """Return and forget what was added; None if nothing was."""
        rows, self._rows = self._rows, []
        starts, self._starts = self._starts, []
        if not rows:
            return None
        return CompletionLogprobs(
            tokens=[self._name(row.token_id) for row in rows],
            token_logprobs=[None if row.logprob is None else finite(row.logprob) for row in rows],
            top_logprobs=[self._top(row) for row in rows] if self.num_top or any(row.named for row in rows) else None,
            text_offset=starts,
        )

    def _name(self, token_id: int) -> str:
        return named(token_id, self.tokenizer.token_bytes(token_id), self.as_ids)

    def _top(self, row: TokenLogprob) -> dict[str, float] | None:
        if row.logprob is None:
            return None
        found = {self._name(c.token_id): finite(c.logprob) for c in reversed((*row.top[: self.num_top], *row.named))}
        found.setdefault(self._name(row.token_id), finite(row.logprob))
        return found


encode = msgspec.json.Encoder().encode


class CompletionWriter(Writer):
    """Writes a completion.

    `Request.reply` may have: `ends_with_usage` and `has_usage`, of a stream; `echoes`, the prompt comes first;
    `has_ids`, token ids are told; `names_ids`, log probabilities name tokens by their ids; `has_prompt_rows`, the
    prompt's log probabilities stand in a field of their own.
    """

    def __init__(self, reply: Reply) -> None:
        """Read the wishes."""
        super().__init__(reply)
        wishes = reply.requests[0].reply
        self._has_usage: bool = wishes.get("has_usage", False)
        self._ends_with_usage: bool = wishes.get("ends_with_usage", reply.sends_usage)
        self._folds = [ChoiceFold(choice, reply) for choice in reply.choices]
        head = {"object": "text_completion", **head_of(reply)}
        self._start = b"data: " + encode(head)[:-1] + b',"choices":['

    def step(self, steps: Sequence[StepView]) -> bytes:
        """Return the chunks of steps."""
        if self._has_usage:
            end = b'],"usage":' + encode(usage_of(self.reply)) + b"}\n\n"
        else:
            end = b'],"usage":null}\n\n' if self._ends_with_usage else b"]}\n\n"
        parts = [part for step in steps for part in self._folds[step.choice.index].chunks(step)]
        return b"".join([self._start + part + end for part in parts])

    def close(self) -> bytes:
        """Return the tokens used, if they are wanted, and the end."""
        if not self._ends_with_usage:
            return DONE
        return self._start + b'],"usage":' + encode(usage_of(self.reply)) + b"}\n\n" + DONE

    def take(self, steps: Sequence[StepView]) -> None:
        """Keep what belongs to tokens."""
        for step in steps:
            self._folds[step.choice.index].take(step)

    def whole(self) -> bytes:
        """Return the full reply: of each prompt's candidates the most likely."""
        n, kept = self.reply.requests[0].n, list[ChoiceFold]()
        for _, group in groupby(self._folds, lambda fold: fold.choice.prompt_index):
            own = list(group)
            kept += own if len(own) == n else sorted(own, key=lambda fold: -fold.mean_logprob)[:n]
        choices = [fold.whole(at) for at, fold in enumerate(kept)]
        return encode(Completion(**head_of(self.reply), choices=choices, usage=usage_of(self.reply)))

    @classmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        """Return an event with the error, and the end."""
        return error_event(failure) + DONE


def text_of(events: Sequence[Event]) -> str:
    """Join the text of events."""
    return "".join(event.text for event in events if isinstance(event, ContentDelta | Malformed))


class ChoiceFold:
    """One choice; a stream takes its pieces, a full reply the whole."""

    def __init__(self, choice: ChoiceView, reply: Reply) -> None:
        """Start with the echoed prompt, if any."""
        wishes = choice.request.reply
        self.choice = choice
        self._tokenizer = reply.tokenizer
        self._has_ids: bool = wishes.get("has_ids", False)
        self._has_prompt_rows: bool = wishes.get("has_prompt_rows", False)
        self._ids: list[int] = []
        self._score, self._num_scored = 0.0, 0
        self._echoed = self._echo = choice.prompt.text if wishes.get("echoes") else ""
        self._rows: CompletionRows | None = None
        if choice.request.logprobs is not None:
            offsets, as_ids = choice.text_offsets, wishes.get("names_ids", False)
            self._rows = CompletionRows(choice.num_top, reply.tokenizer, offsets, len(self._echo), as_ids=as_ids)

    def take(self, step: StepView) -> str:
        """Add a step and return its text."""
        self._ids += step.ids
        self._score += sum(row.logprob or 0.0 for row in step.logprobs)
        self._num_scored += len(step.logprobs)
        if self._rows is not None:
            if self._echo and self.choice.prompt_logprobs is not None:
                self._rows.take_prompt(self.choice.prompt_logprobs)
            self._rows.take(step.visible)
        piece = self._echo + text_of(step.events)
        self._echo = ""
        return piece

    @property
    def mean_logprob(self) -> float:
        """What `best_of` ranks by."""
        return self._score / max(self._num_scored, 1)

    def whole(self, index: int) -> CompletionChoice:
        """Build the choice."""
        choice = self.choice
        rows = choice.prompt_logprobs if self._has_prompt_rows else None
        return CompletionChoice(
            index=index,
            text=self._echoed + choice.text,
            logprobs=self._logprobs(),
            finish_reason=choice.finish_reason,  # type: ignore[arg-type]  # `abort` has been raised before
            matched_stop=choice.matched_stop,
            structured_output=report_field(choice),
            context_exceeded=is_cut_by_context(choice) or msgspec.UNSET,
            prompt_logprobs=msgspec.UNSET if rows is None else prompt_logprobs(rows, self._tokenizer),
            token_ids=self._ids if self._has_ids else msgspec.UNSET,
            prompt_token_ids=choice.prompt.ids if self._has_ids else msgspec.UNSET,
        )

    def chunks(self, step: StepView) -> list[bytes]:
        """Return the `choices` entries of a step: its text, and after the last one the finish."""
        text, result = self.take(step), []
        index = b'{"index":%d,"text":' % self.choice.index
        if text:
            result.append(index + encode(text) + self._pending_fields() + b',"finish_reason":null}')
        if step.is_last:
            reason, matched = encode(self.choice.finish_reason), encode(self.choice.matched_stop)
            end = b',"finish_reason":' + reason + b',"matched_stop":' + matched + b"}"
            result.append(index + b'""' + self._pending_fields() + end_fields(self.choice) + end)
        return result

    def _logprobs(self) -> CompletionLogprobs | None:
        return None if self._rows is None else self._rows.pop()

    def _pending_fields(self) -> bytes:
        """Return `logprobs` and token ids gathered since the last chunk."""
        logprobs = b',"logprobs":' + encode(self._logprobs())
        ids, self._ids = self._ids, []
        return logprobs + b',"token_ids":' + encode(ids) if self._has_ids else logprobs
