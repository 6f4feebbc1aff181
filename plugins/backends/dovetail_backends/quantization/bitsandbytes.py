"""`bitsandbytes`: nf4 and fp4 with a scale for every block of numbers, and int8 with one for each row.

For a matrix `[N, K]` in 4 bits, row after row: `weight` uint8 `[N K / 2, 1]`, the higher nibble first, or the same
bytes as numbers of another type (`bnb_4bit_quant_storage`); `weight.quant_map` float32 `[16]`, what nibbles stand for;
`weight.absmax` float32, the scale of each block (64 numbers, or `blocksize`). With double quantisation `absmax` is
uint8: `nested_quant_map[absmax] * nested_absmax + nested_offset`, in blocks of 256. A JSON text in
`weight.quant_state.bitsandbytes__nf4` says the sizes. In 8 bits: `weight` int8 `[N, K]` and `SCB` float32 `[N]`, 127
times the scale.

Source: bitsandbytes 0.50, `functional.py` (QuantState), read November 2026.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.contracts.errors import ModelError
from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.sdk.quantization.forms import Form, Scaled, by_rows, looked_up, pairs_of, scaled
from dovetail_backends.quantization.keys import PLAIN_MODULES, known
from dovetail_backends.quantization.modules import PLAIN, Module, PackedQuantization, Reads, grouped, written_out

STATE = ".weight.quant_state.bitsandbytes__"
STATES = (STATE + "nf4", STATE + "fp4")
NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")
ORDER = ".weight_format"
"""In which order numbers of 8 bits lie: 0 is row after row."""
STORAGES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}
"""Bytes of the types that nibbles are stored as."""
NIBBLES, LEVELS = 16, 256
"""What a nibble, and a byte of absmax, may stand for."""
SUFFIXES = (".weight.absmax", ".weight.quant_map", *NESTED, *STATES, ".weight")


class Bitsandbytes(PackedQuantization):
    """Reads 4 and 8 bits."""

    keys = known(
        PLAIN_MODULES,
        "load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit llm_int8_threshold llm_int8_skip_modules",
        "llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight bnb_4bit_compute_dtype bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant bnb_4bit_quant_storage",
    )
    reads = (
        Reads("nf4 or fp4, scales of 64 numbers", "nf4", 4 + 32 / 64),
        Reads("nf4 or fp4, double quantisation", "nf4", 4 + 8 / 64 + 32 / 64 / 256),
        Reads("int8 (LLM.int8)", "int8", 8),
    )

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        """Say why a checkpoint cannot be served."""
        if (method := config.get("quant_method")) != "bitsandbytes":
            return f"it reads quant_method 'bitsandbytes', not {method!r}"
        if not (config.get("load_in_4bit") or config.get("load_in_8bit")):
            return "neither load_in_4bit nor load_in_8bit is true"
        return None

    @classmethod
    def read_modules(
        cls, config: Mapping[str, Any], tensors: Mapping[str, FileTensor], target: Target
    ) -> Iterable[Conversion]:
        """Write 4 bits out, and scale rows of 8."""
        bases = {name.removesuffix(".weight.absmax") for name in tensors if name.endswith(".weight.absmax")}
        bases |= {name.partition(STATE)[0] for name in tensors if STATE in name}
        fours = {name: tensor for name, tensor in tensors.items() if _base(name) in bases}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in fours}
        for module in grouped(fours, SUFFIXES, ".weight"):
            module.weight = module.weight.removesuffix(".weight") + ".weight"
            yield four_bits(module, target)
        yield from eight(tensors, target)

    def dummy(self) -> Form | None:
        """Return rows of int8, or the model's dtype."""
        return Scaled() if self.config.get("load_in_8bit") else None


def _base(name: str) -> str:
    return name.partition(".weight")[0]


def four_bits(module: Module, target: Target) -> Conversion:
    """Return what becomes of blocks of nibbles.

    Raises:
        ModelError: Sizes do not fit each other.
    """
    weight = module.need(".weight")
    absmax = module.need(".weight.absmax", "U8", *PLAIN)
    module.need(".weight.quant_map", *PLAIN)
    module.need(next((state for state in STATES if state in module.tensors), STATES[0]), "U8")
    if absmax.dtype == "U8":
        for suffix in NESTED:
            module.need(suffix, *PLAIN)
    if weight.dtype not in STORAGES:
        raise ModelError(f"{module.weight}: {weight.dtype}; nibbles are stored as {', '.join(STORAGES)}")
    num = 2 * prod(weight.shape) * STORAGES[weight.dtype]
    if not weight.inputs:
        raise ModelError(f"{module.weight}: in 4 bits, and the model has no matrix there")
    if num % weight.inputs:
        raise ModelError(f"{module.weight}: {num} numbers are no matrix of {weight.inputs} inputs")
    shape = num // weight.inputs, weight.inputs
    return written_out(module, shape, target, partial(four_bit_numbers, module.weight, shape), "nf4")


def four_bit_numbers(name: str, shape: tuple[int, int], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return a matrix, computed in float32 some blocks at a time.

    Raises:
        ModelError: The state does not say what the tensors are.
    """
    text = next(tensor for suffix, tensor in tensors.items() if suffix in STATES)
    try:
        state = json.loads(bytes(text.cpu().tolist()))
        size, said = int(state["blocksize"]), tuple(state["shape"])
        is_nested = tensors[".weight.absmax"].dtype == torch.uint8
        inner, offset = (int(state["nested_blocksize"]), float(state["nested_offset"])) if is_nested else (1, 0.0)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{name}: quant_state is not the JSON of a state ({error!r})") from None
    if said != shape:
        raise ModelError(f"{name}: quant_state says a matrix {list(said)}, and the model has {list(shape)}")
    if size < 2 or size % 2 or inner < 1:
        raise ModelError(
            f"{name}: quant_state has blocks of {size} and {inner} numbers; possible: even ones, and from 1"
        )
    packed, table = tensors[".weight"].contiguous().view(torch.uint8).flatten(), tensors[".weight.quant_map"].float()
    absmax = tensors[".weight.absmax"]
    if table.numel() != NIBBLES:
        raise ModelError(f"{name}: quant_map has {table.numel()} numbers instead of {NIBBLES}")
    blocks = -(-2 * packed.numel() // size)
    if absmax.numel() != blocks:
        raise ModelError(f"{name}: absmax has {absmax.numel()} scales for {blocks} blocks of {size}")
    if is_nested:
        nested, levels = tensors[".weight.nested_absmax"].float(), tensors[".weight.nested_quant_map"].float()
        if nested.numel() != -(-blocks // inner) or levels.numel() != LEVELS:
            raise ModelError(
                f"{name}: nested_absmax has {nested.numel()} scales for {blocks} of absmax in blocks of {inner}, and "
                f"nested_quant_map {levels.numel()} of {LEVELS} levels"
            )
        absmax = levels.index_select(0, absmax.int()) * nested.repeat_interleave(inner)[:blocks] + offset
    short = blocks * size // 2 - packed.numel()
    rows, scales = (F.pad(packed, (0, short)) if short else packed).view(blocks, -1), absmax.float()[:, None]
    pairs = pairs_of(table, high_first=True)

    def make(some: slice) -> Tensor:
        return scaled(looked_up(rows[some], pairs), scales[some], size)

    return by_rows(make, rows, size, dtype).flatten()[: 2 * packed.numel()].view(shape)


def eight(tensors: Mapping[str, FileTensor], target: Target) -> Iterator[Conversion]:
    """Yield what becomes of rows of int8: the scale is named as the form has it, or they are written out.

    Raises:
        ModelError: A row's scale is missing.
    """
    for name, tensor in tensors.items():
        base = name.removesuffix(".weight")
        if tensor.dtype == "I8" and name.endswith(".weight"):
            module = Module(name, {".weight": tensor})
            module.tensors |= {each: tensors[base + each] for each in (".SCB", ORDER) if base + each in tensors}
            module.matrix(".weight")
            module.need(".SCB", *PLAIN)
            module.check(".SCB", tensor.shape[:1])
            if not tensor.path:
                yield written_out(module, tensor.shape, target, partial(_numbers, name), "int8")
                continue
            made = FileTensor(f"{name}_scale", "F32", (tensor.shape[0], 1), tensor.path)
            sources = {f"{base}{each}": each for each in (".SCB", ORDER) if each in module.tensors}
            yield Conversion(tuple(sources), (made,), partial(_rows, name, sources))


def _in_rows(name: str, tensors: Mapping[str, Tensor]) -> None:
    """See that rows follow each other.

    Raises:
        ModelError: They are in the order of some device's tiles.
    """
    if ORDER in tensors and bool(tensors[ORDER].any()):
        raise ModelError(
            f"{name}: {ORDER} is {tensors[ORDER].flatten().tolist()}, an order for some device; possible: 0, rows. "
            "Save the model again with a present bitsandbytes"
        )


def _numbers(name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    _in_rows(name, tensors)
    scales = tensors[".SCB"].float()[:, None] / 127
    return Scaled().dequantise({"weight": tensors[".weight"], "weight_scale": scales}, dtype)


def _rows(name: str, suffixes: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {suffixes[source]: tensor for source, tensor in tensors.items()}
    _in_rows(name, found)
    return {f"{name}_scale": (found[".SCB"].float() / 127)[:, None].contiguous()}
