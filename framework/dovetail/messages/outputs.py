"""What an engine sends to its client. Lengths are in tokens, times in seconds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dovetail.contracts.config import Pool
from dovetail.contracts.observers import CacheEvent
from dovetail.messages.sampling import TokenLogprob

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


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a started engine."""

    architecture: str
    dtype: str
    device: str
    vocab_size: int
    hidden_size: int
    context_len: int
    max_total_tokens: int
    max_running_requests: int
    page_size: int
    attention_backend: str
    weight_bytes: int
    kv_bytes: int
    load_s: float
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


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine's load."""

    step: int
    num_running: int
    num_queued: int
    num_used_tokens: int
    num_cached_tokens: int
    max_total_tokens: int
    gen_throughput: float
    num_drafted_tokens: int = 0
    """Drafts that were verified since the engine started, …"""
    num_accepted_tokens: int = 0
    """… and those of them that held."""
    device_used_bytes: int = 0
    """Memory in use on the first rank's GPU, by whatever process, …"""
    device_total_bytes: int = 0
    """… and all of it; 0 on the CPU."""
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
