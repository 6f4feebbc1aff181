"""Mistral: Llama with a sliding window on every layer, if its config has one.

Source: arXiv:2310.06825.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dovetail_models.llama import Llama


class Mistral(Llama):
    """Serves `MistralForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("MistralForCausalLM",)
    batch_invariant = True
    has_windows = None
