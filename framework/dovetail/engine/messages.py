"""What travels between an engine and its client: msgpack structs, never pickle.

Client to engine: `Submit`, `Abort`, `Control`. Engine to client: `Starting` now and then, `Ready` or `Failed` once,
then `Admitted`, `Tick`s and `ControlReply`s. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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


class GrammarStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One way to enforce a request's grammar: a backend of the plan and a `GrammarSpec` as data."""

    backend: str
    kind: str
    source: str
    max_whitespace: int | None = None
    whitespace: str | None = None
    weaken: bool = False
    """Keywords of its JSON schemas may be left out where the backend refuses them; `TokenDelta` names them."""


class Marker(msgspec.Struct, frozen=True):
    """A marker of thinking: its text, and the ids that the tokenizer makes of it.

    With one id it is an added token and matches by that id only; otherwise by its text, wherever tokens cut it.
    """

    text: str
    ids: tuple[int, ...]


class MarkedThinking(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """What the engine must know of thinking between two markers, to start the grammar after it.

    `state` is that at the prompt's end, as in `contracts.reasoning.State`; `tools` are tokens that begin a tool call,
    and `tool_texts` are spelled in several; they end thinking if `ended_by_tools`; with `calls`, the grammar describes
    calls, too; `budget` is the most tokens of thinking, after which the end is forced.
    """

    state: Literal["open", "in", "out"]
    start: Marker
    end: Marker
    tools: tuple[int, ...] = ()
    tool_texts: tuple[str, ...] = ()
    ended_by_tools: bool = False
    calls: bool = False
    budget: int | None = None


class MessageThinking(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """As `MarkedThinking`, for a format of messages with headers: see `contracts.reasoning.Messages` for the names.

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


Thinking = MarkedThinking | MessageThinking


BACKGROUND = -(1 << 31)
"""The priority of work in no hurry: it holds back while anything else is served, and gives way where room is short."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A request, new or going on. Higher `priority` goes first; see `BACKGROUND`.

    `handle` is its address, a number that its client gives and never uses again; `rid` is a label for people.
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    handle: int = 0
    priority: int = 0
    cache_salt: str = ""
    """Requests with different salts never share cached pages."""
    owner: str = ""
    """Whose request it is: what waits is shared out between owners."""
    grammar: tuple[GrammarStep, ...] = ()
    """What the text must match: the first step that compiles is enforced. Empty: anything."""
    thinking: Thinking | None = None
    """Given where a grammar or a budget depends on it."""
    output_ids: list[int] = []
    """What an engine that is gone generated for it. It goes on behind that, as it would have there: draws are keyed by
    seed and position, counts and the states of grammar and thinking are made again from these ids."""
    cached_tokens: int | None = None
    """That engine's word on how much of the prompt it found cached; None where it had not come to that."""
    num_retractions: int = 0
    grammar_step: int | None = None
    """Which step that engine enforced."""
    again: bool = False
    """An engine that is gone had it, and came to these or to nothing yet."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Drop a request, at any stage. Unknown handles are ignored: it may just have finished."""

    handle: int


class Control(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A command outside the request stream, answered by a `ControlReply` with the same id."""

    id: int
    op: Literal["flush_cache", "stats", "shutdown"]


class TopLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One candidate token."""

    token_id: int
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token's natural-log probability and its most likely rivals, best first."""

    token_id: int
    logprob: float | None
    """None for the first prompt token, which nothing predicts."""
    top: list[TopLogprob]


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
    grammar_step: int | None = None
    """Sent with every delta of a request with a grammar: the index of the step that is enforced."""
    grammar_ignored: tuple[str, ...] = ()
    """With it, what was left out of the step's source, as JSON pointers."""
    finish: Finish | None = None


class Tick(msgspec.Struct, kw_only=True, tag=True, gc=False):
    """All deltas of one engine step. `step` is the step counter, the engine's heartbeat."""

    step: int
    deltas: list[TokenDelta]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a started engine."""

    architecture: str
    dtype: str
    device: str
    vocab_size: int
    context_len: int
    max_total_tokens: int
    max_running_requests: int
    page_size: int
    attention_backend: str
    weight_bytes: int
    kv_bytes: int
    load_s: float
    plugins: list[tuple[str, str, str, str]] = []
    """What became of the engine's plugins: (kind, `distribution:name`, state, reason)."""


class Starting(msgspec.Struct, frozen=True, tag=True):
    """The engine has got on with its start since it last said so."""


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """From now on these requests take part in what the engine does; sent before the step that they begin with."""

    handles: list[int]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine has started."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start, or died. `user_error` marks a `ConfigError`: print the message, no traceback."""

    message: str
    user_error: bool


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine's load."""

    step: int
    num_running: int
    num_queued: int
    num_used_tokens: int
    num_cached_tokens: int
    max_total_tokens: int
    gen_throughput: float
    num_repaired_pages: int = 0
    """Pages whose ownership was wrong and has been put right: a fault of the engine's, 0 in every good run."""


class ControlReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to a `Control`; `stats` carries a `Stats` in builtin types, other commands `{"ok": bool}`."""

    id: int
    result: dict[str, Any]


ToEngine = Submit | Abort | Control
FromEngine = Starting | Ready | Failed | Admitted | Tick | ControlReply
