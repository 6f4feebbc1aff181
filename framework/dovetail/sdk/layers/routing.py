"""How a router chooses among experts, as data. Importing this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Score = Literal["softmax", "sigmoid", "chosen"]
"""What a logit becomes: its share among all experts, a number of its own, or its share among the chosen ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a router chooses.

    Attributes:
        num: E.
        top_k: K.
        score: Of an expert.
        normalise: Whether the shares of the chosen ones are divided by their sum.
        least: Added to that sum, so that it is never zero.
        scale: Factor of the shares.
        bias: Whether logits have a bias.
        correction: Whether a bias of each expert joins its score for the choice, and not for its share.
        groups: G, of which `top_groups` stay in the choice; 1: no groups.
        top_groups: See there.
        group_score: What a group is chosen by: the sum of its best two scores, or its best.
        is_wide: Whether logits are computed in float32, whatever the model's dtype.
    """

    num: int
    top_k: int
    score: Score = "softmax"
    normalise: bool = True
    least: float = 1e-20
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best_two"] = "best_two"
    is_wide: bool = False

    def __str__(self) -> str:
        """As tables and errors show it: what is not as usual."""
        said = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        return ",".join(f"{name}={value}" for name, value in said.items())
