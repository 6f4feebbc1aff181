"""`awq`: 4-bit integers with a zero point for each group of inputs, as AutoAWQ writes them.

For a matrix `[N, K]`: `qweight` int32 `[K, N / 8]`, `qzeros` int32 `[K / group, N / 8]`, `scales` float16 `[K / group,
N]`. Of eight neighbouring outputs, the one at place c stands in nibble `ORDER[c]` of a word, counted from the lowest
bits. The number is `(q - zero) * scale`.

Source: AutoAWQ, `awq/utils/packing_utils.py`; vLLM, `quantization/awq_triton.py`; read November 2026.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.sdk.quantization.forms import Form, Int4
from dovetail.sdk.quantization.scratch import SCRATCH
from dovetail.sdk.quantization.words import exchange, slices
from dovetail_backends.quantization.integers import IntegerLayout, IntegerMatrix, integers, unpacked
from dovetail_backends.quantization.keys import PLAIN_MODULES, TUNING, known
from dovetail_backends.quantization.modules import PLAIN, PackedQuantization, Reads, dropped, grouped

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
SUFFIXES = (".qzeros", ".scales")


class Awq(PackedQuantization):
    """Reads AWQ checkpoints."""

    keys = known(PLAIN_MODULES, TUNING, "bits w_bit group_size q_group_size zero_point version format")
    reads = (Reads("AutoAWQ, 4 bits, groups of 128", "int4", 4 + 20 / 128),)

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        """Say why a checkpoint cannot be served."""
        if (method := config.get("quant_method")) != "awq":
            return f"it reads quant_method 'awq', not {method!r}"
        if (bits := config.get("bits", config.get("w_bit", 4))) != 4:
            return f"bits is {bits!r}; possible: 4"
        key = "version" if config.get("version") else "format"  # as transformers 5 calls it
        if str(version := config.get(key) or "gemm").lower() != "gemm":
            return f"{key} is {version!r}; possible: 'gemm'"
        if (backend := config.get("backend")) == "llm-awq":  # another layout, whatever the version says
            return f"backend is {backend!r}; possible: 'autoawq'"
        return group_reason(config.get("group_size", config.get("q_group_size", 128)))

    @classmethod
    def read_modules(
        cls, config: Mapping[str, Any], tensors: Mapping[str, FileTensor], target: Target
    ) -> Iterable[Conversion]:
        """Turn rows along outputs into rows along inputs."""
        size = config.get("group_size", config.get("q_group_size", 128))
        for module in grouped(tensors, SUFFIXES, ".qweight"):
            num_in, words = module.matrix(".qweight", "I32")
            scales, _ = module.need(".scales", *PLAIN), module.need(".qzeros", "I32")
            num_out, group = 8 * words, num_in if size == -1 else size
            groups = -(-num_in // group)
            module.check(".scales", (groups, num_out), why=f"group_size {size}")
            module.check(".qzeros", (groups, words), why=f"group_size {size}")
            layout = IntegerLayout((num_out, num_in), group, 4, scales, False, True)
            yield integers(module, layout, target, partial(read, group))
        yield from dropped(tensors)

    def dummy(self) -> Form | None:
        """Return 4 bits with zeros."""
        return Int4(has_zero=True)


def read(group: int, tensors: Mapping[str, Tensor]) -> IntegerMatrix:
    """Return the integers of a module with so many inputs a group."""
    words, zeros = tensors[".qweight"], unpacked(tensors[".qzeros"], 4, 1, ORDER)
    if words.shape[0] % 8:  # a row of such a matrix is no whole words
        return IntegerMatrix(unpacked(words, 4, 1, ORDER).T, tensors[".scales"].T, zeros.T, group)
    return IntegerMatrix(turned(words), tensors[".scales"].T, zeros.T, group, is_shuffled=True)


def turned(words: Tensor) -> Tensor:
    """Return words `[N, K / 8]`, in the shared forms' order, of `[K, N / 8]`.

    Of the words of eight inputs the first four become those of even ones, so that three exchanges put inputs where that
    order has them; output `c` is then row `ORDER[c]`, of four rows for even outputs and four for odd ones.
    """
    num_in, width = words.shape
    out = SCRATCH.empty((width, 4, 2, num_in // 8), words.dtype, words.device)
    for columns in slices(width, num_in, words.device):
        some = words[:, columns].view(num_in // 8, 4, 2, -1).transpose(1, 2)
        eight = some.clone(memory_format=torch.contiguous_format).view(num_in // 8, 2, 2, 2, -1)
        for axis, bits in ((1, 16), (2, 8), (3, 4)):
            exchange(eight, axis, bits)
        out[columns] = eight.view(num_in // 8, 2, 4, -1).permute(3, 2, 1, 0)
    return out.flatten(0, 2)


def group_reason(size: Any) -> str | None:
    """Say what is wrong with a size of groups, None if it is right."""
    is_right = type(size) is int and (size == -1 or size > 0)
    return None if is_right else f"group_size is {size!r}; possible: a number from 1, or -1 for a whole row"
