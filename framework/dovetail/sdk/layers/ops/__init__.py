"""Operations behind the layers: `reference` in plain torch says what each means; others are ours for CUDA tensors.

Most are rows of `dovetail.contracts.kernels.OPS`, which layers bind when they are built.
"""

from __future__ import annotations

import warnings

from torch import Tensor

from dovetail.contracts.layers import Act
from dovetail.sdk.layers.ops import reference


def act_and_mul(act: Act, gate_up: Tensor) -> Tensor:
    """Return `reference.act_and_mul`, for packages that were written before layers bound their operations."""
    advice = "dovetail.sdk.layers.ops.act_and_mul ends with the next minor; bind ctx.operation('act_and_mul', …)"
    warnings.warn(advice, DeprecationWarning, stacklevel=2)
    return reference.act_and_mul(gate_up, act=act)
