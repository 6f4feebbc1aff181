"""Products over packed matrices that torch has on CPU: operations `packed_linear` and `packed_experts`.

T tokens, N outputs, K inputs.

A row's result does not depend on T.

Int8 is multiplied by oneDNN's product of bytes where the processor has instructions for it. Each row becomes two rows
of bytes, which stand for 16 bits of each number, so that activations are not quantised: sums are of whole numbers, and
the error is below that of bfloat16. In float32, and on other processors, torch's own product is used, as it is for
int4: sums are float32, and scales are rounded to the model's dtype, as written-out weights would be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.sdk.layers.ops.invariant import at_once, in_blocks
from dovetail.sdk.layers.ops.mixture import EachPacked
from dovetail.sdk.layers.ops.reference import Unary
from dovetail.sdk.quantization.forms import Form, Int4, Scaled
from dovetail.sdk.quantization.words import exchange, nibbles_of, slices

Product = Callable[[Tensor], Tensor]
"""Maps `[T, K]` to `[T, N]`."""
GROUPS = (256, 128, 64, 32)
"""Inputs for which torch's int4 product has a scale."""
ROWS = 16
"""Its rows come in such blocks."""
BLOCK = 64
"""Rows that its layout mixes with each other, at most."""
VECTOR = 16
"""Inputs that torch's int8 product takes at a time in bfloat16: it reads beyond a row that is no multiple of them, and
computes with what stands there, or crashes. In float32 it has an end for such rows."""
BYTE, ZERO = 256, 128
"""Between the two bytes of a number, and what stands for zero in each."""
MOST = 127 * BYTE
"""What the largest number of a row becomes: rounded, both bytes are within their bounds."""
LEAST = 1e-30
"""The largest number of a row counts as no less, so that rows of zeros are divided."""
PAD = 16
"""Words between rows that will be columns: apart by a power of two, they would have the same few places of a cache."""


def fits(form: Form | None, num_in: int) -> bool:
    """Whether torch has a product of matrices of a form and so many inputs; of others, they are written out."""
    if isinstance(form, Scaled):
        return form.dtype == torch.int8 and form.group is None
    return isinstance(form, Int4) and _group(form.group or num_in) is not None


def _group(width: int) -> int | None:
    """Return for how many of `width` inputs with one scale torch's int4 product has one."""
    return next((size for size in GROUPS if width % size == 0), None)


def stays(form: Form | None, dtype: torch.dtype) -> bool:
    """Whether the product of a matrix that `fits` reads its tensors as they are."""
    return isinstance(form, Scaled) and not takes_bytes(dtype)


def product_of(form: Form, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Product:
    """Return the product of a matrix that `fits`."""
    if isinstance(form, Scaled):
        return int8(tensors["weight"], tensors["weight_scale"], dtype)
    return int4(tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero"), dtype)


class CpuPacked:
    """The operation `packed_linear` over a matrix that `fits`."""

    def __init__(self, form: Form, dtype: torch.dtype) -> None:
        self._form, self._dtype = form, dtype

    def keeps(self, half: str = "") -> bool:
        """See `PackedKernel.keeps`: torch's own product takes int8 as it is."""
        return stays(self._form, self._dtype)

    def pack(self, tensors: Mapping[str, Tensor], half: str = "") -> Product:
        """See `PackedKernel.pack`."""
        return product_of(self._form, tensors, self._dtype)

    def __call__(self, x: Tensor, weight: Product, bias: Tensor | None) -> Tensor:
        """`x Wᵀ + b`."""
        y = weight(x)
        return y if bias is None else y + bias


class CpuPackedExperts(EachPacked):
    """The operation `packed_experts`; of matrices that do not fit, each expert's is written out."""

    def __init__(
        self, gate: Unary, widths: Mapping[str, int], dtype: torch.dtype, is_invariant: bool, **options: Any
    ) -> None:
        super().__init__(gate, **options)
        self._dtype, self._apply = dtype, in_blocks if is_invariant else at_once
        self._fits = {half: fits(form, widths[half]) for half, form in self.forms.items()}

    def keeps(self, half: str = "") -> bool:
        """See `PackedKernel.keeps`."""
        return not self._fits[half] or stays(self.forms[half], self._dtype)

    def pack(self, tensors: Mapping[str, Tensor], half: str = "") -> Any:
        """See `PackedKernel.pack`: a product for each expert."""
        form = self.forms[half]
        if form is None or not self._fits[half]:
            return tensors
        num = len(next(iter(tensors.values())))
        return [product_of(form, {name: one[at] for name, one in tensors.items()}, self._dtype) for at in range(num)]

    def num(self, weight: Any) -> int:
        """See `EachPacked.num`."""
        return len(weight) if isinstance(weight, list) else super().num(weight)

    def product(self, x: Tensor, weight: Any, bias: Tensor | None, one: int, half: str) -> Tensor:
        """See `EachPacked.product`."""
        if not isinstance(weight, list):
            multiply = super().product
            return self._apply(x, lambda rows: multiply(rows, weight, bias, one, half))
        y: Tensor = weight[one](x)
        return y if bias is None else y + bias[one]


def takes_bytes(dtype: torch.dtype) -> bool:
    """Whether int8 is multiplied by bytes. Without the instructions for it, sums of two products would overflow."""
    return dtype != torch.float32 and torch.cpu._is_vnni_supported() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def int8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Product:
    """Return the product of `weight` `[N, K]` int8 and `scale` `[N, 1]`.

    It keeps a packed copy where it `takes_bytes`, else `weight` itself.
    """
    if takes_bytes(dtype):
        return int8_by_bytes(weight, scale, dtype)
    scales = scale[:, 0].to(dtype)
    if dtype == torch.bfloat16 and weight.shape[1] % VECTOR:
        wide = scales.float()
        return lambda x: torch._weight_int8pack_mm(x.float().contiguous(), weight, wide).to(dtype)

    def product(x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x.contiguous(), weight, scales)

    return product


def int8_by_bytes(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Product:
    """Return the product of `weight` `[N, K]` int8 and `scale` `[N, 1]` in oneDNN's layout, with rows as bytes."""
    multiply = torch.ops.onednn.qlinear_pointwise
    packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), [2, weight.shape[1]])
    scales, zeros = scale[:, 0].float() / MOST, torch.zeros(len(weight), dtype=torch.int64)

    def product(x: Tensor) -> Tensor:
        num = len(x)
        both, most = as_bytes(x)
        y = multiply(both, 1.0, ZERO, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        return torch.add(y[:num], y[num:], alpha=BYTE).mul_(most).to(dtype)

    return product


def as_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as whole numbers of 16 bits.

    Args:
        x: `[T, K]`.

    Returns:
        `[2 T, K]` uint8: the lower bytes of all rows, then the upper ones, `ZERO` added to each; and the largest number
        of each row, `[T, 1]` float32, which became `MOST`. A row that is not finite has a largest number that is not.
    """
    num = len(x)
    most = x.abs().amax(-1, keepdim=True).float().clamp_min_(LEAST)
    # Shifted so that all are above zero: then conversion rounds down, and a shift yields the upper byte.
    whole = x.float().mul_(MOST / most).add_(ZERO * BYTE + ZERO + 0.5).to(torch.int32)
    both = x.new_empty(2 * num, x.shape[1], dtype=torch.uint8)
    both[:num].copy_(whole)  # the lowest byte
    both[num:].copy_(whole.bitwise_right_shift_(8))
    return both, most


def int4(words: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Product:
    """Return the product of `(nibbles - zero) * scale`. It keeps a packed copy.

    Args:
        words: `[N, K / 8]` int32, as `Int4` has them.
        scale: `[N, K / group]`.
        zero: `[N, K / group]` uint8; None: 8 everywhere.
        dtype: The model's.

    Raises:
        ValueError: There is no product for such groups.
    """
    num_out, num_in = words.shape[0], 8 * words.shape[1]
    width = num_in // scale.shape[-1]
    group = _group(width)
    if group is None:
        raise ValueError(f"groups of {width} inputs; torch's int4 product has scales of multiples of {GROUPS[-1]}")
    scales = scale.to(dtype).repeat_interleave(width // group, dim=-1)
    offsets = torch.zeros_like(scales)
    if zero is not None:
        offset = (8 - zero.float()) * scale.float()  # torch adds an offset where formats take off a zero point
        offsets = offset.to(dtype).repeat_interleave(width // group, dim=-1)
    both = F.pad(torch.stack((scales.T, offsets.T), -1), (0, 0, 0, -num_out % ROWS)).contiguous()
    packed = int4_blocks(words)

    def product(x: Tensor) -> Tensor:
        return torch._weight_int4pack_mm_for_cpu(x.contiguous(), packed, group, both)[:, :num_out]

    return product


@lru_cache(maxsize=1)
def pairs_of_rows() -> bool:
    """Whether torch's layout, which depends on the processor, puts rows `i` and `i + 32` of 64 into a byte.

    Then we make it, in a fifth of the time: torch wants 32 bits for each nibble, and packs them one by one.
    """
    rows = torch.randint(0, 16, (BLOCK, BLOCK), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    pairs = (rows[: BLOCK // 2] | (rows[BLOCK // 2 :] << 4)).to(torch.uint8)
    return torch.equal(torch._convert_weight_to_int4pack_for_cpu(rows, 1).flatten(), pairs.T.flatten())


def int4_blocks(words: Tensor) -> Tensor:
    """Return torch's layout of nibbles, of some blocks of rows at a time."""
    num_out, width = words.shape
    out = words.new_empty(num_out + -num_out % ROWS, 4 * width, dtype=torch.uint8)
    whole = num_out - num_out % BLOCK if pairs_of_rows() else 0
    for rows in slices(whole, width, words.device, BLOCK):
        _in_pairs(words[rows], out[rows])
    for part in slices(num_out - whole, 8 * width, words.device, BLOCK):
        rows = slice(whole + part.start, whole + part.stop)
        nibbles = nibbles_of(words[rows]).to(torch.int32)  # torch wants 32 bits for each
        padded = F.pad(nibbles, (0, 0, 0, -nibbles.shape[0] % ROWS)) if nibbles.shape[0] % ROWS else nibbles
        out[rows.start : rows.start + len(padded)] = torch._convert_weight_to_int4pack_for_cpu(padded, 1)
    return out


def _in_pairs(words: Tensor, out: Tensor) -> None:
    """Write blocks of 64 rows, of which each byte has rows `i` and `i + 32` of one input, input after input.

    First nibbles change places in the two words of such rows: one of them has inputs 0, 4, 1, 5 in its bytes then, the
    other one 2, 6, 3, 7. Then bytes do in the words of four neighbouring rows: each has four rows of one input.
    """
    blocks, width = words.shape[0] // BLOCK, words.shape[1]
    rows = words.view(blocks, 2, 8, 2, 2, width).permute(0, 4, 1, 3, 2, 5)  # lower bit, half, upper bit, fours
    turned = words.new_empty(blocks * BLOCK, width + PAD)[:, :width]
    each = turned.view(rows.shape).copy_(rows)
    exchange(each, 2, 4)
    exchange(each, 3, 16)
    exchange(each, 1, 8)
    out.view(torch.int32).view(blocks, width, BLOCK).copy_(turned.view(blocks, BLOCK, width).transpose(1, 2))
