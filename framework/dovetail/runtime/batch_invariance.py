"""What `--batch-invariant` needs of a model and a device, asked before weights are read."""

from __future__ import annotations

import torch

from dovetail.base.settings import EngineSettings
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.model import ModelPlugin
from dovetail.runtime.device.devices import device_of


def claims(plugin: type[ModelPlugin]) -> bool:
    """Whether a model says that its tokens do not depend on what is computed with them; a subclass says it itself."""
    return bool(vars(plugin).get("batch_invariant", False))


def check_model(plugin: type[ModelPlugin], config: ModelConfig, device: torch.device, settings: EngineSettings) -> None:
    """Refuse what would take part in a step and is not batch-invariant.

    The attention backend is asked apart, and kernels where they are bound.

    Raises:
        ConfigError: There is such a thing; all of them are named.
    """
    if not settings.batch_invariant:
        return
    reasons = []
    if (why := plugin.why_not_invariant(config)) is not None:
        reasons.append(why)
    found = device_of(device)
    if "sums" in found.by_rows and settings.tensor_parallel_size > 1:
        reasons.append(f"sums of ranks on {found.kind} choose their kernels by rows; use --tensor-parallel-size 1")
    if reasons:
        raise ConfigError(f"--batch-invariant: {'; '.join(reasons)}")
