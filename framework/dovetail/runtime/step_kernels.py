"""What the runtime itself computes around a model, bound when the model is built."""

from __future__ import annotations

from typing import NamedTuple

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.kernels import OPS, Kernel, Kernels, named

IN_GRAPHS = ("begin_step", "finish_step", "check_finite", "draw_plainly", "draw_adjusted")
"""Operations that graphs hold; the others are called between them."""


class StepKernels(NamedTuple):
    """Kernels by operation of `dovetail.contracts.kernels.OPS`, which see."""

    begin_step: Kernel
    finish_step: Kernel
    check_finite: Kernel
    write_changes: Kernel
    mask_logits: Kernel
    draw: Kernel
    draw_plainly: Kernel
    draw_adjusted: Kernel


PLAIN_STEP = StepKernels(*(named(OPS[name].meaning) for name in StepKernels._fields))
"""Their meanings in plain torch."""


def bind_step(kernels: Kernels, config: ModelConfig, dtype: str, *, invariant: bool) -> StepKernels:
    """Bind what steps of a model take; `dtype` is that of its logits, as torch names it."""
    bound = []
    for name in StepKernels._fields:
        widths = {"V": config.vocab_size, "H": config.hidden_size}
        dims = {letter: widths[letter] for letter in OPS[name].dims}
        ask = kernels.ask(name, dtype if name in IN_GRAPHS else "float32", dims, {}, invariant=invariant)
        bound.append(kernels.bind(ask if name in IN_GRAPHS else ask._replace(captured=False)))
    return StepKernels(*bound)
