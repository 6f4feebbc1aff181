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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight inputs each nibble of an `Int4` word holds, from the lowest."""
CHUNK = 30_000
"""Numbers that are computed at a time: below the 32,768 from which torch has threads wait for each other."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What a nibble of 4-bit floating point stands for."""
MX_GROUP = 32
KEPT = {"int8": ("cpu", "cuda"), "int4": ("cpu", "cuda"), "float8_e4m3fn": ("cuda",), "mxfp4": ("cuda",)}
"""On which devices numbers of a checkpoint stay packed; elsewhere they are written out while they are read, because a
product would have to write them out each time."""
FP8_GROUP = 128
"""Of float8 on CUDA, scales must be for as many inputs, a multiple of them, or whole rows."""


def stays_packed(numbers: str, device: str, group: int | None = None) -> bool:
    """Whether a checkpoint's numbers stay packed on a device.

    Args:
        numbers: `int8`, `int4`, `float8_e4m3fn` or `mxfp4`.
        device: `cpu` or `cuda`.
        group: Inputs that share a scale; None: all of a row.
    """
    if device not in KEPT[numbers] or device != "cuda" or numbers in ("int8", "int4"):
        return device in KEPT[numbers]
    is_old = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9
    return not is_old and (numbers == "mxfp4" or group is None or group % FP8_GROUP == 0)


class Form(ABC):
    """One way to keep a matrix packed."""

    @abstractmethod
    def tensors(self, in_features: int) -> dict[str, tuple[torch.dtype, int]]:
        """Return dtype and inputs a column of each tensor."""

    @abstractmethod
    def dequantise(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the matrix `[…, N, K]` that tensors stand for, rounded to `dtype` once: the reference."""

    @abstractmethod
    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a matrix `[…, N, K]`, K divisible by the group."""


@dataclass(frozen=True, slots=True)
class Scaled(Form):
    """Numbers of 8 bits; `group` inputs share a scale, None: all of a row."""

    dtype: torch.dtype = torch.int8
    group: int | None = None

    def tensors(self, in_features: int) -> dict[str, tuple[torch.dtype, int]]:
        return {"weight": (self.dtype, 1), "weight_scale": (torch.float32, self.group or in_features)}

    def dequantise(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        weight, scale = tensors["weight"], tensors["weight_scale"]
        group = self.group or weight.shape[-1]
        return by_rows(lambda rows: spread(weight[rows].float(), scale[rows], group), weight, weight.shape[-1], dtype)

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        grouped = in_groups(weight.float(), self.group or weight.shape[-1])
        scale = grouped.abs().amax(-1) / self.most
        return {"weight": self.numbers(weight, scale), "weight_scale": scale}

    @property
    def most(self) -> float:
        """The largest number."""
        return 127.0 if self.dtype == torch.int8 else torch.finfo(self.dtype).max

    def numbers(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Return the numbers that with a scale come nearest to a weight."""
        grouped = in_groups(weight.float(), self.group or weight.shape[-1])
        numbers = (grouped / nonzero(scale.float())[..., None]).clamp(-self.most, self.most)
        return (numbers.round() if self.dtype == torch.int8 else numbers).to(self.dtype).flatten(-2)


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
        words, scale, zero = tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero")

        def make(rows: slice) -> Tensor:
            zeros = None if zero is None else zero[rows]
            return affine(nibbles_of(words[rows]).float(), scale[rows], zeros, self.group)

        return by_rows(make, words, 8 * words.shape[-1], dtype)

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        grouped = in_groups(weight.float(), self.group or weight.shape[-1])
        high, low = grouped.amax(-1), grouped.amin(-1)
        most = torch.where(high > -low, high, low)
        scale = (most / -8).to(self.scale_dtype)  # the largest number becomes -8, of which there is one more
        nibbles = (grouped / nonzero(scale.float())[..., None]).round().clamp(-8, 7) + 8
        found = {"weight_packed": words_of(nibbles.to(torch.uint8).flatten(-2)), "weight_scale": scale}
        zero = {"weight_zero": torch.full_like(scale, 8, dtype=torch.uint8)} if self.has_zero else {}
        return found | zero


@dataclass(frozen=True, slots=True)
class Mxfp4(Form):
    """4-bit floating point with a power of two for every 32 inputs."""

    def tensors(self, in_features: int) -> dict[str, tuple[torch.dtype, int]]:
        return {"weight_packed": (torch.uint8, 2), "weight_scale": (torch.uint8, MX_GROUP)}

    def dequantise(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed, scale = tensors["weight_packed"], exponents(tensors["weight_scale"])
        return by_rows(
            lambda rows: spread(e2m1(packed[rows]), scale[rows], MX_GROUP), packed, 2 * packed.shape[-1], dtype
        )

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


def spread(numbers: Tensor, scale: Tensor, group: int) -> Tensor:
    """Multiply numbers `[…, N, K]` by the scale `[…, N, ceil(K / group)]` of their group."""
    if scale.shape[-1] == 1:
        return numbers * scale
    if numbers.shape[-1] % group == 0:
        return (in_groups(numbers, group) * scale[..., None]).view(numbers.shape)
    return numbers * scale.repeat_interleave(group, dim=-1)[..., : numbers.shape[-1]]


def by_rows(make: Callable[[slice], Tensor], like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return what `make` gives for rows of a matrix, rounded to `dtype`: a few at a time stay in the processor's cache.

    Args:
        make: Makes float32 rows.
        like: Numbers, or bytes, of the matrix; those of experts are made at once.
        width: K.
        dtype: Of the result.
    """
    step = max(1, CHUNK // max(1, width))
    if like.dim() != 2 or like.device.type != "cpu" or like.shape[0] <= step:
        return make(slice(None)).to(dtype)
    first = make(slice(step)).to(dtype)
    out = first.new_empty(like.shape[0], width)
    out[:step] = first
    for start in range(step, like.shape[0], step):
        out[start : start + step] = make(slice(start, start + step))
    return out


def affine(nibbles: Tensor, scale: Tensor, zero: Tensor | None, group: int | None) -> Tensor:
    """Return `(nibbles - zero) * scale` in float32, zero 8 where there is none."""
    width = group or nibbles.shape[-1]
    if zero is None:
        return spread(nibbles - 8, scale.float(), width)
    return spread(nibbles - spread(torch.ones_like(nibbles), zero.float(), width), scale.float(), width)


def words_of(nibbles: Tensor) -> Tensor:
    """Pack nibbles uint8 `[…, K]` into words int32 `[…, K / 8]`, in `ORDER`."""
    eight = in_groups(nibbles, 8)
    words = torch.zeros_like(eight[..., 0], dtype=torch.int32)
    for place, index in enumerate(ORDER):
        words |= eight[..., index].to(torch.int32) << (4 * place)
    return words


def nibbles_of(words: Tensor, order: Sequence[int] = ORDER) -> Tensor:
    """Return the nibbles int32 `[…, K]` of words int32 `[…, K / 8]`; place i holds number `order[i]` of eight."""
    shifts = torch.tensor([4 * order.index(index) for index in range(8)], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).flatten(-2)


def reordered(words: Tensor) -> Tensor:
    """Return words in `ORDER` of words that hold the first of eight in the lowest bits."""
    found = torch.zeros_like(words)
    for place, index in enumerate(ORDER):
        found |= ((words >> (4 * index)) & 15) << (4 * place)
    return found


def e2m1(packed: Tensor) -> Tensor:
    """Return the float32 numbers `[…, K]` of 4-bit floating point `[…, K / 2]` uint8, the lower nibble first."""
    pairs = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return torch.tensor(E2M1, device=packed.device)[pairs.int()]


def exponents(scale: Tensor) -> Tensor:
    """Return the powers of two, float32, that bytes stand for: `2 ** (byte - 127)`."""
    return torch.exp2(scale.float() - 127)
