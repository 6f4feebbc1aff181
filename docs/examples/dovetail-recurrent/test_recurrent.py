"""The conformance kit, against the same model in plain torch."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dovetail_testing import ModelConformance

spec = importlib.util.spec_from_file_location("recurrent_reference", Path(__file__).with_name("recurrent_reference.py"))
assert spec is not None
assert spec.loader is not None
reference = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


class TestRecurrent(ModelConformance):
    name = "RecurrentForCausalLM"
    configs = (
        {},
        {"chunk_size": 1, "conv_L_cache": 2},
        {"full_attn_idxs": [0, 3], "num_hidden_layers": 4, "chunk_size": 5, "conv_L_cache": 4},
    )

    def make_checkpoint(self, folder: Path, **changes: Any) -> Path:
        """Write a tiny random checkpoint."""
        checkpoint: Path = reference.write_checkpoint(folder, **changes)
        return checkpoint

    def reference_logits(self, folder: Path, ids: Sequence[int]) -> Tensor:
        """Compute them in plain torch."""
        found: Tensor = reference.logits(folder, ids)
        return found
