"""A layer that folds tokens into a state by kernels of its own: `Mixer`. `recur` is for one that has none.

T tokens of a step, n of which decode, S device rows, M copies of states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.errors import DovetailError
from dovetail.contracts.layers import BuildContext
from dovetail.sdk.layers.pieces import Pieces

States = Mapping[str, Tensor]
"""Tensors of a layer's `LayerSpec.state` by name: of all device rows `[S, …]`, or of all copies `[M, …]`."""


class Mixer(nn.Module, ABC):
    """Hands a step to kernels that read and write the states of device rows where these stand.

    A subclass says what its kernels do with tokens that decode, and with whole requests. Graphs record
    both, so neither reads anything on the host. With `--batch-invariant` requests that decode are whole requests too,
    so that a token has the same bits whichever way it came.

    Args:
        index: Number of the layer.
        ctx: The context that it is built in.
    """

    def __init__(self, index: int, ctx: BuildContext) -> None:
        super().__init__()
        self.index, self._is_invariant = index, ctx.batch_invariant

    def pieces(self, batch: ForwardBatch) -> Pieces | None:
        """Return a step's requests as `fold_requests` takes them: the same for all layers; None where all decode."""
        first = 0 if self._is_invariant else batch.num_decode
        return None if first == batch.num_requests else Pieces(batch, first)

    def mix(self, inputs: Sequence[Tensor], batch: ForwardBatch, pieces: Pieces | None) -> Tensor:
        """Fold a step's tokens into the states of their requests.

        Args:
            inputs: What the subclass takes of each token, `[T, …]` each.
            batch: The step's batch.
            pieces: As `pieces` returns them.

        Returns:
            What it makes of them, `[T, …]`.

        Raises:
            DovetailError: The step has no states: the layer's spec declares none.
        """
        if batch.states is None:
            raise DovetailError(f"layer {self.index} folds tokens into a state, and no layer's spec declares one")
        states, num = batch.states.rows(self.index), batch.num_tokens if pieces is None else pieces.first_token
        outputs = []
        if num:
            own = [one[:num] for one in inputs]
            outputs.append(self.fold_tokens(own, states, batch.rows[:num], batch.positions[:num]))
        if pieces is not None:
            own, copies = [one[num:] for one in inputs], batch.states.copies(self.index)
            saves = pieces.saves(batch.states.group(self.index))
            outputs.append(self.fold_requests(own, states, copies, pieces, saves))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @abstractmethod
    def fold_tokens(self, inputs: Sequence[Tensor], states: States, rows: Tensor, positions: Tensor) -> Tensor:
        """Fold a token of each request.

        Args:
            inputs: `[n, …]` each.
            states: Read and written in place, in these rows.
            rows: `[n]` int64.
            positions: `[n]` int64.

        Returns:
            `[n, …]`.
        """

    @abstractmethod
    def fold_requests(
        self, inputs: Sequence[Tensor], states: States, copies: States, pieces: Pieces, saves: Tensor
    ) -> Tensor:
        """Fold tokens of requests, in order, and take the copies that are asked for.

        Args:
            inputs: `[T', …]` each, the tokens that `pieces.starts` counts.
            states: Read and written in place, in the rows of `pieces`.
            copies: What is copied is written there.
            pieces: The requests.
            saves: `[C]` which copy to take behind each piece; -1: none.

        Returns:
            `[T', …]`.
        """
