"""Ray's prefix-aware request router, kept from two of its faults."""

from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter

IMBALANCE = 8
"""Requests by which replicas may differ before the less busy one is taken, whatever it has cached. Ray's own value is
infinite: one prefix that everybody asks for would then have one replica."""


class PrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]  # Ray has no types here
    """Follows prefixes while loads are near each other, else takes the better of two.

    Requests that come with keyword arguments have no prompt: for them Ray's default, the better of two, is left alone.
    """

    async def _prefix_match_best_replicas(self, pending_request: Any, candidate_replicas: list[Any]) -> list[list[Any]]:
        """Choose as Ray does; where that fails, let it go by load.

        Ray 2.60 looks replicas up that its tree of prefixes still has and that are gone: a `KeyError`, after which the
        request waits for ever.
        """
        try:
            chosen: list[list[Any]] = await super()._prefix_match_best_replicas(pending_request, candidate_replicas)
        except KeyError:
            return [[]]
        return chosen
