"""One key's rights, what it uses at the moment, and what it has used since the server's start."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dovetail.contracts.errors import RequestError
from dovetail.messages import BACKGROUND
from dovetail_server.errors.catalogue import ServiceError
from dovetail_server.tenants.keys_file import PRIORITIES, Limits, PriorityRange

MINUTE_S = 60.0
UNBOUNDED = Limits(priority=PriorityRange(min=PRIORITIES[0], max=PRIORITIES[1]))


RATE_HEADERS = tuple(f"x-ratelimit-{w}-{n}" for n in ("requests", "tokens") for w in ("limit", "remaining", "reset"))
"""Headers of every reply to a key with such limits, as OpenAI sends them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What the operator gave a key.

    Attributes:
        name: For people.
        weight: Its share of tokens and rows, relative to other keys'.
        limits: What it may use.
    """

    name: str = ""
    weight: float = 1.0
    limits: Limits = UNBOUNDED


class Bucket:
    """Tokens of one minute: `limit` at most, and as many come back in a minute, little by little."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin full."""
        self._clock = clock
        self._limit: int | None = None
        self._left = 0.0
        self._at = 0.0

    def set(self, limit: int | None) -> None:
        """Take a limit; what was used before stays used."""
        if limit != self._limit:
            used = 0.0 if self._limit is None else self._limit - self._now()
            self._limit, self._at = limit, self._clock()
            self._left = float(limit or 0) - used

    @property
    def limit(self) -> int | None:
        """Most tokens in a minute, None for any number."""
        return self._limit

    @property
    def left(self) -> int:
        """Tokens that may be used now."""
        return max(0, math.floor(self._now()))

    def reset_s(self) -> float:
        """Seconds until it is full again."""
        return 0.0 if not self._limit else (self._limit - self._now()) * MINUTE_S / self._limit

    def wait_s(self, num: int) -> float:
        """Seconds until `num` tokens may be used; for more than a minute has, until it is full: they leave a debt."""
        if self._limit is None:
            return 0.0
        return max(0.0, min(max(num, 1), self._limit) - self._now()) * MINUTE_S / self._limit

    def use(self, num: int) -> None:
        """Use tokens, also more than there are."""
        if self._limit is not None:
            self._left = self._now() - num

    def _now(self) -> float:
        if self._limit is None:
            return 0.0
        now = self._clock()
        self._left = min(float(self._limit), self._left + (now - self._at) * self._limit / MINUTE_S)
        self._at = now
        return self._left


@dataclass(slots=True)
class TenantUsage:
    """Since the server's start."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Requests that went beyond a limit, by its name."""


class Tenant:
    """One owner of requests: a key, or all callers without one. Used from the event loop only."""

    def __init__(self, owner: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with no limits and nothing used."""
        self.owner = owner
        self.grant = Grant()
        self.usage = TenantUsage()
        self.num_live = 0
        """Engine requests submitted and not yet finished."""
        self.num_live_tokens = 0
        """Prompt tokens of these."""
        self.is_limited = False
        """Whether its grant has limits."""
        self.has_rates = False
        """Whether its replies tell it how much it has left."""
        self._input, self._output = Bucket(clock), Bucket(clock)

    @property
    def short(self) -> str:
        """The beginning of the owner's name, by which logs and metrics call a key; empty without a key."""
        return self.owner[:16]

    def take(self, grant: Grant) -> None:
        """Give it rights and limits, which hold from now on."""
        self.grant, limits = grant, grant.limits
        self.is_limited = limits != UNBOUNDED
        self.has_rates = any((limits.requests, limits.input_tokens_per_minute, limits.output_tokens_per_minute))
        self._input.set(limits.input_tokens_per_minute)
        self._output.set(limits.output_tokens_per_minute)

    def check_choices(self, num_choices: int) -> None:
        """Refuse a request that would generate more at once than the key ever may.

        Raises:
            RequestError: One request asks for more choices than the limit.
        """
        most = self.grant.limits.requests
        if most is not None and num_choices > most:
            text = f"prompts times n is {num_choices}; {self._whose()} may have {most} requests at once"
            raise RequestError(text, param="n", code="invalid_value")

    def check(self, num_requests: int = 1, num_tokens: int = 1, *, is_counted: bool = True) -> None:
        """Raise where a request, or a list of texts that are not continued, goes beyond the key's limits.

        Args:
            num_requests: Of the engine.
            num_tokens: Of their prompts.
            is_counted: A refusal is a request's, and not that of a beginning whose request is still to come.

        Raises:
            ServiceError: 429, with the time after which it may be sent again.
        """
        limits = self.grant.limits
        if limits.requests is not None and self.num_live and self.num_live + num_requests > limits.requests:
            text = f"has {self.num_live} requests at once, and may have {limits.requests}"
            self._refuse("requests", text, 1.0, is_counted=is_counted)
        for name, bucket, num in (("input_tokens", self._input, num_tokens), ("output_tokens", self._output, 1)):
            wait_s = bucket.wait_s(num)
            if wait_s > 0:
                what = name.replace("_", " ")
                text = f"may use {bucket.limit} {what} a minute, and has {bucket.left} left"
                text += f" of {num} needed" if num > 1 else ""
                self._refuse(name, text, wait_s, is_counted=is_counted)

    def check_open_responses(self, num_open: int) -> None:
        """Refuse one more response in the background than the key may store.

        Raises:
            ServiceError: 429.
        """
        most = self.grant.limits.stored_responses
        if most is not None and num_open >= most:
            text = f"has {num_open} responses in the background that have not ended, and may store {most}"
            self._refuse("stored_responses", text, 1.0)

    def _refuse(self, name: str, text: str, wait_s: float, *, is_counted: bool = True) -> None:
        if is_counted:
            self.usage.rejected[name] += 1
        seconds = max(1, math.ceil(wait_s))
        raise ServiceError(
            f"{self._whose()} {text}; try again in {seconds} s",
            code="rate_limit_exceeded",
            status=429,
            retry_after_s=seconds,
        )

    def allowed(self, priority: int) -> int:
        """Return a request's priority; any key may set that of background work.

        Raises:
            RequestError: It is beyond the key's range.
        """
        bounds = self.grant.limits.priority
        if priority != BACKGROUND and not bounds.min <= priority <= bounds.max:
            text = f"priority {priority}: {self._whose()} may set {bounds.min} to {bounds.max}"
            raise RequestError(text, param="priority", code="priority_not_allowed", status=403)
        return priority

    def _whose(self) -> str:
        return f"the key {self.grant.name!r}" if self.grant.name else "this key"

    def began(self, num_requests: int, num_tokens: int) -> None:
        """Count a request that goes to the engine."""
        self.num_live += num_requests
        self.num_live_tokens += num_tokens
        self.usage.requests += 1
        self.usage.input_tokens += num_tokens
        self._input.use(num_tokens)

    def used(self, num_tokens: int) -> None:
        """Count tokens that the engine was given for a request that never came."""
        self.usage.input_tokens += num_tokens
        self._input.use(num_tokens)

    def generated(self, num_tokens: int) -> None:
        """Count tokens that the engine sent."""
        self.usage.output_tokens += num_tokens
        self._output.use(num_tokens)

    def ended(self, num_requests: int, num_tokens: int) -> None:
        """Undo what `began` counted as live."""
        self.num_live -= num_requests
        self.num_live_tokens -= num_tokens

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return `x-ratelimit-*` as OpenAI sends them; of the tokens' two limits, that of which less is left."""
        found: list[tuple[str, int, int, float]] = []
        if (most := self.grant.limits.requests) is not None:
            left = max(0, most - self.num_live)
            found.append(("requests", most, left, 0.0 if left else 1.0))
        buckets = [bucket for bucket in (self._input, self._output) if bucket.limit]
        if buckets:
            bucket = min(buckets, key=lambda bucket: bucket.left / (bucket.limit or 1))
            found.append(("tokens", bucket.limit or 0, bucket.left, bucket.reset_s()))
        return [
            (f"x-ratelimit-{what}-{name}".encode(), value.encode())
            for name, limit, left, reset_s in found
            for what, value in (("limit", str(limit)), ("remaining", str(left)), ("reset", duration(reset_s)))
        ]


def share_of(tenant: Tenant, present: Iterable[Tenant]) -> float:
    """Return a tenant's part of what it shares with those that are present, from 0 to 1: 1 if it is alone."""
    own = tenant.grant.weight
    return own / (own + sum(other.grant.weight for other in present if other is not tenant))


def duration(seconds: float) -> str:
    """Write a time as these headers do: `0s`, `850ms`, `1m0.5s`."""
    ms = math.ceil(seconds * 1000)
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"
