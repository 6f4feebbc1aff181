"""Which checkpoints let float8 products round their rows, and how a user says otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.contracts.quantization import Stored
from dovetail_backends.quantization.compressed_tensors import CompressedTensors
from dovetail_backends.quantization.fp8 import Fp8, Fp8Options, RoundsActivations
from dovetail_backends.quantization.int8 import Int8
from dovetail_backends.quantization.modelopt import Modelopt

FLOAT = {"type": "float", "num_bits": 8, "strategy": "channel"}
INTEGERS = {"type": "int", "num_bits": 8, "strategy": "channel"}


def groups(*schemes: tuple[Any, Any]) -> dict[str, Any]:
    """A configuration of compressed-tensors with weights and inputs of each group."""
    made = {str(i): {"weights": weights, "input_activations": given} for i, (weights, given) in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "config_groups": made}


@pytest.mark.parametrize(
    ("kind", "config", "rounds"),
    [
        (Fp8, {}, True),  # quantised while it loads
        (Fp8, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, True),
        (Fp8, {"quant_method": "fp8", "activation_scheme": "static"}, True),
        (Fp8, {"quant_method": "fp8"}, False),
        (Fp8, {"quant_method": "fp8", "activation_scheme": None}, False),
        (CompressedTensors, groups((FLOAT, FLOAT)), True),
        (CompressedTensors, groups((FLOAT, None)), False),
        (CompressedTensors, groups((FLOAT, FLOAT), (FLOAT, None)), False),
        (CompressedTensors, groups((FLOAT, FLOAT), (INTEGERS, None), (None, FLOAT)), True),
        (CompressedTensors, groups((FLOAT, INTEGERS)), False),
        (Modelopt, {"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        (Modelopt, {"quant_method": "modelopt", "quantization": {"quant_algo": "fp8_per_channel_per_token"}}, True),
        (Modelopt, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, False),
        (Modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, False),
        (Int8, {}, False),
    ],
)
def test_a_checkpoint_says_it(kind: type[RoundsActivations], config: dict[str, Any], rounds: bool) -> None:
    """And a user's word stands above it, where a method has the option."""
    found = kind(config, Stored({}, is_known=False))
    assert found.activations() == (torch.float8_e4m3fn if rounds else None)
    if kind.Options is Fp8Options:
        for wish, want in (("float8", torch.float8_e4m3fn), ("model", None)):
            chosen = type(kind.__name__, (kind,), {"options": Fp8Options(activations=wish)})  # type: ignore[arg-type]
            assert chosen(config, Stored({}, is_known=False)).activations() == want
