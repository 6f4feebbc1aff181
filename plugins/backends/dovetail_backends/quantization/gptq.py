"""`gptq`: integers of 4 or 8 bits with a zero point for each group of inputs, as AutoGPTQ and GPTQModel write them.

For a matrix `[N, K]` in b bits, 32 / b numbers a word, the lowest bits first: `qweight` int32 `[K b / 32, N]`, `qzeros`
int32 `[K / group, N b / 32]`, `scales` `[K / group, N]`, and `g_idx` int32 `[K]`, the group of each input. The number
is `(q - zero) * scale`. In the first format (`checkpoint_format: gptq`) one less than the zero is stored, in `gptq_v2`
the zero itself. With `desc_act`, groups hold inputs that are not neighbours: such a matrix is written out. `dynamic`
has other numbers for modules of some names. AutoGPTQ wrote a `bias` of zeros for every matrix; where the model adds
none, zeros are all that it may be.

Source: AutoGPTQ, `nn_modules/qlinear/qlinear_cuda.py`; GPTQModel, `utils/model.py`; read November 2026.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from dovetail.contracts.errors import ModelError
from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.sdk.quantization.forms import Form, Int4, Scaled
from dovetail_backends.quantization.awq import group_reason
from dovetail_backends.quantization.integers import IntegerLayout, IntegerMatrix, in_order, integers, unpacked
from dovetail_backends.quantization.keys import TUNING, known
from dovetail_backends.quantization.modules import INDEX, PLAIN, Module, PackedQuantization, Reads, dropped, grouped

SUFFIXES = (".qzeros", ".scales", ".g_idx")
BIAS = ".bias"
FORMATS = ("gptq", "gptq_v2")
BITS = (4, 8)


class Gptq(PackedQuantization):
    """Reads GPTQ checkpoints."""

    keys = known(TUNING, "bits group_size sym desc_act checkpoint_format format dynamic")
    reads = (
        Reads("AutoGPTQ, GPTQModel (v1 and v2), 4 bits, groups of 128", "int4", 4 + 20 / 128),
        Reads("4 bits with desc_act", "int4 in another order", 4 + 20 / 128),
        Reads("8 bits, symmetric", "int8", 8 + 24 / 128),
        Reads("8 bits, asymmetric", "int8 with zeros", 8 + 24 / 128),
    )

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        """Say why a checkpoint cannot be served."""
        if (method := config.get("quant_method")) != "gptq":
            return f"it reads quant_method 'gptq', not {method!r}"
        if (form := format_of(config)) not in FORMATS:
            return f"checkpoint_format is {form!r}; possible: {', '.join(FORMATS)}"
        return scheme_reason(config) or dynamic_reason(config)

    @classmethod
    def read_modules(
        cls, config: Mapping[str, Any], tensors: Mapping[str, FileTensor], target: Target
    ) -> Iterable[Conversion]:
        """Turn words along inputs, and rows along outputs."""
        for module in grouped(tensors, SUFFIXES, ".qweight"):
            of_module = config_of(module.weight.removesuffix(".weight"), config)
            layout = layout_of(module, of_module)
            bias = tensors.get(module.weight.removesuffix(".weight") + BIAS)
            if bias is not None and module.inputs and not bias.inputs:  # which early tools wrote for every matrix
                module.tensors[BIAS] = bias
            yield integers(module, layout, target, _reader(module, of_module, layout))
        yield from dropped(tensors)

    def dummy(self) -> Form | None:
        """Return the form of symmetric groups."""
        size = self.config.get("group_size", 128)
        group = None if size == -1 else int(size)
        return Int4(group) if self.config.get("bits") == 4 else Scaled(group=group)


def scheme_reason(config: Mapping[str, Any]) -> str | None:
    """Say what is wrong with the numbers of a scheme, None if they are right."""
    bits = config.get("bits")
    if type(bits) is not int or bits not in BITS:
        return f"bits is {bits!r}; possible: 4 and 8"
    return group_reason(config.get("group_size", 128))


def dynamic_reason(config: Mapping[str, Any]) -> str | None:
    """Say what is wrong with the rules for some modules, None if they are right."""
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        return f"dynamic is {rules!r}; possible: changes of the configuration by modules' names"
    for rule, changes in rules.items():
        try:
            re.compile(rule.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            return f"dynamic has {rule!r}, which is no regular expression ({error})"
        if not isinstance(changes, Mapping):
            return f"dynamic has {changes!r} for {rule!r}; possible: changes of the configuration"
        if not rule.startswith("-:") and (reason := scheme_reason({**config, **changes})):
            return f"dynamic, {rule!r}: {reason}"
    return None


def config_of(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a module: with the changes of the first rule of `dynamic` for its name.

    A rule is a regular expression for the beginning, behind `+:` or nothing; behind `-:`, for modules that are plain.
    """
    for rule, changes in (config.get("dynamic") or {}).items():
        if re.match(rule.removeprefix("-:").removeprefix("+:"), name):
            return config if rule.startswith("-:") else {**config, **changes}
    return config


def format_of(config: Mapping[str, Any]) -> Any:
    """Return how zeros are stored; newer tools say `format`, which is heeded where the older key is missing."""
    return config.get("checkpoint_format") or config.get("format") or FORMATS[0]


def layout_of(module: Module, config: Mapping[str, Any]) -> IntegerLayout:
    """Return what a module's tensors say.

    Raises:
        ModelError: They do not fit `bits` and `group_size`.
    """
    bits, size = config["bits"], config.get("group_size", 128)
    words, num_out = module.matrix(".qweight", "I32")
    scales, _ = module.need(".scales", *PLAIN), module.need(".qzeros", "I32")
    num_in = words * 32 // bits
    groups = 1 if size == -1 else -(-num_in // size)
    why = f"group_size {size}, bits {bits}"
    if module.inputs not in (0, num_in):
        module.check(".qweight", (module.inputs * bits // 32, num_out), why=why)
    module.check(".scales", (groups, num_out), why=why)
    module.check(".qzeros", (groups, num_out * bits // 32), why=why)
    has_order = bool(config.get("desc_act")) and groups > 1
    if has_order or ".g_idx" in module.tensors:
        module.need(".g_idx", *INDEX)
        module.check(".g_idx", (num_in,))
    is_symmetric, group = bool(config.get("sym")), num_in if size == -1 else size
    return IntegerLayout((num_out, num_in), group, bits, scales, is_symmetric, not has_order)


def _reader(
    module: Module, config: Mapping[str, Any], layout: IntegerLayout
) -> Callable[[Mapping[str, Tensor]], IntegerMatrix]:
    return partial(read, module.weight, layout, 0 if format_of(config) == "gptq_v2" else 1)


def read(name: str, layout: IntegerLayout, less: int, tensors: Mapping[str, Tensor]) -> IntegerMatrix:
    """Return the integers of a module; its zeros are stored as so much less.

    Raises:
        ModelError: Inputs have groups that there are not, or another order than the configuration says; a bias that
            the model does not add is not zero.
    """
    bias, groups = tensors.get(BIAS), tensors.get(".g_idx")
    if bias is not None and bool(bias.any()):
        raise ModelError(f"{name}: {BIAS} is not zero, and the model has none there; does config.json belong to it?")
    if groups is not None:
        num = tensors[".scales"].shape[0]
        if int(groups.min()) < 0 or int(groups.max()) >= num:
            raise ModelError(f"{name}: .g_idx has groups {int(groups.min())} to {int(groups.max())} of {num}")
        if in_order(groups, layout.group):
            groups = None
        elif layout.is_ordered:
            raise ModelError(f"{name}: .g_idx has an order of its own, and quantization_config says desc_act false")
    zeros = (unpacked(tensors[".qzeros"], layout.bits, 1) + less) & ((1 << layout.bits) - 1)
    return IntegerMatrix(tensors[".qweight"].T, tensors[".scales"].T, zeros.T, layout.group, groups, layout.bits)
