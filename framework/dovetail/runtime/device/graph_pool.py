"""Graphs that share one memory pool, and the outputs that a replay lends.

A graph's outputs lie in the pool. Every graph captured earlier may use the same memory for its intermediate results, so
its replay overwrites them. The outputs of a replay are therefore *borrowed*: they are valid until the next replay of
any graph of the pool, and reading them later is an error instead of a wrong number. Whoever needs one for longer copies
it, on the stream of the replays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from dovetail.contracts.device import DeviceGraph
from dovetail.runtime.device.devices import device_of

T = TypeVar("T")


class StepOutputs(NamedTuple):
    """What a captured step leaves: `logits` `[B, V]`, greedy `ids` `[B]` int64, `non_finite` `[B]` bool."""

    logits: Tensor
    ids: Tensor
    non_finite: Tensor


class Borrowed(Generic[T]):
    """The outputs of one replay, valid until the pool's next one."""

    __slots__ = ("_at", "_graph")

    def __init__(self, graph: PooledGraph[T]) -> None:
        self._graph = graph
        self.renew()

    def read(self) -> T:
        """Return the outputs.

        Raises:
            RuntimeError: Another graph of the pool was replayed since, and may have overwritten them.
        """
        if self._at != self._graph.pool.num_replays:
            raise RuntimeError("the outputs of a graph were read after another graph's replay; copy them before")
        return self._graph.outputs

    def renew(self) -> None:
        """Extend the loan past the last replay, which is known to leave the outputs as they are."""
        self._at = self._graph.pool.num_replays


class PooledGraph(Generic[T]):
    """One graph of a pool.

    Attributes:
        pool: The pool.
        graph: The graph itself.
        outputs: Static tensors, for whoever captures more behind them; what a replay leaves is read from its loan.
    """

    def __init__(self, pool: GraphPool, graph: DeviceGraph, outputs: T) -> None:
        """The graph has not been replayed yet: `outputs` hold nothing."""
        self.pool, self.graph, self.outputs = pool, graph, outputs

    def replay(self, reads: Borrowed[Any] | None = None) -> Borrowed[T]:
        """Run the graph on the current stream.

        Args:
            reads: Outputs that this graph was captured to read. They existed at its capture, so its own memory lies
                elsewhere and they stay valid.
        """
        if reads is not None:
            reads.read()
        self.pool.num_replays += 1
        self.graph.replay()
        if reads is not None:
            reads.renew()
        return Borrowed(self)


class GraphPool:
    """Captures steps into graphs that share memory; they must be replayed one after another, on one stream.

    Attributes:
        num_replays: Of all its graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle: Any = None
        self.num_replays = 0

    def capture(self, step: Callable[[], T]) -> PooledGraph[T]:
        """Record a step, whose results become the graph's outputs."""
        return PooledGraph(self, *self._record(step))

    def _record(self, step: Callable[[], T]) -> tuple[DeviceGraph, T]:
        """Run a step aside, then record it in the memory that all graphs share."""
        graph, result, self._handle = device_of(self._device).capture(step, self._handle)
        return graph, result
