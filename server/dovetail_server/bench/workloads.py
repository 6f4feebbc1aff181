"""What is sent: lengths, counts and pace of requests, and the named sets of them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.contracts.tables import table

Span = tuple[int, int]
"""Lowest and highest length, both included; each request draws one between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One load. Lengths are in tokens; `input_len` does not count the shared prefix.

    Attributes:
        concurrency: Requests in flight at once, the next one sent when one is answered; None where `request_rate`
            says when they are sent.
        request_rate: Requests a second, at random moments.
        warmup: Requests sent before the clock starts; None for as many as are in flight at once.
        extra: Further fields of the requests' bodies, which take precedence.
        beside: The workload of the suite with whose output tokens a second this one's are compared.
    """

    name: str
    about: str = ""
    num_prompts: int
    concurrency: int | None = None
    request_rate: float | None = None
    input_len: Span
    output_len: Span
    shared_prefix_len: int = 0
    stream: bool = True
    warmup: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    beside: str | None = None

    @property
    def num_warmup(self) -> int:
        """Requests sent before the clock starts."""
        return self.warmup if self.warmup is not None else min(self.slots, self.num_prompts)

    @property
    def slots(self) -> int:
        """Requests in flight at once while warming up, and while measuring without a request rate."""
        return self.concurrency or 16


_DATA = table(__file__)
EXTRAS: dict[str, dict[str, Any]] = _DATA["extras"]
"""Fields of bodies by name. `usual` is how people sample: what most clients have for defaults, or close to it.

The schema's shortest reply is longer than what is asked for, so that replies have their full length."""


def _workload(row: dict[str, Any]) -> Workload:
    lengths = {name: tuple(row[name]) for name in ("input_len", "output_len")}
    return Workload(**{**row, **lengths, "extra": EXTRAS[row["extra"]] if "extra" in row else {}})


SUITES: Mapping[str, tuple[Workload, ...]] = {
    name: tuple(_workload(row) for row in rows) for name, rows in _DATA["suites"].items()
}
"""`standard` compares servers: one stream, many streams, a common prefix, a flood of short requests, a long prompt.

`user` is what people do: chats, sampled, right after the start, with schemas, tools and penalties, at random moments.
"""
CHAT_SUITES = frozenset({"user"})
"""Suites whose workloads are conversations: their fields are those of chat completions."""

WORDS = {
    "top_p": "top-p {}",
    "top_k": "top-k {}",
    "frequency_penalty": "frequency penalty {}",
    "presence_penalty": "presence penalty {}",
    "top_logprobs": "{} log probabilities",
    "response_format": "a JSON schema",
    "tools": "a tool that must be called",
}
"""How a field of a request is told."""
UNTOLD = frozenset({"temperature", "logprobs", "tool_choice"})
"""Fields that others tell already."""
OF_DRAWS = frozenset({"temperature", "top_p", "top_k", "min_p"})
"""Fields that mean nothing where the likeliest token is taken."""


def sampling_text(workload: Workload, temperature: float, defaults: Mapping[str, Any]) -> str:
    """Say how a workload's replies are sampled.

    Args:
        workload: Whose `extra` fields are told.
        temperature: Of workloads that have none of their own.
        defaults: What the server takes from the model where a request says nothing.
    """
    asked = {"temperature": temperature, **workload.extra}
    heat = asked["temperature"]
    own = {name: value for name, value in defaults.items() if name not in asked and (heat or name not in OF_DRAWS)}
    descriptions = [_described(name, value) for name, value in asked.items() if name not in UNTOLD]
    descriptions += [f"{_described(name, value)} of the model's own" for name, value in sorted(own.items())]
    return ", ".join([f"temperature {heat:g}" if heat else "greedy", *descriptions])


def _described(name: str, value: object) -> str:
    return WORDS.get(name, f"{name} {{}}").format(value)


# What `dovetail bench serve` is asked for. Imports nothing that a help text does not need.


def new_seed() -> int:
    """Return a seed for a run that is given none."""
    return secrets.randbelow(1 << 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the command was asked for, checked."""

    workloads: Sequence[Workload]
    seed: int = field(default_factory=new_seed)
    suite: str | None = None
    """Whose workloads these are; None: one workload of the options."""
    base_url: str | None = None
    model_path: Path | None = None
    serve_flags: Sequence[str] = ()
    model: str | None = None
    endpoint: str = "completions"
    sends_text: bool = True
    """Random prompts are text, not token ids."""
    temperature: float = 0.0
    ignore_eos: bool = True
    dataset: Path | None = None
    tokenizer: Path | None = None
    bandwidth: float | None = None
    """Bytes a second; measured if None."""
    workers: int | None = None
    timeout_s: float = 600.0
    start_timeout_s: float = 600.0
    api_key: str | None = None
    json: Path | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
