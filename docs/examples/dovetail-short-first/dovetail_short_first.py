"""Short prompts first. A long one is passed over so often, and then it is next: nobody starves.

What counts is what is still to be computed: tokens that the prefix cache has cost nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.contracts import PrefixView, SchedulePolicy, WaitingRequest


@dataclass
class ShortFirstOptions:
    """Settings: `--short-first.patience 32`."""

    patience: int = field(default=64, metadata={"help": "Later arrivals that may go before a request."})


class ShortFirst(SchedulePolicy):
    """By priority, then those that were passed over for too long, then by tokens to compute."""

    Options = ShortFirstOptions

    def order(self, waiting: Sequence[WaitingRequest], cache: PrefixView) -> Sequence[WaitingRequest]:
        """Return who is to be admitted first, second, and so on."""
        newest = max((request.arrival for request in waiting), default=0)

        def rank(pair: tuple[WaitingRequest, int]) -> tuple[int, int, int]:
            request, cached = pair
            is_due = newest - request.arrival >= self.options.patience
            to_compute = 0 if is_due else request.num_prompt + request.num_output - cached
            return -request.priority, to_compute, request.arrival

        pairs = zip(waiting, cache.cached_tokens(waiting), strict=True)
        return [request for request, _ in sorted(pairs, key=rank)]
