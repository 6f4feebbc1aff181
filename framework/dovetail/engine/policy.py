"""The schedule policy's place in the engine: who calls it, what it sees of the cache, what becomes of its mistakes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

from dovetail.cache.radix import RadixTree
from dovetail.contracts.errors import PluginError
from dovetail.contracts.scheduling import SchedulePolicy, WaitingRequest
from dovetail.engine.request import EngineRequest
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.loader import describe

logger = logging.getLogger(__name__)
KIND = "schedule_policy"
MAX_LOOKED_UP = 8
"""Most requests that one call of a policy looks up in the prefix cache."""


class Policy:
    """Calls a `SchedulePolicy`. One that fails, or returns what it may not, costs nobody their place."""

    def __init__(self, plugin: SchedulePolicy, label: str) -> None:
        """`label` names the plugin in the log."""
        self._plugin, self._label = plugin, label
        self.preempts, self.across_owners = plugin.preempts, plugin.across_owners
        self._faults: set[str] = set()

    def order(self, waiting: Sequence[EngineRequest], tree: RadixTree) -> Sequence[EngineRequest]:
        """Return who is to be admitted, first to last; `waiting` where the plugin is at fault, which is logged once."""
        try:
            ordered = self._plugin.order(waiting, _TreeView(tree))
            if ordered is waiting:
                return waiting
            return _checked(cast("Sequence[EngineRequest]", ordered), waiting)
        except Exception as error:  # a stranger's code; without an order there is still the queue's own
            if type(error).__name__ not in self._faults:
                self._faults.add(type(error).__name__)
                what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                text = "%s: order failed (%s); requests are admitted as they came. It is not logged again."
                logger.error(text, self._label, what, exc_info=error)
            return waiting


class _TreeView:
    """`PrefixView` over the tree. What was found is kept with the request, with the tree's version."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree

    def cached_tokens(self, requests: Sequence[WaitingRequest]) -> list[int]:
        tree, known = self._tree, cast("Sequence[EngineRequest]", requests)
        stale = [r for r in known if r.matched_version != tree.version]
        for request in sorted(stale, key=lambda r: (r.matched_version, -r.priority, r.arrival))[:MAX_LOOKED_UP]:
            request.matched_pages = tree.count(request.ids[:-1], request.cache_salt)
            request.matched_version = tree.version
        return [request.matched_pages * tree.page_size for request in known]


def _checked(ordered: Sequence[EngineRequest], waiting: Sequence[EngineRequest]) -> Sequence[EngineRequest]:
    """Return `ordered`.

    Raises:
        ValueError: It holds something twice, or what does not wait.
    """
    left = {id(request) for request in waiting}
    for request in ordered:
        if id(request) not in left:
            raise ValueError("it returned a request twice, or one that was not given to it")
        left.remove(id(request))
    return ordered


def make_policy(plugins: LoadedPlugins) -> Policy:
    """Make the policy of an engine's plan.

    Raises:
        PluginError: The plan holds none, or it cannot be made.
    """
    for planned, cls in plugins.candidates(KIND):
        with plugins.watched(planned):
            return policy_of(cls, describe(planned))
    raise PluginError(f"the engine's plan holds no {KIND}; give make_plan a model, or a name for it")


def policy_of(cls: type[SchedulePolicy], label: str) -> Policy:
    """Make a policy of a class."""
    return Policy(cls(), label)
