"""The forms in which matrices stay packed: built-in quantisations bring what they read into one of these.

Every checkpoint of a kind of numbers becomes one form, whatever tool wrote it, so a kernel is written once for each:

- `Scaled`: int8 or float8 `weight` `[N, K]`, `weight_scale` float32 `[N, K / group]`; the number is `weight * scale`.
- `Int4`: `weight_packed` int32 `[N, K / 8]`, `weight_scale` `[N, K / group]` in the checkpoint's dtype, `weight_zero`
  uint8 `[N, K / group]`, or none where it is 8 everywhere; the number is `(nibble - zero) * scale`. Rows lie along K,
  so a lane that reads 16 bytes has 32 neighbouring inputs of one row, which share a scale for groups from 32 on. In a
  word, bits `4 i` to `4 i + 3` hold the input `ORDER[i]` of eight: one shift and one mask give two neighbours in the
  two halves of a word, ready for packed 16-bit arithmetic.
- `Mxfp4`: `weight_packed` uint8 `[N, K / 2]`, the lower nibble first, and `weight_scale` uint8 `[N, K / 32]`; the
  number is `E2M1[nibble] * 2 ** (scale - 127)`.

N outputs, K inputs, E experts: the tensors of experts have `[E]` before these axes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.contracts.device import is_on_host
from dovetail.sdk.quantization.scratch import SCRATCH
from dovetail.sdk.quantization.words import nibbles_of, words_of

CHUNK, LONE_CHUNK = 30_000, 262_144
"""Numbers that are computed at a time: below the 32,768 from which torch has threads wait for each other, or, where a
thread computes alone, as many as stay in a core's cache."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What a nibble of 4-bit floating point stands for."""
MX_GROUP = 32


class Form(ABC):
    """One way to keep a matrix packed."""

    @abstractmethod
    def tensors(self, in_features: int) -> dict[str, tuple[torch.dtype, int]]:
        """Return dtype and inputs a column of each tensor."""

    def fits(self, in_features: int) -> bool:
        """Whether a checkpoint's matrix of `in_features` inputs stays packed."""
        return True

    @abstractmethod
    def dequantise(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the matrix `[…, N, K]` that tensors stand for, rounded to `dtype` once: the reference."""

    @abstractmethod
    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a matrix `[…, N, K]`, K divisible by the group."""


@dataclass(frozen=True, slots=True)
class Scaled(Form):
    """Numbers of 8 bits; `group` inputs share a scale, None: all of a row.

    Attributes:
        dtype: Of the numbers, int8 or float8.
        group: See above.
        activations: What a product of many rows may round its rows to, each row, or each `group` of its inputs, with a
            scale of its own; None: rows keep the model's dtype. It changes nothing about weights.
    """

    dtype: torch.dtype = torch.int8
    group: int | None = None
    activations: torch.dtype | None = None

    def tensors(self, in_features: int) -> dict[str, tuple[torch.dtype, int]]:
        return {"weight": (self.dtype, 1), "weight_scale": (torch.float32, self.group or in_features)}

    def fits(self, in_features: int) -> bool:
        return self.group is None or in_features % self.group == 0

    def dequantise(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        weight, scale = tensors["weight"], tensors["weight_scale"]
        group, flat, scales = self.group or weight.shape[-1], weight.flatten(0, -2), scale.flatten(0, -2)
        made = by_rows(lambda rows: scaled(wide(flat[rows]), scales[rows], group), flat, flat.shape[-1], dtype)
        return made.view(weight.shape)

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        def make(rows: slice) -> tuple[Tensor, ...]:
            grouped = in_groups(weight[rows].to(torch.float32, copy=True), self.group or weight.shape[-1])
            scale = torch.maximum(grouped.amax(-1), -grouped.amin(-1)) / self.most
            return self._rounded(grouped, scale), scale

        return dict(zip(("weight", "weight_scale"), in_chunks(make, weight, weight.shape[-1]), strict=True))

    @property
    def most(self) -> float:
        """The largest number."""
        return 127.0 if self.dtype == torch.int8 else torch.finfo(self.dtype).max

    def numbers(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Return the numbers that with a scale come nearest to a weight."""

        def make(rows: slice) -> tuple[Tensor]:
            grouped = in_groups(weight[rows].to(torch.float32, copy=True), self.group or weight.shape[-1])
            return (self._rounded(grouped, scale[rows].float()),)

        return in_chunks(make, weight, weight.shape[-1])[0]

    def _rounded(self, grouped: Tensor, scale: Tensor) -> Tensor:
        """Return numbers for float32 `[…, K / group, group]`, which this overwrites: each step is one pass."""
        numbers = grouped.div_(nonzero(scale)[..., None]).clamp_(-self.most, self.most)
        return (numbers.round_() if self.dtype == torch.int8 else numbers).to(self.dtype).flatten(-2)


@dataclass(frozen=True, slots=True)
class Int4(Form):
    """Numbers of 4 bits; `group` inputs share a scale, None: all of a row."""

    group: int | None = 128
    scale_dtype: torch.dtype = torch.bfloat16
    has_zero: bool = False

    def tensors(self, in_features: int) -> dict[str, tuple[torch.dtype, int]]:
        group = self.group or in_features
        zero = {"weight_zero": (torch.uint8, group)} if self.has_zero else {}
        return {"weight_packed": (torch.int32, 8), "weight_scale": (self.scale_dtype, group), **zero}

    def dequantise(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        words, scale = (tensors[name].flatten(0, -2) for name in ("weight_packed", "weight_scale"))
        zero = tensors["weight_zero"].flatten(0, -2) if "weight_zero" in tensors else None

        def make(rows: slice) -> Tensor:
            zeros = None if zero is None else zero[rows]
            return affine(nibbles_of(words[rows]).float(), scale[rows], zeros, self.group)

        made = by_rows(make, words, 8 * words.shape[-1], dtype)
        return made.view(*tensors["weight_packed"].shape[:-1], -1)

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        def make(rows: slice) -> tuple[Tensor, ...]:
            grouped = in_groups(weight[rows].to(torch.float32, copy=True), self.group or weight.shape[-1])
            low, high = grouped.amin(-1), grouped.amax(-1)
            most = torch.where(high > -low, high, low)
            scale = (most / -8).to(self.scale_dtype)  # the largest number becomes -8, of which there is one more
            nibbles = grouped.div_(nonzero(scale.float())[..., None]).round_().clamp_(-8, 7).add_(8)
            return words_of(nibbles.to(torch.int8).flatten(-2)), scale

        words, scale = in_chunks(make, weight, weight.shape[-1])
        found = {"weight_packed": words, "weight_scale": scale}
        zero = {"weight_zero": torch.full_like(scale, 8, dtype=torch.uint8)} if self.has_zero else {}
        return found | zero


@dataclass(frozen=True, slots=True)
class Mxfp4(Form):
    """4-bit floating point with a power of two for every 32 inputs."""

    def tensors(self, in_features: int) -> dict[str, tuple[torch.dtype, int]]:
        return {"weight_packed": (torch.uint8, 2), "weight_scale": (torch.uint8, MX_GROUP)}

    def dequantise(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed, scale = tensors["weight_packed"], exponents(tensors["weight_scale"]).flatten(0, -2)
        flat, width = packed.flatten(0, -2), 2 * packed.shape[-1]
        made = by_rows(lambda rows: scaled(e2m1(flat[rows]), scale[rows], MX_GROUP), flat, width, dtype)
        return made.view(*packed.shape[:-1], width)

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        grouped = in_groups(weight.float(), MX_GROUP)
        powers = grouped.abs().amax(-1).clamp_min(2.0**-100).log2().floor() - 2  # 6 is 1.5 times 2 ** 2
        table = torch.tensor(E2M1, device=weight.device)
        numbers = grouped / powers.exp2()[..., None]
        nibbles = (numbers[..., None] - table).abs().argmin(-1).to(torch.uint8).flatten(-2)
        packed = nibbles[..., ::2] | (nibbles[..., 1::2] << 4)
        return {"weight_packed": packed, "weight_scale": (powers + 127).clamp(0, 254).to(torch.uint8)}


def in_groups(numbers: Tensor, size: int) -> Tensor:
    """Return numbers `[…, K]` as `[…, K / size, size]`."""
    return numbers.reshape(*numbers.shape[:-1], -1, size)


def nonzero(scale: Tensor) -> Tensor:
    """Return scales to divide by: 1 where a scale is 0, as all that it stands for is."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def spread(scale: Tensor, group: int, width: int) -> Tensor:
    """Return scales `[…, N, ceil(K / group)]` for numbers `[…, N, K]`, whose last groups may be shorter."""
    return scale.repeat_interleave(group, dim=-1)[..., :width]


def scaled(numbers: Tensor, scale: Tensor, group: int) -> Tensor:
    """Multiply float32 numbers `[…, N, K]` by the scale `[…, N, ceil(K / group)]` of their group, in place."""
    width = numbers.shape[-1]
    if scale.shape[-1] == 1:
        return numbers.mul_(scale)
    if width % group:
        return numbers.mul_(spread(scale, group, width))
    in_groups(numbers, group).mul_(scale[..., None])
    return numbers


def chunk() -> int:
    """Return how many numbers are computed at a time."""
    return LONE_CHUNK if torch.get_num_threads() == 1 else CHUNK


def by_rows(make: Callable[[slice], Tensor], like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return what `make` gives for rows of a matrix, rounded to `dtype`; see `in_chunks`."""
    return in_chunks(lambda rows: (make(rows),), like, width, dtype)[0]


def in_chunks(
    make: Callable[[slice], tuple[Tensor, ...]], like: Tensor, width: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Return what `make` gives for all rows of a matrix: a few at a time stay in the processor's cache.

    Args:
        make: Makes tensors of some rows, each `[rows, …]`.
        like: Numbers, or bytes, of the matrix; those of experts are made at once.
        width: Numbers of a row.
        dtype: Of the results; None: as they are made.
    """
    step = max(1, chunk() // max(1, width)) | 1  # rows turned to columns: see `words.slices`
    num = like.shape[0]
    if like.dim() != 2 or not is_on_host(like.device) or num <= step:
        return tuple(each if dtype is None else each.to(dtype) for each in make(slice(None)))
    first = make(slice(step))
    out = tuple(SCRATCH.empty((num, *each.shape[1:]), dtype or each.dtype, each.device) for each in first)
    for whole, part in zip(out, first, strict=True):
        whole[:step] = part
    for start in range(step, num, step):
        rows = slice(start, start + step)
        for whole, part in zip(out, make(rows), strict=True):
            whole[rows] = part
    return out


def affine(nibbles: Tensor, scale: Tensor, zero: Tensor | None, group: int | None) -> Tensor:
    """Return float32 `(nibbles - zero) * scale`, zero 8 where there is none; computed in place."""
    width = nibbles.shape[-1]
    size = group or width
    if zero is None:
        nibbles.sub_(8)
    elif width % size:
        nibbles.sub_(spread(zero.float(), size, width))
    else:
        in_groups(nibbles, size).sub_(zero.float()[..., None])
    return scaled(nibbles, scale.float(), size)


def wide(numbers: Tensor) -> Tensor:
    """Return numbers of 8 bits in float32.

    On CPU torch converts e4m3 one by one. Its bits are those of a float16 that is 256 times smaller, subnormals too,
    which the processor converts; only NaN, which float16 has elsewhere, is not in it.
    """
    if numbers.dtype != torch.float8_e4m3fn or not is_on_host(numbers.device):
        return numbers.float()
    signed = numbers.view(torch.int8)
    if numbers.numel() and int((signed & 127).amax()) == 127:
        return numbers.float()
    halves = (signed.to(torch.int16) << 7) & ~0x4000  # the sign is there twice: once extended
    return halves.view(torch.float16).float().mul_(256)


def e2m1(packed: Tensor) -> Tensor:
    """Return the float32 numbers `[…, K]` of 4-bit floating point `[…, K / 2]` uint8, the lower nibble first."""
    return looked_up(packed, pairs_of(torch.tensor(E2M1, device=packed.device)))


def pairs_of(table: Tensor, *, high_first: bool = False) -> Tensor:
    """Return what every byte stands for of which each nibble stands for one of 16 numbers of 32 bits: two, as one."""
    low, high = table.expand(16, 16), table[:, None].expand(16, 16)
    return torch.stack((high, low) if high_first else (low, high), -1).view(torch.int64).flatten()


def looked_up(packed: Tensor, pairs: Tensor) -> Tensor:
    """Return float32 `[…, 2 n]` of bytes `[…, n]`, see `pairs_of`: of all lookups, of one axis is the fastest."""
    found = torch.index_select(pairs, 0, packed.flatten().to(torch.int32))
    return found.view(torch.float32).view(*packed.shape[:-1], -1)


def exponents(scale: Tensor) -> Tensor:
    """Return the powers of two, float32, that bytes stand for: `2 ** (byte - 127)`."""
    return torch.exp2(scale.float() - 127)
