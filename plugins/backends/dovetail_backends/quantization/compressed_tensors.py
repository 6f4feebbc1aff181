"""`compressed-tensors`: what llm-compressor writes, format by format.

A module's tensors say which format it has, so checkpoints of several are read as well. For a matrix `[N, K]`:

- float-quantized, naive-quantized, mxfp8-quantized: `weight` e4m3, `weight_scale` `[N, 1]`, `[1]`, one for each block,
  or bytes `[N, K / 32]`, exponents of two;
- int-quantized: `weight` int8, `weight_scale` `[N, 1]`, `[N, K / group]` or `[1]`, and `weight_zero_point` int8 alike;
- pack-quantized: `weight_packed` int32 `[N, K b / 32]`, numbers of b = 4 or 8 bits plus half their range, the lowest
  bits first; `weight_scale` `[N, K / group]` or `[1]`, `weight_shape` int64 `[2]`; `weight_zero_point` int32
  `[N b / 32, K / group]`, packed alike along N; with activation order `weight_g_idx` int32 `[K]`;
- nvfp4-pack-quantized: `weight_packed` uint8 `[N, K / 2]`, the lower nibble first, `weight_scale` e4m3 `[N, K / 16]`,
  `weight_global_scale` float32 `[1]`, which numbers are divided by;
- mxfp4-pack-quantized: `weight_packed` uint8 `[N, K / 2]`, `weight_scale` bytes `[N, K / 32]`, exponents of two.

Activations in integers are not rounded here, in float8 as `RoundsActivations` says. Source: compressed-tensors 0.12,
`compressors/` and `quantization/`, read November 2026.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from dovetail.contracts.errors import ModelError
from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.sdk.quantization.forms import Form, Int4, Scaled
from dovetail_backends.quantization.fp4 import mxfp4, nvfp4
from dovetail_backends.quantization.fp8 import BLOCK, ROWS, RoundsActivations, float8, scaled_by
from dovetail_backends.quantization.integers import IntegerLayout, IntegerMatrix, in_order, integers, unpacked
from dovetail_backends.quantization.keys import PLAIN_MODULES, known
from dovetail_backends.quantization.modules import (
    INDEX,
    PLAIN,
    Module,
    Reads,
    dropped,
    eight_bits,
    grouped,
)

METHOD = "compressed-tensors"
PACKED = (".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale")
NOT_EXPERTS = tuple(
    f"model.layers.0.{name}_proj" for name in ("self_attn.o", "mlp.gate", "mlp.down", "mlp.shared_experts.up")
)
"""Matrices of every model of experts that are not theirs: those without a dummy are those that `ignore` names."""
GROUP_KEYS = known("targets weights input_activations output_activations format")
WEIGHT_KEYS = known(
    "num_bits type symmetric strategy group_size block_structure dynamic actorder scale_dtype zp_dtype observer",
    "observer_kwargs",
)
ORDERS = ("group", "dynamic", True)
"""Values of `actorder` with which there is a group for each input; with others inputs lie as they did."""
TYPES = {"int": (4, 8), "float": (4, 8)}


class CompressedTensors(RoundsActivations):
    """Reads the formats above."""

    keys = known(
        PLAIN_MODULES,
        "config_groups format quantization_status kv_cache_scheme global_compression_ratio sparsity_config",
        "transform_config version run_compressed dequantize use_optimized_inference",
    )
    reads: ClassVar[Sequence[Reads]] = (
        Reads("float-quantized, naive-quantized: rows, tensors or blocks", "float8_e4m3fn", 8),
        Reads("mxfp8-quantized", "float8_e4m3fn", 8 + 8 / 32),
        Reads("int-quantized: rows or groups", "int8", 8),
        Reads("int-quantized with zero points", "int8 with zeros", 8),
        Reads("pack-quantized, 4 bits, groups of 128", "int4", 4 + 16 / 128),
        Reads("pack-quantized, 8 bits, groups of 128", "int8", 8 + 16 / 128),
        Reads("pack-quantized with an order of activations", "int4 in another order", 4 + 16 / 128),
        Reads("nvfp4-pack-quantized", "nvfp4", 4 + 8 / 16),
        Reads("mxfp4-pack-quantized", "mxfp4", 4 + 8 / 32),
    )

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        """Say why a checkpoint cannot be served."""
        if (method := config.get("quant_method")) != METHOD:
            return f"it reads quant_method {METHOD!r}, not {method!r}"
        for key in ("sparsity_config", "transform_config"):
            found = config.get(key)
            if found and (not isinstance(found, Mapping) or found.get("format", "") not in ("dense",)):
                return f"{key} is given; possible: weights that are neither sparse nor transformed"
        try:
            list(weights_of(config))
        except ModelError as error:
            return str(error)
        return None

    @classmethod
    def unknown(cls, config: Mapping[str, Any]) -> Sequence[str]:
        """Return keys of it and of its schemes that are not heeded."""
        groups: Mapping[str, Mapping[str, Any]] = config.get("config_groups") or {}
        inner = {f"config_groups.{name}.{key}" for name, group in groups.items() for key in set(group) - GROUP_KEYS}
        for name, group in groups.items():
            inner |= {f"config_groups.{name}.weights.{key}" for key in set(group.get("weights") or ()) - WEIGHT_KEYS}
        return [*super().unknown(config), *sorted(inner)]

    @classmethod
    def read_modules(
        cls, config: Mapping[str, Any], tensors: Mapping[str, FileTensor], target: Target
    ) -> Iterable[Conversion]:
        """Bring each module into a shared form, or write it out."""
        schemes = list(weights_of(config))
        bits = {scheme["num_bits"] for scheme in schemes if scheme.get("type", "int") == "int"} or {4}
        is_ordered = all(scheme.get("actorder") in ORDERS for scheme in schemes)
        sizes, is_shifted = group_sizes(config), all(scheme.get("symmetric", True) is False for scheme in schemes)
        block = next((tuple(s["block_structure"]) for s in schemes if s.get("block_structure")), BLOCK)
        done: set[str] = set()
        for module in grouped(_packed_only(tensors), PACKED, ".weight_packed"):
            done |= {tensor.name for tensor in module.tensors.values()}
            if module.need(".weight_packed").dtype == "I32":
                yield from pack_quantized(module, bits, target, sizes, is_shifted=is_shifted, is_ordered=is_ordered)
            elif ".weight_global_scale" in module.tensors:
                yield nvfp4(module, ".weight_packed", ".weight_scale", ".weight_global_scale", target, divides=True)
            else:
                yield from mxfp4(module, ".weight_packed", ".weight_scale", target)
        left = {name: tensor for name, tensor in tensors.items() if name not in done}
        yield from float8(left, target, (int(block[0]), int(block[1])), float_spans(schemes))
        yield from int_quantized(left, target, sizes, is_shifted=is_shifted)
        yield from dropped(left)

    def is_said_to_round(self) -> bool:
        """Where all of its float8 weights meet float8 inputs (`input_activations`)."""
        groups = [group for group in self.config["config_groups"].values() if isinstance(group.get("weights"), Mapping)]
        return all(_is_float8(group["weights"]) <= _is_float8(group.get("input_activations")) for group in groups)

    def dummy(self) -> Form | None:
        """Return the form of experts where other matrices are not left out."""
        return None if leaves_out(self.config, NOT_EXPERTS) else self.dummy_experts()

    def dummy_experts(self) -> Form | None:
        """Return the form of the first scheme."""
        scheme = next(iter(weights_of(self.config)))
        size = scheme.get("group_size")
        group = size if scheme.get("strategy") == "group" else None
        if scheme.get("type", "int") != "int":
            block = scheme.get("block_structure")
            return None if scheme["num_bits"] != 8 else scaled_by(block[1]) if block else ROWS
        return (
            Int4(group, has_zero=not scheme.get("symmetric", True)) if scheme["num_bits"] == 4 else Scaled(group=group)
        )


def _is_float8(scheme: object) -> bool:
    return isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits", 8)) == ("float", 8)


def leaves_out(config: Mapping[str, Any], modules: Iterable[str]) -> bool:
    """Whether `ignore` names all of some modules: as they are, or by an expression after `re:` for their beginning."""
    ignored = [name for name in config.get("ignore") or () if isinstance(name, str)]
    return all(any(_names(name, module) for name in ignored) for module in modules)


def _names(name: str, module: str) -> bool:
    """Whether `ignore` names a module so.

    Raises:
        ModelError: It is no regular expression.
    """
    if not name.startswith("re:"):
        return name == module
    try:
        return re.match(name[3:], module) is not None
    except re.error as error:
        raise ModelError(f"quantization_config.ignore: {name!r} is no regular expression ({error})") from None


def weights_of(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the schemes of weights that a configuration has.

    Raises:
        ModelError: One is none that is read; says which key.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError(f"config_groups is {groups!r}: expected the schemes of the weights")
    found = False
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            if isinstance(group, Mapping) and "weights" in group and weights is None:
                continue  # activations or a cache alone
            raise ModelError(f"config_groups.{name} has no weights")
        where = f"config_groups.{name}.weights"
        kind = weights.get("type", "int")
        if not isinstance(kind, str) or kind not in TYPES:
            raise ModelError(f"{where}.type is {kind!r}; possible: 'int' and 'float'")
        bits = weights.get("num_bits", 8)
        if type(bits) is not int or bits not in TYPES[kind]:
            raise ModelError(f"{where}.num_bits is {bits!r}; possible: 4 and 8")
        if (strategy := weights.get("strategy")) not in (None, "tensor", "channel", "group", "block", "tensor_group"):
            raise ModelError(f"{where}.strategy is {strategy!r}; possible: tensor, channel, group, tensor_group, block")
        size, block = weights.get("group_size"), weights.get("block_structure")
        if strategy == "group" and (type(size) is not int or size < 1):
            raise ModelError(f"{where}.group_size is {size!r}; possible: a number from 1")
        if block and not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
            raise ModelError(f"{where}.block_structure is {block!r}; possible: two numbers from 1")
        found = True
        yield {**weights, "num_bits": bits}
    if not found:
        raise ModelError("config_groups has no scheme of weights")


def group_sizes(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the sizes of groups that the schemes of integers name, 0 for whole rows; none where one does not say."""
    found = set()
    for scheme in weights_of(config):
        size, strategy = scheme.get("group_size"), scheme.get("strategy")
        if scheme.get("type", "int") != "int":
            continue
        if strategy in ("channel", "tensor"):
            found.add(0)
        elif type(size) is int and size > 0:
            found.add(size)
        else:
            return frozenset()
    return frozenset(found)


def float_spans(schemes: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return what scales of 8-bit floating point are for, as `float8` has it; none where a scheme does not say."""
    names = {"tensor": "tensor", "channel": "row", "block": "block"}
    found = set()
    for scheme in schemes:
        if scheme.get("type", "int") == "float" and scheme["num_bits"] == 8:
            found.add(names.get(str(scheme.get("strategy")), f"{scheme.get('group_size')} inputs"))
    return frozenset() if "None inputs" in found else frozenset(found)


def _check_group(module: Module, group: int, num_in: int, sizes: frozenset[int]) -> None:
    """See that scales are for as many inputs as the configuration says.

    Raises:
        ModelError: They are for others.
    """
    is_row = group >= num_in and any(size == 0 or size >= num_in for size in sizes)
    if sizes and group not in sizes and not is_row:
        said = " or ".join("a row" if size == 0 else f"{size} inputs" for size in sorted(sizes))
        raise ModelError(
            f"{module.weight}: .weight_scale has a scale for {group} inputs, and config_groups says for {said}; "
            "does config.json belong to this checkpoint?"
        )


def _packed_only(tensors: Mapping[str, FileTensor]) -> Mapping[str, FileTensor]:
    """The tensors of modules with packed weights."""
    bases = {name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")}
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] in bases}


def int_quantized(
    tensors: Mapping[str, FileTensor], target: Target, sizes: frozenset[int], *, is_shifted: bool
) -> Iterator[Conversion]:
    """Yield what becomes of weights in int8; `is_shifted`: all schemes have zero points."""
    for name, tensor in tensors.items():
        if tensor.dtype != "I8" or not name.endswith(".weight"):
            continue
        names = {suffix: name.removesuffix(".weight") + suffix for suffix in (".weight_scale", ".weight_zero_point")}
        module = Module(name, {".weight": tensor})
        module.tensors |= {suffix: tensors[each] for suffix, each in names.items() if each in tensors}
        (num_out, num_in), scales = module.matrix(".weight"), module.need(".weight_scale", *PLAIN).shape
        if scales in ((1,), ()):
            group = (num_out, num_in)
        elif len(scales) == 2 and scales[0] == num_out and 0 < scales[1] <= num_in and num_in % scales[1] == 0:
            group = (1, num_in // scales[1])
        else:
            module.check(".weight_scale", (num_out, 1), (1,), why=f"or a divisor of {num_in} columns")
        _check_group(module, group[1], num_in, sizes)
        if ".weight_zero_point" not in module.tensors and not is_shifted:
            yield from eight_bits(module, tensor.shape, group, target, scale=".weight_scale")
        else:
            module.need(".weight_zero_point", "I8")
            module.check(".weight_zero_point", scales)
            layout = IntegerLayout((num_out, num_in), group[1], 8, module.need(".weight_scale"), False, True)
            yield integers(module, layout, target, partial(_shifted, group[1]))


def _shifted(group: int, tensors: Mapping[str, Tensor]) -> IntegerMatrix:
    values, zeros = (
        (tensors[name].to(torch.int16) + 128).to(torch.uint8) for name in (".weight", ".weight_zero_point")
    )
    rows = values.shape[0]
    scale, zeros = (each.expand(rows, 1) if each.dim() < 2 else each for each in (tensors[".weight_scale"], zeros))
    return IntegerMatrix(values, scale, zeros, group)


def pack_quantized(
    module: Module, bits: set[int], target: Target, sizes: frozenset[int], *, is_shifted: bool, is_ordered: bool
) -> Iterator[Conversion]:
    """Yield what becomes of integers packed in words.

    Args:
        module: Its tensors.
        bits: That schemes have.
        target: What it is read for.
        sizes: See `group_sizes`.
        is_shifted: All schemes have zero points.
        is_ordered: All have groups of inputs that are no neighbours.

    Raises:
        ModelError: Shapes do not fit each other.
    """
    num_out, words = module.matrix(".weight_packed", "I32")
    scale = module.need(".weight_scale", *PLAIN)
    width = next((b for b in sorted(bits) if module.inputs and -(-module.inputs * b // 32) == words), min(bits))
    num_in = module.inputs or words * 32 // width
    if -(-num_in * width // 32) != words:
        module.check(".weight_packed", (num_out, -(-num_in * width // 32)), why=f"{num_in} inputs of {width} bits")
    if scale.shape in ((), (1,)):  # of the whole matrix
        scale = scale._replace(shape=(num_out, 1))
    elif len(scale.shape) != 2 or scale.shape[0] != num_out or not scale.shape[1] or num_in % scale.shape[1]:
        module.check(".weight_scale", (num_out, 1), (1,), why=f"or a divisor of {num_in} columns")
    groups = scale.shape[1]
    group = num_in // groups
    _check_group(module, group, num_in, sizes)
    has_zero, has_order = (each in module.tensors for each in (".weight_zero_point", ".weight_g_idx"))
    has_order |= is_ordered
    if has_zero or is_shifted:
        module.need(".weight_zero_point", "I32")
        module.check(".weight_zero_point", (-(-num_out * width // 32), groups))
    if has_order:
        module.need(".weight_g_idx", *INDEX)
        module.check(".weight_g_idx", (num_in,))
    layout = IntegerLayout((num_out, num_in), group, width, scale, not has_zero, not has_order)

    def read(tensors: Mapping[str, Tensor]) -> IntegerMatrix:
        said = tensors.get(".weight_shape")
        if said is not None and said.tolist() != [num_out, num_in]:
            raise ModelError(f"{module.weight}: .weight_shape says {said.tolist()}, and it is {[num_out, num_in]}")
        words, scales = tensors[".weight_packed"], tensors[".weight_scale"].expand(scale.shape)
        values = words if width == 4 and num_in % 8 == 0 else unpacked(words, width, 1)[:, :num_in]
        if has_zero:
            zeros = unpacked(tensors[".weight_zero_point"], width, 0)[:num_out]
        else:
            zeros = torch.full(scales.shape, 1 << (width - 1), dtype=torch.uint8, device=scales.device)
        order = tensors.get(".weight_g_idx")
        if order is not None and (int(order.min()) < -1 or int(order.max()) >= groups):
            raise ModelError(f"{module.weight}: .weight_g_idx has groups that there are not, of {groups}")
        if order is not None and (int(order.min()) < 0 or in_order(order, group)):
            order = None  # -1 everywhere says that there is none
        return IntegerMatrix(values, scales, zeros, group, order)

    yield integers(module, layout, target, read)
