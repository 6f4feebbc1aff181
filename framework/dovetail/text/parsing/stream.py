"""`OutputStream`: one choice's tokens in, events and the finished reply out; for the server and the offline `LLM`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal

from dovetail.contracts.output import (
    ContentDelta,
    Event,
    FormatSpec,
    Malformed,
    ReasoningDelta,
    TemplateView,
    ToolArgs,
    ToolStart,
)
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.contracts.tools import ToolParser
from dovetail.messages import Finish, TokenDelta
from dovetail.sdk.formats.machine import IncrementalParser
from dovetail.sdk.formats.output import ToolCall, make_parser
from dovetail.sdk.formats.stop_regex import make_stops
from dovetail.text.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("dovetail.text")
MAX_FAILURES = 100
"""Kinds of failures of output parsers that are logged."""
_FAILURES: set[tuple[str, str, str]] = set()


@dataclass(frozen=True, slots=True)
class NoTemplate(TemplateView):
    """Stands for the chat template where there is none, as for raw completions."""

    source: str = ""


@dataclass(frozen=True, slots=True)
class StreamFinish:
    """Why a choice ended.

    Attributes:
        reason: OpenAI's, plus `abort`.
        matched: The stop token id or stop string, if one ended it.
        message: Explains `abort`.
    """

    reason: Literal["stop", "length", "tool_calls", "abort"]
    matched: int | str | None = None
    message: str | None = None


class OutputStream:
    """One choice's output.

    `feed` gives out the events of `contracts.output` except `Malformed`, whose text arrives as content. Adjacent
    text of one kind is one event. The attributes hold the whole reply so far; what was held back joins them when the
    choice ends.

    Attributes:
        finish: None while running. When a stop string ends the choice it is set although the engine still runs: the
            caller aborts the engine's request.
        token_ids: Generated ids, up to and including the one that completed a stop string, or the stop token.
        text_offsets: With `track_offsets`, for each token the number of characters of output before it.
        tool_calls: The calls so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        template: TemplateView | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_schemas: Sequence[Mapping[str, Any]] = (),
        prompt_tail: str | None = None,
        stop: Sequence[str] = (),
        stop_regex: Sequence[str] = (),
        no_stop_trim: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        separate_reasoning: bool = True,
        stream_reasoning: bool = True,
        track_offsets: bool = False,
        engine_follows: bool = False,
    ) -> None:
        """Prepare. With neither parser the output is plain text, all content.

        Args:
            tokenizer: The model's.
            reasoning: Parser chosen for the model, None for none.
            tools: As `reasoning`; None also where the request has no tools or forbids them.
            template: The chat template, for parsers that look at it.
            template_kwargs: `chat_template_kwargs` of the request.
            tool_schemas: The request's tools.
            prompt_tail: `RenderedChat.tail`; None where no template rendered the prompt.
            stop: Stop strings; they are looked for in the content only.
            stop_regex: Regular expressions that end the content as stop strings do.
            no_stop_trim: Keep the matched stop string, or the stop token's text, in the content.
            min_tokens: Stop strings in the text of fewer tokens than this do not count.
            skip_special_tokens: Special tokens give no text.
            separate_reasoning: False puts reasoning into the content as the model wrote it, markers included.
            stream_reasoning: False gives reasoning out in one event, when thinking ends.
            track_offsets: Fill `text_offsets`.
            engine_follows: The engine follows thinking, too, and takes every end for one: see `Markers.ends_quoted`.
        """
        spec = FormatSpec()
        if reasoning is not None:
            request = ParserRequest(template_kwargs=template_kwargs or {})
            spec = reasoning.spec(tokenizer, template or NoTemplate(), request)
            if engine_follows and spec.reasoning is not None:
                spec = replace(spec, reasoning=replace(spec.reasoning, ends_quoted=True))
        if tools is not None:
            spec = tools.extend(spec, tool_schemas)
        shown = spec.reasoning if spec.reasoning is not None and spec.reasoning.shown else None
        self._separate = separate_reasoning and shown is None
        self._parser = make_parser(
            spec, tokenizer, skip_special_tokens=skip_special_tokens, keep_markers=not self._separate
        )
        self._plain = partial(make_parser, FormatSpec(), tokenizer, skip_special_tokens=skip_special_tokens)
        self._unseen: list[int] = []
        if prompt_tail is not None:
            try:
                self._parser.prime(prompt_tail)
            except Exception as error:  # a stranger's machine must not cost the reply
                self._give_up(error)
        self._stops = make_stops(stop, stop_regex, keep_match=no_stop_trim)
        self._no_stop_trim = no_stop_trim
        self._min_tokens = min_tokens
        self._stream_reasoning = stream_reasoning
        self._track_offsets = track_offsets
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._waiting: list[ReasoningDelta] = []
        self._events: list[Event] = []
        self.finish: StreamFinish | None = None
        self.token_ids: list[int] = []
        self.text_offsets: list[int] = []
        self.tool_calls: list[ToolCall] = []
        if shown is not None and self._parser.in_reasoning:
            self._add_content(shown.start)

    @property
    def num_tokens(self) -> int:
        """Generated tokens that count: `completion_tokens`."""
        return len(self.token_ids)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens generated inside thinking."""
        return self._parser.reasoning_tokens

    @property
    def may_end_early(self) -> bool:
        """Whether its text may end it before the engine does: every token after that is one too many."""
        return self._stops is not None

    @property
    def text(self) -> str:
        """The content so far, `""` if there is none: what `/generate` and completions return."""
        return _joined(self._content)

    @property
    def content(self) -> str | None:
        """The content so far, None if there is none."""
        return self.text or None

    @property
    def reasoning(self) -> str | None:
        """The reasoning so far, None if there is none or it is not separated."""
        return _joined(self._reasoning) or None

    def feed(self, delta: TokenDelta) -> list[Event]:
        """Take the engine's next tokens; return what they make certain. After the end, nothing more comes.

        Raises:
            RequestError: A stop expression takes too long.
        """
        return self.feed_ids(delta.ids, delta.finish)

    def fail(self, message: str) -> None:
        """End it with an error, as where `feed` raised one; what is still held back is dropped."""
        self.finish = StreamFinish("abort", None, message)

    def feed_ids(self, ids: Sequence[int], finish: Finish | None = None) -> list[Event]:
        """As `feed`, for callers without an engine."""
        if self.finish is not None:
            return []
        visible = self._num_visible(ids, finish)
        if self._stops is None and not self._track_offsets:
            self.token_ids += ids
            self._take(self._parse(ids if visible == len(ids) else ids[:visible]))
        else:
            self._feed_singly(ids, visible)
        if self.finish is None and finish is not None:
            self._take(self._finish_parsing(finish.reason))
            self._end(finish)
        events, self._events = self._events, []
        return _merged(events)

    def _parse(self, ids: Sequence[int]) -> list[Event]:
        """Feed the parser. One that raises is given up: what it has not given out, and the rest, is content."""
        try:
            events = self._parser.feed(ids)
        except Exception as error:  # a stranger's machine must not cost the reply
            return self._give_up(error).feed([*self._unseen, *ids])
        if events:
            self._unseen.clear()
        else:
            self._unseen += ids
        return events

    def _finish_parsing(self, reason: str) -> list[Event]:
        try:
            return self._parser.finish(reason)
        except Exception as error:  # as above
            plain = self._give_up(error)
            return [*plain.feed(self._unseen), *plain.finish(reason)]

    def _give_up(self, error: Exception) -> IncrementalParser:
        """Go on without the parser, and say so once for each kind of failure."""
        what = (type(self._parser).__name__, type(error).__name__, str(error))
        if what not in _FAILURES and len(_FAILURES) < MAX_FAILURES:
            _FAILURES.add(what)
            logger.error("output parser %s raised %s: %s; the rest of the reply is content", *what, exc_info=error)
        self._parser = self._plain()
        return self._parser

    def _num_visible(self, ids: Sequence[int], finish: Finish | None) -> int:
        """Return how many of the new ids give text: all, or all but the stop token."""
        if finish is not None and finish.reason == "stop" and finish.matched is not None and ids:
            shown = self._no_stop_trim or finish.matched in self._parser.marker_ids
            return len(ids) - (ids[-1] == finish.matched and not shown)
        return len(ids)

    def _feed_singly(self, ids: Sequence[int], visible: int) -> None:
        """Take ids one by one, so that each has its offset and the one that completes a stop string is known."""
        for i, token_id in enumerate(ids):
            if self._track_offsets:
                self.text_offsets.append(self._parser.num_chars)
            self.token_ids.append(token_id)
            if i < visible:
                self._take(self._parse((token_id,)))
            if self._stopped():
                return

    def _stopped(self) -> bool:
        """Say whether a stop string is complete, also one whose end the parser still holds back; end if so."""
        stops = self._stops
        if stops is None or len(self.token_ids) < self._min_tokens:
            return False
        if stops.matched is None:
            pending = self._parser.pending_content
            if not pending or not stops.would_match(pending):
                return False
            self._take(self._finish_parsing("stop"))
        self._end(Finish("stop"))
        return True

    def _end(self, finish: Finish) -> None:
        """Give out what is still held back and say why it ended."""
        matched: int | str | None = finish.matched
        if self._stops is not None:
            self._add_content(self._stops.flush())
            matched = self._stops.matched or matched
        self._flush_reasoning()
        reason: Literal["stop", "length", "tool_calls", "abort"] = "stop" if isinstance(matched, str) else finish.reason
        if reason == "stop" and self.tool_calls:
            reason = "tool_calls"
        self.finish = StreamFinish(reason, matched, finish.message)

    def _take(self, events: list[Event]) -> None:
        """Take the parser's events: accumulate them and look for stop strings in the content."""
        for event in events:
            if isinstance(event, ReasoningDelta):
                self._take_reasoning(event)
                continue
            self._flush_reasoning()
            if isinstance(event, (ContentDelta, Malformed)):
                text, stops = event.text, self._stops
                if stops is not None and len(self.token_ids) >= self._min_tokens:
                    text = stops.feed(text)
                self._add_content(text)
                if stops is not None and stops.matched is not None:
                    return
                continue
            if self._stops is not None:
                self._add_content(self._stops.flush())
            if isinstance(event, ToolStart):
                self.tool_calls.append(ToolCall(event.id, event.name))
            elif isinstance(event, ToolArgs):
                self.tool_calls[event.index].add(event.json)
            self._events.append(event)
        if self._waiting and not self._parser.in_reasoning:
            self._flush_reasoning()

    def _take_reasoning(self, event: ReasoningDelta) -> None:
        if self._stops is not None:
            self._add_content(self._stops.flush())
        if not self._separate:
            self._add_content(event.text)
            return
        self._reasoning.append(event.text)
        self._waiting.append(event)
        if self._stream_reasoning:
            self._flush_reasoning()

    def _flush_reasoning(self) -> None:
        if self._waiting:
            text = "".join([event.text for event in self._waiting])
            self._events.append(ReasoningDelta(text, sum(event.num_tokens for event in self._waiting)))
            self._waiting.clear()

    def _add_content(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._events.append(ContentDelta(text))


def _joined(parts: list[str]) -> str:
    """Join accumulated text, keeping the result so that the next call is cheap."""
    if len(parts) > 1:
        parts[:] = ["".join(parts)]
    return parts[0] if parts else ""


def _merged(events: list[Event]) -> list[Event]:
    """Join adjacent text events of one kind, and pieces of one call's arguments."""
    if len(events) < 2:
        return events
    merged: list[Event] = []
    for (kind, call), group in groupby(events, lambda event: (type(event), getattr(event, "index", -1))):
        run = list(group)
        text = "".join([event.text for event in run if isinstance(event, (ContentDelta, ReasoningDelta))])
        if kind is ContentDelta:
            merged.append(ContentDelta(text))
        elif kind is ToolArgs:
            merged.append(ToolArgs(call, "".join([event.json for event in run if isinstance(event, ToolArgs)])))
        elif kind is ReasoningDelta:
            merged.append(ReasoningDelta(text, sum(e.num_tokens for e in run if isinstance(e, ReasoningDelta))))
        else:
            merged.extend(run)
    return merged
