"""`fp8`: weights of 8-bit floating point with a scale for each block, row or tensor; also mxfp8.

Reads `quant_method: fp8` (DeepSeek, Qwen, MiniMax, Mistral) and `mxfp8`. For a matrix `[N, K]`: `weight` e4m3 (or e5m2)
and its scale, `weight_scale_inv` or `weight_scale`, which numbers are multiplied by in spite of the first one's name:

- `weight_block_size: [128, 128]`: float32 or e8m0 `[ceil(N / 128), ceil(K / 128)]`; shapes need not divide;
- a row: `[N, 1]` or `[N]`; a tensor: `[1]` or `[]`;
- mxfp8: e8m0, or bytes that are exponents, `[N, K / 32]`.

The files' dtypes say which modules are fp8 (`modules_to_not_convert`, `ignored_layers`). With `--quantization fp8` a
checkpoint in 16 bits is quantised while it loads, each row by itself. Products of many rows round their rows to float8
too, unless `--fp8.activations model` is given: see `RoundsActivations`.

Source: transformers 5, `integrations/finegrained_fp8.py`; vLLM, `quantization/fp8.py`; read November 2026.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.sdk.quantization.forms import Form, Scaled
from dovetail_backends.kernels.triton import FP8_GROUP
from dovetail_backends.quantization.keys import PLAIN_MODULES, known
from dovetail_backends.quantization.modules import (
    MADE,
    SCALE,
    Module,
    PackedQuantization,
    Reads,
    blocks_of,
    dropped,
    eight_bits,
)
from dovetail_backends.quantization.on_load import quantised, rows_of

FLOAT8 = ("F8_E4M3", "F8_E5M2")
BLOCK, MX_BLOCK = (128, 128), (1, 32)
SCALES = ("_scale_inv", "_scale")
ROWS = Scaled(torch.float8_e4m3fn)


@dataclass
class Fp8Options:
    """What users choose."""

    activations: Literal["auto", "float8", "model"] = field(
        default="auto",
        metadata={
            "help": "Rows of large matrix products on CUDA: rounded to float8, each with a scale of its own, which is "
            "faster, or in the model's dtype, which is more exact; auto: as the checkpoint says, float8 for one "
            "that is quantized while it loads."
        },
    )


class RoundsActivations(PackedQuantization):
    """A quantisation whose float8 products may round their rows.

    A tool that wrote a checkpoint so measured its model with rounded rows. Scales that it found ahead of time
    (`input_scale`) are not used: each row has one of its own, made as it comes.
    """

    Options: ClassVar[type[Any] | None] = Fp8Options

    def activations(self) -> torch.dtype | None:
        """Return float8, or None where rows keep the model's dtype."""
        wish = self.options.activations if self.options else "auto"
        rounds = self.is_said_to_round() if wish == "auto" else wish == "float8"
        return torch.float8_e4m3fn if rounds else None

    @abstractmethod
    def is_said_to_round(self) -> bool:
        """Whether the configuration says that activations are float8."""


class Fp8(RoundsActivations):
    """Reads fp8 checkpoints, and makes fp8 of plain ones."""

    keys = known(
        PLAIN_MODULES,
        "activation_scheme weight_block_size scale_fmt fmt expert_dtype dequantize modules_to_convert",
        "kv_cache_scheme",
    )
    reads = (
        Reads("fp8 in blocks of 128 x 128 (DeepSeek, Qwen, MiniMax), ue8m0 scales too", "float8_e4m3fn", 8),
        Reads("fp8 with a scale for each tensor or row", "float8_e4m3fn", 8),
        Reads("mxfp8", "mxfp8", 8 + 8 / 32),
        Reads(MADE, "float8_e4m3fn", 8),
    )

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        """Say why a checkpoint cannot be served."""
        if not config:
            return None
        if (method := config.get("quant_method")) not in ("fp8", "mxfp8"):
            return f"it reads quant_method 'fp8' and 'mxfp8', not {method!r}; plain checkpoints are quantised"
        if (experts := config.get("expert_dtype") or "fp8") != "fp8":
            return f"expert_dtype is {experts!r}; possible: 'fp8'"
        try:
            block_of(config)
        except ModelError as error:
            return str(error)
        return None

    @classmethod
    def read_modules(
        cls, config: Mapping[str, Any], tensors: Mapping[str, FileTensor], target: Target
    ) -> Iterable[Conversion]:
        """Scale numbers, or make them."""
        if not config:
            yield from quantised(tensors, rows_of(ROWS))
        else:
            is_said = config.get("quant_method") == "mxfp8" or config.get("weight_block_size")
            yield from float8(tensors, target, block_of(config), frozenset({"block"} if is_said else ()))
            yield from dropped(tensors)

    def is_said_to_round(self) -> bool:
        """By `activation_scheme`, `dynamic` or `static`; a plain checkpoint that is quantised here does."""
        return not self.config or bool(self.config.get("activation_scheme"))

    def dummy(self) -> Form | None:
        """Return fp8 with a scale for as many inputs as the checkpoint's, for rows where it is made here."""
        return scaled_by(block_of(self.config)[1]) if self.config else ROWS


def scaled_by(num_in: int) -> Form | None:
    """Return the form of fp8 with a scale per `num_in` inputs; None where such weights are dequantized."""
    return Scaled(torch.float8_e4m3fn, num_in) if num_in % FP8_GROUP == 0 else None


def block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows and columns for which there is a scale.

    Raises:
        ModelError: `weight_block_size` is no such pair.
    """
    usual = MX_BLOCK if config.get("quant_method") == "mxfp8" else BLOCK
    found = config.get("weight_block_size") or usual
    if not isinstance(found, list | tuple) or len(found) != 2 or not all(type(n) is int and n > 0 for n in found):
        raise ModelError(f"weight_block_size is {found!r}; possible: two numbers from 1, such as [128, 128]")
    return found[0], found[1]


def float8(
    tensors: Mapping[str, FileTensor], target: Target, block: tuple[int, int], spans: frozenset[str] = frozenset()
) -> Iterator[Conversion]:
    """Yield the conversions of all weights in 8-bit floating point.

    Args:
        tensors: Of the checkpoint.
        target: What they are read for.
        block: Rows and columns of a block.
        spans: What scales are for, if the configuration says it: `block`, `row`, `tensor`, or `32 inputs` of a row.

    Raises:
        ModelError: A scale is missing, or it is not one for each block, row or tensor.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOAT8 or name.endswith(SCALES):
            continue
        own = ".weight" if name.endswith(".weight") else ""
        module = Module(name, {own: tensor})
        if len(tensor.shape) < 2:
            module.matrix(own)
        scales = [own + each for each in SCALES if name + each in tensors]
        if len(scales) != 1:
            raise ModelError(
                f"{name}: {tensor.dtype} needs one scale, {name}_scale_inv or {name}_scale; has {len(scales)}"
            )
        module.tensors[scales[0]] = tensors[name + scales[0].removeprefix(own)]
        module.need(scales[0], *SCALE)
        group = layout_of(module, scales[0], block, spans)
        yield from eight_bits(module, tensor.shape, group, target, scale=scales[0])


def layout_of(module: Module, scale: str, block: tuple[int, int], spans: frozenset[str]) -> tuple[int, int]:
    """Return rows and columns that share one of a module's scales.

    Raises:
        ModelError: There are not as many as blocks, rows or tensors, or they are for something else than `spans` says.
    """
    shape = next(module.tensors[own].shape for own in (".weight", "") if own in module.tensors)
    found = module.need(scale).shape
    experts, blocks = shape[:-2], blocks_of(shape, block)
    kept_axes = (*experts, blocks[-2], 1, blocks[-1], 1)  # as Model Optimizer writes them
    columns = found[-1] if found[:-1] == shape[:-1] and found and found[-1] and shape[-1] % found[-1] == 0 else 0
    width = shape[-1] // columns if columns else 0
    is_tensor = found in ((), (1,), experts, (*experts, 1), (*experts, 1, 1)) and (not experts or found[:1] == experts)
    readers = {
        "block": (found in (blocks, kept_axes), block),
        "row": (found in ((*shape[:-1], 1), shape[:-1]), (1, shape[-1])),
        f"{width} inputs": (columns > 1, (1, width)),
        "tensor": (is_tensor, (shape[-2], shape[-1])),
    }
    for span, (fits, group) in readers.items():
        if fits and (not spans or span in spans):
            return group
    possible = {
        "block": f"{list(blocks)} (blocks of {block[0]} x {block[1]})",
        "row": f"{[*shape[:-1], 1]} (rows, or groups of their columns)",
        "tensor": f"{[*experts, 1]} (one tensor)",
    }
    named = [text for span, text in possible.items() if not spans or span in spans]
    named += [f"one for {span}" for span in sorted(spans - possible.keys())]
    said = "; the configuration says so" if spans else ""
    raise ModelError(
        f"{module.weight}: {scale} is {list(found)}; for a weight {list(shape)} possible: {', '.join(named)}{said}"
    )
