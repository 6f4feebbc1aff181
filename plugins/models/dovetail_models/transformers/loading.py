"""Reads a checkpoint through transformers, and is as strict with it as Dovetail's own loader."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from dovetail.contracts.checkpoint import TensorHeader
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.sdk.checkpoint import is_finite
from dovetail.sdk.config import some

EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
"""A tensor of one expert."""


WHOLE = "model.safetensors"
"""What transformers reads first."""
MOST_NAMED = 3
"""Tensors of each kind of fault that one line names."""


def load(folder: Path, headers: Sequence[TensorHeader], config: Any, ctx: BuildContext, attention: str) -> Any:
    """Return transformers' model with the folder's weights, on the context's device.

    Raises:
        ModelError: Weights are missing, surplus, misshapen or not finite: they are named, with their files; or two sets
            of weights stand there, of which transformers would read another than the index names.
    """
    if (folder / WHOLE).is_file() and all(header.file.name != WHOLE for header in headers):
        raise ModelError(f"{folder}: {WHOLE} stands beside an index that names other files; remove the older weights")
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=ctx.dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # told below, with all else
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())
        why = odd_ones(headers)
        raise ModelError(f"{folder}: transformers cannot read the weights: {why or said[:400]}") from None
    files = {header.name: header for header in headers}
    faults = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": with_files(sorted(info["unexpected_keys"]), files),
        "wrong shape or type": with_files([str(key[0]) for key in sorted(info["mismatched_keys"])], files),
    }
    if parts := [f"{what}: {some(names, MOST_NAMED)}" for what, names in faults.items() if names]:
        if odd := odd_ones(headers):
            parts.append(odd)
        hint = "does config.json belong to this checkpoint?"
        raise ModelError(f"{folder}: the weights do not fit the model; {'; '.join(parts)}; {hint}")
    if not all(is_finite(param) for param in model.parameters()):
        names = [f"{name} ({files[name].file.name})" for name in not_finite(headers)] or ["after conversion"]
        raise ModelError(f"{folder}: weights that are not finite: {some(names)}; download the checkpoint again")
    return model.to(ctx.device)


def with_files(names: Iterable[str], files: dict[str, TensorHeader]) -> list[str]:
    """Name each tensor's file, where it has one of that name."""
    return [f"{name} ({files[name].file.name})" if name in files else name for name in names]


def odd_ones(headers: Iterable[TensorHeader]) -> str:
    """Say which experts' tensors are unlike those of the other experts; transformers names them only when joined.

    Tensors that are alike but for an expert's number are counted: one that stands alone, a number that is left out, and
    a shape that only one has.
    """
    groups: dict[tuple[str, str], dict[int, TensorHeader]] = {}
    for header in headers:
        if match := EXPERT.fullmatch(header.name):
            groups.setdefault((match[1], match[3]), {})[int(match[2])] = header
    most = max((number for group in groups.values() for number in group), default=0) + 1
    shapes = Counter((rest, header.shape) for (_, rest), group in groups.items() for header in group.values())
    usual = {rest: shape for (rest, shape), _ in reversed(shapes.most_common())}
    missing, unexpected, misshapen = [], [], []
    for (layer, rest), group in groups.items():
        if 2 * len(group) < most:
            unexpected += [f"{header.name} ({header.file.name})" for header in group.values()]
            continue
        missing += [f"{layer}{number}{rest}" for number in range(most) if number not in group]
        odd = (header for header in group.values() if header.shape != usual[rest])
        misshapen += [f"{h.name} {list(h.shape)} instead of {list(usual[rest])} ({h.file.name})" for h in odd]
    faults = {"missing": missing, "unexpected": unexpected, "wrong shape": misshapen}
    said = "; ".join(f"{what}: {some(sorted(names))}" for what, names in faults.items() if names)
    return f"among experts, {said}" if said else ""


@torch.inference_mode()
def not_finite(headers: Iterable[TensorHeader]) -> list[str]:
    """Return the names of the checkpoint's tensors that are not finite."""
    found = []
    for header in headers:
        with safe_open(header.file, framework="pt") as file:
            if not is_finite(file.get_tensor(header.name)):
                found.append(header.name)
    return found
