"""`gguf`: the tensors of a GGUF file, which come in blocks.

The reader of such files (`gguf/format.py`) has given tensors transformers' names; a matrix `[N, K]` in
blocks is uint8 `[N, bytes of a row]`, and its dtype is called as llama.cpp calls it. Q4_0 is what `Int4` holds with
groups of 32 and stays packed; all others are written out. Q8_0 has 32 scales where torch's product takes one for a row,
and the K types have minima that are no multiples of their scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts.errors import ModelError
from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.sdk.quantization.forms import Form, Int4, in_chunks
from dovetail.sdk.quantization.words import exchange, swap
from dovetail_backends.gguf.blocks import BY_NAME
from dovetail_backends.gguf.blocks import PLAIN as PLAIN_TYPES
from dovetail_backends.gguf.config import METHOD
from dovetail_backends.quantization.gguf_blocks import READERS, halves, numbers
from dovetail_backends.quantization.keys import known
from dovetail_backends.quantization.modules import NAMES, PackedQuantization, Reads, by_expert

Q4_0 = BY_NAME["Q4_0"]
FORM = Int4(Q4_0.numbers, torch.float16)


class GgufBlocks(PackedQuantization):
    """Reads GGUF files."""

    keys = known("types unheeded")
    reads = (
        Reads("llama.cpp's Q4_0", "int4", 4.5),
        *(Reads(f"llama.cpp's {kind}", kind, 8 * BY_NAME[kind].size / BY_NAME[kind].numbers) for kind in READERS),
    )

    @classmethod
    def unknown(cls, config: Mapping[str, Any]) -> Sequence[str]:
        """Return the keys of the model that nobody heeds."""
        return config.get("unheeded") or ()

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        """Say why a checkpoint cannot be served."""
        if (method := config.get("quant_method")) != METHOD:
            return f"it reads GGUF files, not quant_method {method!r}"
        types = config.get("types")
        unread = [kind for kind in types if kind not in READERS and kind not in PLAIN_TYPES] if types else []
        return (
            f"tensors are {', '.join(unread)}; possible: {', '.join((*sorted(PLAIN_TYPES), *READERS))}"
            if unread
            else None
        )

    @classmethod
    def read_modules(
        cls, config: Mapping[str, Any], tensors: Mapping[str, FileTensor], target: Target
    ) -> Iterable[Conversion]:
        """Bring Q4_0 into words, and write the others out."""
        kinds: dict[str, set[str]] = {}
        for tensor in tensors.values():
            kinds.setdefault(tensor.path, set()).add(tensor.dtype)
        for name, tensor in tensors.items():
            if tensor.dtype not in READERS:
                continue
            alone = kinds[tensor.path] - {"F32"} == {Q4_0.name}  # biases are F32
            if (
                tensor.path
                and alone
                and name.endswith(".weight")
                and target.keeps(FORM, (tensor.shape[0], tensor.inputs))
            ):
                yield _packed(tensor)
            else:
                yield _written_out(tensor, target)

    def dummy(self) -> Form | None:
        """Return the model's dtype: which matrices are in which blocks is told by files alone."""
        return None


def _packed(tensor: FileTensor) -> Conversion:
    groups = tensor.shape[1] // Q4_0.size
    words = FileTensor(f"{tensor.name}_packed", "I32", (tensor.shape[0], groups * Q4_0.numbers // 8), tensor.path)
    scales = FileTensor(f"{tensor.name}_scale", "F16", (tensor.shape[0], groups), tensor.path)

    def convert(sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows = sources[tensor.name].contiguous()
        scale = halves(rows.view(-1, Q4_0.size), 0, 1).to(torch.float16)

        def make(part: slice) -> tuple[Tensor]:
            return (words_of_blocks(rows[part].view(-1, Q4_0.size)[:, 2:]).view(-1, words.shape[1]),)

        made = in_chunks(make, rows, words.shape[1] * 8)[0]
        return {words.name: made, scales.name: scale.view(scales.shape)}

    return Conversion((tensor.name,), (words, scales), convert)


def words_of_blocks(data: Tensor) -> Tensor:
    """Return words int32 `[B, 4]` in the shared forms' order of Q4_0's nibbles, bytes `[B, 16]`.

    Eight bytes at a time: their lower nibbles, numbers 0 to 7 or 8 to 15, become one word, the upper ones another. The
    first swap brings them apart, with inputs 0, 4, 1, 5, 2, 6, 3, 7 in a word; two more make 0, 2, 4, 6, 1, 3, 5, 7.
    """
    both = data.clone(memory_format=torch.contiguous_format).view(torch.int64)
    swap(both, 28, 0xF0F0F0F0)
    swap(both, 4, 0x00F000F0_00F000F0)
    swap(both, 12, 0x0000F0F0_0000F0F0)
    exchange(both, 1, 32)  # words 0 and 2, 1 and 3 stand in pairs
    return both.view(torch.int32)


def _written_out(tensor: FileTensor, target: Target) -> Conversion:
    kind, block = tensor.dtype, BY_NAME[tensor.dtype]
    if tensor.shape[-1] % block.size:
        raise ModelError(f"{tensor.name}: rows of {tensor.shape[-1]} bytes are no whole blocks of {kind}")
    shape = (*tensor.shape[:-1], tensor.shape[-1] // block.size * block.numbers)
    dtype = getattr(torch, target.dtype)
    made = FileTensor(tensor.name, NAMES[target.dtype], shape, tensor.path)
    note = f"{kind} written out: no product for it on {target.device}" if tensor.path else ""
    return Conversion(
        (tensor.name,),
        (made,),
        lambda sources: {made.name: numbers(kind, sources[tensor.name], dtype)},
        note,
        by_expert((tensor,), shape),
    )
