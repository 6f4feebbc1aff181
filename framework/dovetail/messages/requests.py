"""What a client sends to an engine. Lengths are in tokens."""

from __future__ import annotations

from typing import Literal

import msgspec

from dovetail.messages.media import MediaSpan
from dovetail.messages.sampling import Pool, SamplerParams


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
    `calls`, the grammar describes calls, too; `budget` is the most tokens of thinking, after which the end is forced.
    Of `after`, what the template writes behind the end, the output parser drops what is written: it is no grammar's.
    """

    state: Literal["open", "in", "out"]
    start: Marker
    end: Marker
    after: str = ""
    tools: tuple[int, ...] = ()
    breaks: tuple[int, ...] = ()
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
