"""Names what is wrong with a model whose logits differ from transformers'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.runtime.hf_config import read_config


def explain(
    model: Any,
    tensors: Mapping[str, Tensor],
    folder: Path,
    errors: Sequence[Tensor],
    logits: Sequence[Tensor],
    prompts: Sequence[Sequence[int]],
    tolerance: float,
) -> str:
    """Return the most telling fact about a model with wrong logits.

    Args:
        model: As loaded.
        tensors: Of the checkpoint.
        folder: Of the checkpoint.
        errors: Relative error of each token of each prompt.
        logits: What the model gave.
        prompts: For which.
        tolerance: Errors below are none.
    """
    worst = max(float(error.max()) for error in errors)
    transposed = _transposed(model, tensors)
    if transposed:
        return f"weights are loaded transposed: {', '.join(transposed)} (relative error {worst:.2g})"
    first = max(float(error[0]) for error in errors)
    if first > tolerance:
        return f"wrong from the first token on (relative error {first:.2g}): look at embedding, norms, MLP and head"
    if (rope := _other_rope(folder, logits, prompts, tolerance)) is not None:
        return f"wrong rope: {rope}"
    return (
        f"the first token of each prompt agrees and later ones do not (relative error {worst:.2g}): wrong rope, or "
        "wrong facts of the attention layer (heads, scale, window, cap, sinks)"
    )


def reference_model(folder: Path, **options: Any) -> Any:
    """Load transformers' model of a checkpoint: the class that its config names, without a head that is not served."""
    import transformers

    name = str(read_config(folder)["architectures"][0])
    found: Any = getattr(transformers, name, transformers.AutoModelForCausalLM)
    model = found.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options).eval()
    return model.base_model if name.endswith("ForMaskedLM") else model


@torch.inference_mode()
def outputs_of(model: Any, ids: Sequence[int]) -> Tensor:
    """Return transformers' logits `[T, V]`, or a classifier's `[1, N]`, or final hidden states `[T, H]`."""
    output = model(torch.tensor([list(ids)]))
    found: Tensor = output.last_hidden_state if getattr(output, "logits", None) is None else output.logits
    return found[0] if found.dim() == 3 else found


def _transposed(model: Any, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the square weights that stand transposed in a parameter, alone or fused with others by rows."""
    params = [param.float() for param in model.parameters() if param.dim() == 2]
    found = []
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            continue
        same = [param for param in params if param.shape[1] == tensor.shape[1]]
        turned = [param for param in params if param.shape[1] == tensor.shape[0]]
        if not any(_has_rows(param, tensor) for param in same) and any(_has_rows(p, tensor.t()) for p in turned):
            found.append(name)
    return found


def _has_rows(param: Tensor, tensor: Tensor) -> bool:
    """Whether some rows of `param` are those of `tensor`."""
    starts = (param == tensor[0].float()).all(dim=1).nonzero()
    return any(torch.equal(param[int(i) : int(i) + tensor.shape[0]], tensor.float()) for i in starts)


def _other_rope(
    folder: Path, logits: Sequence[Tensor], prompts: Sequence[Sequence[int]], tolerance: float
) -> str | None:
    """Say with which other rotary embedding transformers gives these logits, if any."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    given = dict(getattr(config, "rope_parameters", None) or {})
    others: dict[str, dict[str, Any]] = {
        "it ignores rope_theta and uses 10000": {**given, "rope_theta": 10000.0},
        "it ignores the scaling (rope_type)": {"rope_type": "default", "rope_theta": given.get("rope_theta", 10000.0)},
        "it ignores rope_theta and the scaling": {"rope_type": "default", "rope_theta": 10000.0},
    }
    for sentence, rope in others.items():
        if rope == given or not given:
            continue
        config.rope_parameters = rope
        want = outputs_of(reference_model(folder, config=config), prompts[-1])
        error = (logits[-1] - want).norm(dim=1) / want.norm(dim=1)
        if float(error.max()) <= tolerance:
            return sentence
    return None
