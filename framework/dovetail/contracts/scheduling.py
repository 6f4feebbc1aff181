"""What the author of a schedule policy implements: `SchedulePolicy`, and what it sees of requests and of the cache.

```python
class ShortestFirst(SchedulePolicy):
    def order(self, waiting, cache):
        return sorted(waiting, key=lambda request: (-request.priority, request.num_prompt, request.arrival))
```

The class is named in the entry-point group `dovetail.schedule_policies.v1`. The engine calls it on its own thread in
every step that could admit somebody; it imports neither torch nor anything of the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from dovetail.contracts.options import Configurable


class WaitingRequest(Protocol):
    """What a policy sees of a request. It reads, and keeps nothing of it: the engine knows when a request ends."""

    @property
    def priority(self) -> int:
        """As its caller set it; higher comes first. Negative: of the background, which is ordered by itself."""
        ...

    @property
    def arrival(self) -> int:
        """Number of its submission: lower came first. A request that was retracted keeps it."""
        ...

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        ...

    @property
    def num_output(self) -> int:
        """Tokens generated before it was retracted, 0 as a rule."""
        ...

    @property
    def remaining_tokens(self) -> int:
        """Tokens that it may still generate."""
        ...

    @property
    def owner(self) -> str:
        """Whose it is: the same name for all requests of one API key, which cannot be read back from it; "" without."""
        ...

    @property
    def deadline(self) -> float:
        """Time of `time.monotonic` at which the request is aborted because its client stops waiting, or infinity."""
        ...


class PrefixView(Protocol):
    """What a policy can learn of the prefix cache."""

    def cached_tokens(self, requests: Sequence[WaitingRequest]) -> list[int]:
        """Return for each request how many of its leading tokens are cached, as far as is known.

        Looking costs host time in every step, so only some requests are looked up again in each call: those whose
        answer is oldest, where pages have come or gone since. A request never looked up has 0.
        """
        ...


class SchedulePolicy(Configurable, ABC):
    """In which order waiting requests are admitted."""

    preempts: ClassVar[bool] = False
    """A waiting request retracts running ones of lower priority when there is no room for it."""
    across_owners: ClassVar[bool] = False
    """It orders the requests of all owners together and has to be fair itself. Else owners take turns by the tokens
    that were computed for them, and it orders the requests of one owner at a time."""

    @abstractmethod
    def order(self, waiting: Sequence[WaitingRequest], cache: PrefixView) -> Sequence[WaitingRequest]:
        """Return who is to be admitted first, second, and so on.

        Called in every step, so its time delays every request: for a thousand requests, a millisecond is much.

        Args:
            waiting: The head of the queue, higher priority first, then by arrival. At most some thousand; all of the
                background or none; all of one owner, unless `across_owners`.
            cache: The prefix cache.

        Returns:
            `waiting` itself, or its requests in another order. A request left out is not admitted in this step.
            Something else, or an exception, is logged with the plugin's name, and that step goes by `waiting`.
        """
