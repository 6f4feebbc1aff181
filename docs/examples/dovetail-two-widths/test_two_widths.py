"""The conformance kit, against the same model in plain torch."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dovetail_testing import ModelConformance

spec = importlib.util.spec_from_file_location(
    "two_widths_reference", Path(__file__).with_name("two_widths_reference.py")
)
assert spec is not None
assert spec.loader is not None
reference = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


class TestTwoWidths(ModelConformance):
    name = "TwoWidthsForCausalLM"
    configs = (
        {},
        {"num_key_value_heads": 1, "sliding_window": 5},
        {"layer_types": ["full_attention"] * 4},
        {"num_kv_shared_layers": 2},
        {"layer_types": ["sliding_attention"] * 4, "num_hidden_layers": 2},
    )

    def make_checkpoint(self, folder: Path, **changes: Any) -> Path:
        """Write a tiny random checkpoint."""
        checkpoint: Path = reference.write_checkpoint(folder, **changes)
        return checkpoint

    def reference_logits(self, folder: Path, ids: Sequence[int]) -> Tensor:
        """Compute them in plain torch."""
        found: Tensor = reference.logits(folder, ids)
        return found
