"""What models share whose layers fold tokens into states by kernels of their own: taps, heads' numbers, the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext, Part
from dovetail.sdk.layers.base import Slot
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.mixer import Mixer
from dovetail.sdk.layers.rotary import CosSin
from dovetail_models.llama import DenseDecoder


def check_silu(config: ModelConfig) -> None:
    """Check the activation where one key says it of MLPs and of short convolutions, which know SiLU only.

    Raises:
        ModelError: It is another one.
    """
    if config.hidden_act not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act is {config.hidden_act!r}; possible: silu")


class ConvTaps(Matrix):
    """Weight of a convolution over time, `[P, K]`, and if it has one its bias `[P]`; checkpoints have `[P, 1, K]`.

    Args:
        taps: K.
        parts: The channels, in the order in which they are convolved.
        ctx: Device, dtype, rank and path.
        bias: Whether there is one.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, taps: int, parts: Sequence[Part], ctx: BuildContext, *, bias: bool = False) -> None:
        super().__init__(ctx, ctx.path, taps, parts, "out")
        self.store("weight", ctx.dtype)
        if bias:
            self.store("bias", ctx.dtype, granule=None)
        else:
            self.bias = None

    def slots(self) -> dict[Slot, tuple[int, ...]]:
        return {
            slot: (shape[0], 1, *shape[1:]) if slot.tensor == "weight" else shape
            for slot, shape in super().slots().items()
        }

    def place(self, slot: Slot, tensor: Tensor) -> Tensor | None:
        return super().place(slot, tensor.flatten(1) if slot.tensor == "weight" else tensor)


class HeadNumbers(Matrix):
    """A number for each head `[N]`, float32; `unit` heads stay together."""

    suffixes = {"weight": ("",)}  # noqa: RUF012 - as the base declares it
    weight: Tensor

    def __init__(self, num: int, unit: int, ctx: BuildContext) -> None:
        super().__init__(ctx, ctx.path, 1, (Part("", num, unit),), "out")
        self.store("weight", torch.float32, granule=None)


class FoldingDecoder(DenseDecoder):
    """A decoder some of whose layers have a `Mixer` in place of attention."""

    def given(self, ropes: list[CosSin], batch: ForwardBatch) -> Sequence[Any]:
        """See `DenseDecoder.given`: mixers are given pieces of the batch."""
        mixers = [layer.attention if isinstance(layer.attention, Mixer) else None for layer in self.layers]
        pieces = next((mixer.pieces(batch) for mixer in mixers if mixer is not None), None)
        return [rope if mixer is None else pieces for mixer, rope in zip(mixers, ropes, strict=True)]
