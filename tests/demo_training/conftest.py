"""The training of the demo model is a package that tests import by name; here is also what they all load."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.demo import MODEL_DIR

sys.path.append(str(Path(__file__).parents[1]))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The tokenizer, as `transformers` loads it."""
    return AutoTokenizer.from_pretrained(MODEL_DIR, padding_side="left")


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, dict[str, Any]]:
    """The model, as `transformers` loads it, with what it reports about the keys."""
    model, report = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32, output_loading_info=True)
    return model.eval(), report
