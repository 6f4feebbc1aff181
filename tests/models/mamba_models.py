"""Tiny random checkpoints of Mamba 2 and 1 whose decays are weak: see `delta_models`."""

from __future__ import annotations

from delta_models import make_delta as make_mamba

__all__ = ["make_mamba"]
