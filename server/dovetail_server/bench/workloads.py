"""What is sent: lengths, counts and pace of requests, and the named sets of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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


def _load(name: str, about: str, num: int, streams: int, given: Span, made: Span, **more: Any) -> Workload:
    """`num` requests, `streams` of them at once, with so many tokens in and out."""
    return Workload(
        name=name, about=about, num_prompts=num, concurrency=streams, input_len=given, output_len=made, **more
    )


STANDARD = (
    _load("single", "one stream after another", 5, 1, (36, 36), (512, 512)),
    _load("c16", "16 streams", 64, 16, (512, 512), (256, 256)),
    _load("c64", "64 streams", 256, 64, (512, 512), (256, 256)),
    _load("c256", "256 streams", 1024, 256, (512, 512), (256, 256)),
    _load("prefix", "64 streams behind one prefix", 256, 64, (32, 32), (64, 64), shared_prefix_len=2048),
    _load("many", "5,000 short requests, whole replies", 5000, 512, (30, 50), (128, 128), stream=False),
    _load("long", "one long prompt after another", 3, 1, (16000, 16000), (8, 8)),
)
"""What servers are compared by: one stream, many streams, a common prefix, a flood of short requests, a long prompt."""

USUAL = {"temperature": 0.7, "top_p": 0.9}
"""How people sample: what most clients have for defaults, or close to it."""
ROW = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 24},
        "kind": {"enum": ["city", "river", "mountain", "lake"]},
        "year": {"type": "integer"},
    },
    "required": ["name", "kind", "year"],
    "additionalProperties": False,
}
TABLE = {
    "type": "object",
    "properties": {"rows": {"type": "array", "items": ROW, "minItems": 500}},
    "required": ["rows"],
    "additionalProperties": False,
}
"""A schema whose shortest reply is longer than what is asked for, so that replies have their full length."""
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "table", "schema": TABLE, "strict": True}}}
TOOL = {"type": "function", "function": {"name": "store", "parameters": TABLE, "strict": True}}
TOOLS = {"tools": [TOOL], "tool_choice": "required"}
PENALTIES = {**USUAL, "frequency_penalty": 0.5, "presence_penalty": 0.5}
LOGPROBS = {**USUAL, "logprobs": True, "top_logprobs": 5}


def _of_user(name: str, about: str, streams: int, extra: Mapping[str, Any], beside: str | None = None) -> Workload:
    """256 tokens in and out for each stream; the first workload of the suite is sent to a server that is just ready."""
    num = max(4, 4 * streams)
    return _load(name, about, num, streams, (256, 256), (256, 256), extra=extra, beside=beside)


USER = (
    replace(_of_user("first", "16 streams, no warm-up", 16, USUAL, "later"), warmup=0),
    *(
        each
        for n in (1, 64)
        for each in (
            _of_user(f"greedy-{n}", f"{n} streams, greedy", n, {}),
            _of_user(f"usual-{n}", "temperature 0.7, top_p 0.9", n, USUAL, f"greedy-{n}"),
            _of_user(f"penalties-{n}", "and both penalties 0.5", n, PENALTIES, f"greedy-{n}"),
            _of_user(f"logprobs-{n}", "and 5 log probabilities", n, LOGPROBS, f"greedy-{n}"),
            _of_user(f"schema-{n}", "and a JSON schema", n, {**USUAL, **SCHEMA}, f"greedy-{n}"),
            _of_user(f"tools-{n}", "and a tool that must be called", n, {**USUAL, **TOOLS}, f"greedy-{n}"),
        )
    ),
    Workload(
        name="arrivals",
        about="8 a second at random moments",
        num_prompts=80,
        request_rate=8.0,
        input_len=(32, 1024),
        output_len=(16, 256),
        extra=USUAL,
    ),
    _load("long", "one long text after another", 3, 1, (16000, 16000), (8, 8), extra=USUAL),
    _of_user("later", "as `first`, a while later", 16, USUAL),
)
"""What people do: chats, sampled, right after the start, with schemas, tools and penalties, at random moments."""

SUITES: Mapping[str, tuple[Workload, ...]] = {"standard": STANDARD, "user": USER}
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
