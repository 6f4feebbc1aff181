"""One request inside the engine, and one step's plan."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter

from dovetail.cache.node import Node, Pages
from dovetail.engine.draft_record import DraftRecord
from dovetail.engine.media import RequestMedia
from dovetail.grammar.matching.constraint import Constraint
from dovetail.messages import (
    BACKGROUND,
    Finish,
    GrammarOption,
    Pool,
    SamplerParams,
    Submit,
    Thinking,
    Times,
    TokenLogprob,
)
from dovetail.messages.media import MediaSpan


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """What a request wants enforced, kept with it.

    Attributes:
        options: All options to enforce its grammar, best first.
        thinking: What is known of its thinking.
    """

    options: tuple[GrammarOption, ...]
    thinking: Thinking | None


class Timing:
    """Where a request's time goes in its engine. Read at events of its life, never per token."""

    __slots__ = ("_admitted_s", "_began", "_first_s", "_grammar_s", "_put_back_at", "_waited_s")

    def __init__(self) -> None:
        """The engine takes the request in now."""
        self._began = perf_counter()
        self._admitted_s: float | None = None
        self._grammar_s: float | None = None
        self._first_s: float | None = None
        self._waited_s = 0.0
        self._put_back_at: float | None = None

    def admitted(self) -> None:
        """It has pages and a row, for the first time or again."""
        now = perf_counter()
        if self._admitted_s is None:
            self._admitted_s = now - self._began
        if self._put_back_at is not None:
            self._waited_s += now - self._put_back_at
            self._put_back_at = None

    def put_back(self) -> None:
        """It waits again."""
        self._put_back_at = perf_counter()

    def decided(self) -> None:
        """Its grammar is in force; where one option after another is tried, the first counts."""
        if self._grammar_s is None:
            self._grammar_s = perf_counter() - self._began

    def first(self) -> Times:
        """It gets its first token now."""
        self._first_s = perf_counter() - self._began
        return self.as_times()

    def as_times(self) -> Times:
        """Return what is known now."""
        now = perf_counter()
        waits_s = 0.0 if self._put_back_at is None else now - self._put_back_at
        return Times(self._admitted_s, self._grammar_s, self._first_s, now - self._began, self._waited_s + waits_s)


@dataclass(slots=True, eq=False)
class EngineRequest:
    """State of a request from submission to release. Lengths are in tokens.

    Attributes:
        handle: Its client's number of it, by which it is addressed.
        rid: What its caller calls it, for people.
        ids: Prompt and output so far.
        seed: Of its draws.
        stop_ids: Ids that end it, beside what its grammar says.
        arrival: Sequence number of its submission; a retracted request keeps it.
        row: Device row, -1 while waiting; the devices know of it if `is_admitted`.
        pages: Of each cache group the pages in order of position, 0 for those that were given back; the first
            `num_tree_pages` belong to the radix tree, the rest to it.
        firsts: Of each group that does not see everything, its first page that is still there.
        node: Node of the tree whose path it has locked.
        branch: Leading tokens that the tree knew when it was admitted, whether it could go on from their end or not.
        computed_len: Leading tokens whose keys and values are in its pages, or will be once the device is there.
        in_flight: Launched steps that it is part of whose outcome has not been read.
        num_sampled: Tokens that it has, or will have once the steps in flight are read.
        on_device: Its next token is in its device row, so that it can decode.
        void_step: Number of the last step whose token for it is dropped: what it was computed from does not hold, or
            tokens forced by its grammar took the place.
        cached_len: Tokens found in the prefix cache when it was first admitted, -1 before.
        matched_pages: Cached pages that it was last found to have while it waited, …
        matched_version: … and in which version of the tree, -1 for none.
        max_tokens: Most tokens it may generate, what its context leaves included.
        pool: It generates nothing: its hidden states are pooled.
        second: Where the second of its two texts begins; 0: it is one.
        prefill_only: It is computed for the prefix cache, and generates nothing.
        is_announced: Its client knows that it takes part in steps.
        constraint: What it may say next; None for anything.
        waiting_for_grammar: Its grammar is being compiled, or was refused: nothing may be sampled.
        grammar_option: Which of the options to enforce its grammar is in force, or was in an engine before this one.
        grammar_ignored: What had to be left out of it.
        grammar: What it wants enforced.
        most_drafts: Drafts that its next step can use at most.
        memo: What a speculator keeps of it.
        record: What came of its drafts; None: nobody asked.
        owner: Whose it is.
        deadline: When its client stops waiting, as `time.monotonic` counts.
        weight: Its owner's share, relative to those of others.
        num_charged: Leading tokens that its owner has been charged for, or that were cached.
        timing: Where its time goes.
        media: Its images, for which `ids` has keys of the prefix cache; None: `ids` are the model's.
    """

    handle: int
    rid: str
    ids: array[int]
    num_prompt: int
    params: SamplerParams
    seed: int
    stop_ids: tuple[int, ...]
    priority: int
    cache_salt: str
    arrival: int
    max_tokens: int
    row: int = -1
    is_admitted: bool = False
    pages: Pages = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    num_tree_pages: int = 0
    node: Node | None = None
    branch: int = 0
    computed_len: int = 0
    in_flight: int = 0
    num_sampled: int = 0
    on_device: bool = False
    void_step: int = 0
    cached_len: int = -1
    matched_pages: int = 0
    matched_version: int = -1
    num_retractions: int = 0
    prompt_logprobs: list[TokenLogprob] | None = None
    finish: Finish | None = None
    pool: Pool | None = None
    second: int = 0
    prefill_only: bool = False
    is_announced: bool = False
    constraint: Constraint | None = None
    waiting_for_grammar: bool = False
    grammar_option: int | None = None
    grammar_ignored: tuple[str, ...] = ()
    grammar: GrammarRequest | None = None
    most_drafts: int = 0
    memo: object = None
    record: DraftRecord | None = None
    owner: str = ""
    deadline: float = math.inf
    weight: float = 1.0
    num_charged: int = 0
    timing: Timing = field(default_factory=Timing)
    media: RequestMedia | None = None

    @classmethod
    def from_submit(cls, message: Submit, *, arrival: int, eos_ids: tuple[int, ...]) -> EngineRequest:
        """Take a message; `seed` is used if the request brings none."""
        params = message.params
        seed = params.seed if params.seed is not None else message.handle  # a client has set one
        ids, output = array("i", message.prompt_ids), message.output_ids
        ids.extend(output)
        stops = params.stop_token_ids if params.ignore_eos else (*eos_ids, *params.stop_token_ids)
        return cls(
            handle=message.handle,
            rid=message.rid,
            ids=ids,
            num_prompt=len(message.prompt_ids),
            params=params,
            seed=seed,
            stop_ids=stops,
            num_sampled=len(output),
            priority=message.priority,
            cache_salt=message.cache_salt,
            arrival=arrival,
            max_tokens=params.max_tokens,
            cached_len=-1 if message.cached_tokens is None else message.cached_tokens,
            num_retractions=message.num_retractions,
            prompt_logprobs=[] if params.prompt_logprobs is not None and not output else None,
            grammar_option=message.grammar_option,
            pool=message.pool,
            second=message.second,
            owner=message.owner,
            deadline=math.inf if message.timeout_s is None else monotonic() + message.timeout_s,
            weight=message.weight,
            prefill_only=message.prefill_only,
        )

    def model_ids(self, start: int, end: int) -> array[int]:
        """Return known ids `start … end - 1` as the model gets them."""
        ids = self.ids[start:end]
        return ids if self.media is None else self.media.restored(ids, start)

    @property
    def is_background(self) -> bool:
        """Whether it is in no hurry."""
        return self.priority == BACKGROUND

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.ids) - self.num_prompt

    @property
    def first_needed(self) -> int:
        """The first known token whose final hidden state is wanted: all before it may come from the cache."""
        if self.pool in ("first", "mean"):
            return 0
        last = len(self.ids) - 1
        return last if self.prompt_logprobs is None else min(last, self.params.prompt_logprobs_start)

    @property
    def num_pending(self) -> int:
        """Known tokens whose keys and values are still to be computed."""
        return len(self.ids) - self.computed_len

    @property
    def is_last_token_scheduled(self) -> bool:
        """Whether the last token that it may generate has been launched."""
        return self.num_sampled >= self.max_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens that it may still generate."""
        return self.max_tokens - self.num_output

    def append_token(self, token: int) -> None:
        """Append a sampled token and decide whether the request has ended."""
        self.ids.append(token)
        if token in self.stop_ids and self.num_output >= self.params.min_tokens:
            self.finish = Finish("stop", token)
        elif self.num_output >= self.max_tokens:
            self.finish = Finish("length")
        self._follow(token)

    def _follow(self, token: int) -> None:
        """Let the constraint take a token: it may refuse it, or know that the text is complete."""
        constraint = self.constraint
        if constraint is None:
            return
        error = constraint.accept(token)
        if error is not None and self.finish is None:
            self.finish = Finish("abort", None, error, "grammar_failed")
        elif constraint.terminated and (self.finish is None or self.finish.reason == "length"):
            self.finish = Finish("stop", token)


@dataclass(slots=True, eq=False)
class PromptChunk:
    """A request's share of a step: its tokens `start … start + num_new - 1`, and what is to come of them.

    Attributes:
        samples: A token follows them.
        decodes: They are no prompt's: it continues behind a sampled token, …
        drafts: … and these may follow, and are verified in the same step: `num_new` counts them, too.
        pools: They are the last, and what was pooled is told.
    """

    request: EngineRequest
    start: int
    num_new: int
    samples: bool
    pools: bool = False
    decodes: bool = False
    drafts: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class StepPlan:
    """What one step computes: decode rows, then prefill chunks. The counts are those of the log line.

    Attributes:
        number: Of the steps that were launched, from 1.
        writes: What it writes, tentatively until its outcome is read: of each request, the list of its pages then, and
            the length from which keys and values are written.
        has_graphs: Its graphs are captured.
        began: When it was launched, as `perf_counter` counts.
        may_draft: It was planned once the step before was read, as it was to have drafts.
        encode: Images that are encoded before it.
        dropped: Digests of images whose output is not kept any more.
    """

    decode: list[EngineRequest]
    chunks: list[PromptChunk]
    num_new_requests: int = 0
    num_cached_tokens: int = 0
    number: int = 0
    writes: list[tuple[EngineRequest, Pages, int]] = field(default_factory=list)
    has_graphs: bool = False
    began: float = 0.0
    may_draft: bool = False
    encode: list[MediaSpan] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens computed in this step."""
        return sum(chunk.num_new for chunk in self.chunks if not chunk.decodes)

    @property
    def has_prefill(self) -> bool:
        """Whether any prompt tokens are computed."""
        return any(not chunk.decodes for chunk in self.chunks)

    @property
    def num_decode(self) -> int:
        """Rows that continue behind a sampled token, with drafts or without."""
        return len(self.decode) + sum(chunk.decodes for chunk in self.chunks)

    @property
    def sampled(self) -> list[EngineRequest]:
        """Those that get a token, unless it is not decided in time what they may say."""
        return self.decode + [chunk.request for chunk in self.chunks if chunk.samples]

    @property
    def drafts(self) -> list[Sequence[int]]:
        """Of each that gets a token what is verified; empty where none has any."""
        if not any(chunk.drafts for chunk in self.chunks):
            return []
        return [()] * len(self.decode) + [chunk.drafts for chunk in self.chunks if chunk.samples]

    @property
    def num_places(self) -> int:
        """Positions at which a token is sampled."""
        return len(self.sampled) + sum(len(chunk.drafts) for chunk in self.chunks)

    @property
    def requests(self) -> list[EngineRequest]:
        """All that take part."""
        return self.decode + [chunk.request for chunk in self.chunks]
