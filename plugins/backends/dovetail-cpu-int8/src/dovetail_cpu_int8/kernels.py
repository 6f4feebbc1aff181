"""The kernels: they hand tensors to the library.

Every number of a row becomes a whole one of 16 bits, whose two bytes are multiplied by the weight's. Sums are whole
numbers, so a row's bits depend neither on other rows nor on the processor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts import Ask
from dovetail.sdk.quantization.forms import Form, Scaled
from dovetail_cpu_int8.library import Matrix, parallel, paths

MOST = 127 * 256
"""What the largest number of a row becomes."""
SHIFT = 128
"""What is added to each byte of a number, so that it has no sign."""


def is_int8(form: Form) -> bool:
    """Whether a form has int8 with a scale per output."""
    return isinstance(form, Scaled) and form.dtype == torch.int8 and form.group is None


def with_neighbours(ask: Ask, operands: Sequence[Any]) -> list[Any]:
    """Return operands of a trial with a norm, and with a residual where the operation takes one."""
    x, _, *rest = operands
    if ask.op == "packed_norm_linear":
        rest[-1] = torch.randn(len(x), ask.dim("N")).to(x.dtype)
    return [x, torch.rand(x.shape[1]).to(x.dtype), *rest]


class Packed:
    """A matrix as it is stored, with what a call adds to it.

    Args:
        weight: `[N, K]` int8.
        scale: `[N, 1]`.
    """

    __slots__ = ("_held", "address", "num_in", "num_out")

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        weight, scale = weight.contiguous(), (scale[:, 0].float() / MOST).contiguous()
        zero = weight.sum(1, dtype=torch.int32).mul_(SHIFT)
        self.num_out, self.num_in = weight.shape
        matrix = Matrix(*(each.data_ptr() for each in (weight, scale, zero)), *weight.shape)
        self.address, self._held = ctypes.addressof(matrix), (matrix, weight, scale, zero)


class _Product:
    """What the operations share.

    Args:
        path: The library's number of the instructions to use.
    """

    is_gated = 0

    def __init__(self, path: int) -> None:
        run = paths().run
        assert run is not None  # noqa: S101 - the set claims nothing without it
        self._run: Callable[..., int] = run
        self._parallel, self._path = parallel(), path

    def keeps(self, half: str = "") -> bool:
        """See `PackedKernel.keeps`: it reads the weight as it is."""
        return True

    def pack(self, tensors: Mapping[str, Tensor], half: str = "") -> Packed:
        """See `PackedKernel.pack`."""
        return Packed(tensors["weight"], tensors["weight_scale"])

    def compute(
        self, x: Tensor, norm: Tensor | None, eps: float, weight: Packed, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """`norm(x) Wᵀ + b + residual`, or SiLU of its first half times the second.

        Raises:
            ValueError: Rows have another width than the weight, or an operand another dtype than bfloat16.
            MemoryError: There is no memory for the bytes of a block of rows.
        """
        if x.shape[1] != weight.num_in:  # the library would read beyond them
            raise ValueError(f"rows of {x.shape[1]} numbers and a weight of {weight.num_in} inputs")
        for each in (x, norm, bias, residual):  # the library would take their bits for bfloat16
            if each is not None and each.dtype is not torch.bfloat16:
                raise ValueError(f"operands of cpu-int8 are bfloat16, and one is {each.dtype}: convert it first")
        if x.stride(1) != 1:
            x = x.contiguous()
        if residual is not None and residual.stride(1) != 1:
            residual = residual.contiguous()
        rows = len(x)
        y = x.new_empty(rows, weight.num_out >> self.is_gated)
        failed = self._run(
            weight.address, x.data_ptr(), x.stride(0), rows,
            None if norm is None else norm.data_ptr(), eps, None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(), 0 if residual is None else residual.stride(0),
            y.data_ptr(), self.is_gated, self._parallel, torch.get_num_threads(), self._path,
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for the bytes of {rows} rows of {x.shape[1]} numbers")
        return y


class Linear(_Product):
    """The operation `packed_linear`."""

    def __call__(self, x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
        """`x Wᵀ + b`."""
        return self.compute(x, None, 0.0, weight, bias, None)


class NormLinear(_Product):
    """The operation `packed_norm_linear`."""

    def __call__(
        self, x: Tensor, norm: Tensor | None, eps: float, weight: Packed, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """`norm(x) Wᵀ + b + residual`."""
        return self.compute(x, norm, eps, weight, bias, residual)


class NormGate(_Product):
    """The operation `packed_norm_gate`."""

    is_gated = 1

    def __call__(self, x: Tensor, norm: Tensor | None, eps: float, weight: Packed, bias: Tensor | None) -> Tensor:
        """`silu_and_mul(norm(x) Wᵀ + b)`."""
        return self.compute(x, norm, eps, weight, bias, None)


OPS: Mapping[str, Callable[[int], Any]] = {
    "packed_linear": Linear,
    "packed_norm_linear": NormLinear,
    "packed_norm_gate": NormGate,
}
