"""How many replicas a model gets: by the tokens of the prompts that they hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

QUEUED = "queued_tokens"
ROOM = "cache_tokens"
SHARE = 0.5
"""Of a replica's KV cache: where prompts that run or wait are more than that, another replica is asked for."""


class QueuedTokens:
    """Ray's autoscaling policy: enough replicas that each holds at most `target` prompt tokens.

    Ray applies its own bounds, factors and delays to what it returns.
    """

    def __init__(self, target: int | None = None) -> None:
        """Hold to `target` tokens per replica. Default: half of a replica's cache."""
        self.target = target

    def __call__(self, ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas to run; without metrics, the current target."""
        metrics = ctx.aggregated_metrics or {}
        queued = metrics.get(QUEUED) or {}
        capacities = [room for room in (metrics.get(ROOM) or {}).values() if room > 0]
        target = self.target or (SHARE * sum(capacities) / len(capacities) if capacities else 0)
        if not queued or not target:
            return ctx.target_num_replicas, {}
        return max(1, math.ceil(sum(queued.values()) / target)), {}
