"""What travels between an engine and its client: msgpack structs, never pickle.

Client to engine: `Submit`, `Abort`, `Control`. Engine to client: `Working` now and then, `Ready` or `EngineFailed`
once, then `Admitted`, `StepDeltas` and `ControlReply`s. What goes on between an engine and its devices is in
`messages.step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from dovetail.contracts.config import Pool as Pool
from dovetail.contracts.observers import CacheEvent, LoadStats
from dovetail.contracts.replies import TokenLogprob as TokenLogprob
from dovetail.contracts.replies import TopLogprob as TopLogprob
from dovetail.messages.media import MediaSpan

# How tokens are chosen.


class SamplerParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens. Values are checked by whoever accepts them from outside; the engine trusts them.

    Stop *strings* are not here: they are matched on decoded content by the output processor, which then aborts.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """None: the client chooses one."""
    logprobs: int | None = None
    """None: none; n: the chosen token's log probability and those of the n most likely tokens."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the prompt's tokens."""
    prompt_logprobs_start: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose log probabilities go with each of those that `logprobs` and `prompt_logprobs` ask for."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Tokens, or several in a row, that are never said."""
    processors: dict[str, dict[str, Any]] = {}
    """Logits processors that it asks for, and what it says to each: complete, checked, plain values."""

    @property
    def is_penalized(self) -> bool:
        """Whether tokens have to be counted."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on what was said before it in other ways than through the model."""
        return self.is_penalized or bool(self.processors)


# What a client sends to an engine. Lengths are in tokens.


class GrammarOption(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One option to enforce a request's grammar: a backend of the plan and a `GrammarSpec` as data."""

    backend: str
    kind: str
    source: str
    max_whitespace: int | None = None
    whitespace: str | None = None
    relax_schema: bool = False
    """Keywords of its JSON schemas may be left out where the backend refuses them; `TokenDelta` names them."""
    unasked: bool = False
    """The backend has not been asked what it enforces: the engine does, and `TokenDelta` names the rest."""


class Marker(msgspec.Struct, frozen=True):
    """A marker of thinking: its text, and the ids that the tokenizer makes of it.

    With one id it is an added token and matches by that id only; otherwise by its text, wherever tokens cut it.
    """

    text: str
    ids: tuple[int, ...]


class MarkedThinking(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """What the engine must know of thinking between two markers, to start the grammar after it.

    `state` is that at the prompt's end, as in `contracts.output.State`; `tools` are tokens that begin a tool call;
    they end thinking if `ended_by_tools`, as `breaks` do, and `break_texts`, which are spelled in several tokens; with
    `calls`, the grammar describes calls, too; `answers` are tokens that begin an answer, behind which no thinking
    begins, where nothing stands before them; `budget` is the most tokens of thinking, after which the end is forced.
    Of `after`, what the template writes behind the end, the output parser drops what is written: it is no grammar's.
    """

    state: Literal["open", "in", "out"]
    start: Marker
    end: Marker
    after: str = ""
    tools: tuple[int, ...] = ()
    breaks: tuple[int, ...] = ()
    answers: tuple[int, ...] = ()
    break_texts: tuple[str, ...] = ()
    ended_by_tools: bool = False
    calls: bool = False
    budget: int | None = None


class MessageThinking(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """As `MarkedThinking`, for a format of messages with headers: see `contracts.output.Messages` for the names.

    `header` is what of a header the prompt ends with. `first` and `next` are the tokens of the two canonical headers,
    of thinking and of the answer: what is left of them at the prompt's end, and after a message. With `calls`, tool
    calls may come in place of an answer; with `whole`, the grammar describes the whole reply, not the answer alone.
    """

    state: Literal["open", "in", "out"]
    header: str
    start: Marker
    parts: tuple[Marker, ...]
    inner: tuple[Marker, ...]
    body: Marker
    ends: tuple[int, ...]
    thinks: str
    answers: str
    first: tuple[tuple[int, ...], tuple[int, ...]]
    next: tuple[tuple[int, ...], tuple[int, ...]]
    calls: bool = False
    whole: bool = False
    budget: int | None = None
    bodies: tuple[Marker, ...] = ()
    bare: str = ""


Thinking = MarkedThinking | MessageThinking

BACKGROUND = -(1 << 31)
"""The priority of work in no hurry: it holds back while anything else is served, and gives way where room is short."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A request, new or going on. Higher `priority` goes first; see `BACKGROUND`.

    `handle` is its address, a number that its client gives and never uses again; `rid` is a label for people.
    """

    rid: str
    prompt_ids: list[int]
    params: SamplerParams
    handle: int = 0
    priority: int = 0
    cache_salt: str = ""
    """Requests with different salts never share cached pages."""
    owner: str = ""
    """Whose request it is: owners take turns."""
    weight: float = 1.0
    """The owner's share of tokens and rows while others' requests wait, relative to their weights; above 0."""
    timeout_s: float | None = None
    """How long its client waits, from now on. The client aborts it then; a schedule policy may look at it before."""
    grammar: tuple[GrammarOption, ...] = ()
    """What the text must match: the first step that compiles is enforced. Empty: anything."""
    thinking: Thinking | None = None
    """Given where a grammar or a budget depends on it."""
    output_ids: list[int] = []
    """What an engine that is gone generated for it. It goes on behind that, as it would have there: draws are keyed by
    seed and position, counts and the states of grammar and thinking are made again from these ids."""
    cached_tokens: int | None = None
    """That engine's word on how much of the prompt it found cached; None where it had not come to that."""
    num_retractions: int = 0
    grammar_option: int | None = None
    """Which step that engine enforced."""
    pool: Pool | None = None
    """Set where nothing is generated: the one delta brings the prompt's hidden states, pooled."""
    second: int = 0
    """Where the second of two texts begins in the prompt, for models that tell them apart; 0: there is one text."""
    again: bool = False
    """An engine that is gone had it, and came to these or to nothing yet."""
    media: tuple[MediaSpan, ...] = ()
    """Images of the prompt."""
    prefill_only: bool = False
    """The prompt's whole pages are computed for the prefix cache, and nothing is sampled: its one delta is the end,
    whose `prompt_tokens` are those of these pages."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Drop a request, at any stage. Unknown handles are ignored: it may just have finished."""

    handle: int


MAX_PROFILE_STEPS = 500
"""A profile ends after so many steps: it is kept in memory, and writing it holds up every request."""


class ProfileSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What of the next steps is recorded, and where each rank writes it: `folder/name-TP-rank.trace.json`.

    `num_steps` from the beginning on, which is now or when the step counter is at `start_step`; `activities` are of
    `CPU` and `GPU`, those of the device if empty.
    """

    folder: str
    name: str
    num_steps: int | None = None
    start_step: int | None = None
    activities: tuple[Literal["CPU", "GPU"], ...] = ()
    with_stack: bool = False
    record_shapes: bool = False


class Control(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A command outside the request stream, answered by a `ControlReply` with the same id."""

    id: int
    op: Literal["flush_cache", "stats", "shutdown", "steps", "start_profile", "stop_profile"]
    profile: ProfileSpec | None = None
    """Of `start_profile`."""
    after: int = 0
    """Of `steps`: those with larger numbers are told."""


ToEngine = Submit | Abort | Control


# What an engine sends to its client. Lengths are in tokens, times in seconds.

OUT_OF_MEMORY = "out_of_memory"
"""Code of a request for which memory ran out: the engine's fault, and worth another try."""

POISON = "engine_crashed"
"""The code with which a request ends that killed the engine, again and again, at last alone."""


class Finish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why a request ended. `matched` is the stop token id for `stop`; `message` explains `abort`.

    `code` is set where the request itself is at fault: that of the `RequestError` to raise.
    """

    reason: Literal["stop", "length", "abort"]
    matched: int | None = None
    message: str | None = None
    code: str | None = None


class Times(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a request's time went in its engine: each since the engine took it in, None for what has not come.

    `admitted_s` until it was first computed, `grammar_s` until its grammar was compiled, `first_s` until its first
    token, `total_s` until now; `waited_s` is how long it waited again after it was put back.
    """

    admitted_s: float | None
    grammar_s: float | None
    first_s: float | None
    total_s: float
    waited_s: float


class TokenDelta(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """New tokens of one request. The matched stop token is included in `ids`, as the last one."""

    handle: int
    ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    """Sent once, with the first token."""
    prompt_tokens: int = 0
    """Sent with every delta, as is `cached_tokens`."""
    cached_tokens: int = 0
    num_retractions: int = 0
    pooled: bytes | None = None
    """What `Submit.pool` asked for, as float32 numbers in the machine's order; sent with `finish`."""
    grammar_option: int | None = None
    """Sent with every delta of a request with a grammar: the index of the step that is enforced."""
    grammar_ignored: tuple[str, ...] = ()
    """With it, what was left out of the step's source, as JSON pointers."""
    times: Times | None = None
    """Sent with the first token and with `finish`."""
    finish: Finish | None = None


class StepDeltas(msgspec.Struct, kw_only=True, tag=True, gc=False):
    """All deltas of one engine step. `step` is the step counter, the engine's heartbeat."""

    step: int
    deltas: list[TokenDelta]


class KernelUse(msgspec.Struct, frozen=True, kw_only=True):
    """What computes an operation of the model.

    Attributes:
        operation: With its widths and options, as `Ask.place` of the contract.
        dtype: The model's there.
        served: First and last number of rows, and the set that computes them; `plain` is the meaning in plain torch,
            `composed` that put together of other operations.
        others: Sets that were asked and do not serve it, each with why.
        measured: Figures of the sets among which `auto` chose, or "".
    """

    operation: str
    dtype: str
    served: tuple[tuple[int, int, str], ...]
    others: tuple[tuple[str, str], ...] = ()
    measured: str = ""


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a loaded model, which executor and engine tell alike."""

    architecture: str
    dtype: str
    device: str
    vocab_size: int
    hidden_size: int
    context_len: int
    page_size: int
    attention_backend: str
    weight_bytes: int
    kv_bytes: int
    load_s: float
    chunk_size: int = -1
    """Most prompt tokens of a step; -1: prompts are not cut."""
    generates: bool = True
    """False: it has no output head, and tells of hidden states or scores only."""
    attention_measured: str = ""
    """What `auto` measured of several attention backends; "" where it had no choice."""
    kernels: tuple[KernelUse, ...] = ()
    """What computes which operation of the model."""
    num_labels: int = 0
    """Scores that it gives a text; 0: it is no classifier."""
    pool: Pool = "last"
    """Which hidden state stands for a text where the checkpoint's files do not say."""
    max_image_patches: int = 0
    """Most patches of an image that the memory plan has counted; 0: it reads text only."""
    timed_patches: int = 0
    """Patches of an image for which a layer of the vision tower takes 15 s on this CPU; 0: it was not timed."""


class EngineInfo(ServedModel, frozen=True, kw_only=True):
    """Facts of a started engine."""

    max_total_tokens: int
    max_running_requests: int
    plugins: list[tuple[str, str, str, str]] = []
    """What became of the engine's plugins: (kind, `distribution:name`, state, reason)."""


class Working(msgspec.Struct, frozen=True, tag=True):
    """The engine has got on since it last said so: with its start, or within a step that takes long."""


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """From now on these requests take part in what the engine does; sent before the step that they begin with."""

    handles: list[int]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine has started."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start, or died. `user_error` marks a `ConfigError`: print the message, no traceback."""

    message: str
    user_error: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(LoadStats):
    """A snapshot of the engine's load."""

    num_repaired_pages: int = 0
    """Pages whose ownership was wrong and has been put right: a fault of the engine's, 0 in every good run."""


class ControlReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to a `Control`: a `Stats` in builtin types, `{"ok": bool}`, a profile's `files`, or an `error`."""

    id: int
    result: dict[str, Any]


class CacheChanged(msgspec.Struct, frozen=True, tag=True):
    """What has come into the prefix cache and gone from it, in order."""

    events: list[CacheEvent]


FromEngine = Working | Ready | EngineFailed | Admitted | StepDeltas | ControlReply | CacheChanged
