"""Puts an engine together: the engine itself, and the executor that computes its steps."""

from __future__ import annotations

from dovetail.engine.core import EngineCore
from dovetail.executor.group import GroupExecutor
from dovetail.executor.local import LocalExecutor
from dovetail.plugins import LoadedPlugins
from dovetail.settings import EngineSettings


def make_engine(settings: EngineSettings, plugins: LoadedPlugins) -> EngineCore:
    """Load the model, and make the engine over it. Importing this module imports torch.

    Raises:
        ConfigError: The settings, the model or a plugin is at fault.
    """
    if settings.tensor_parallel_size > 1:
        return EngineCore(settings, plugins, GroupExecutor(settings, plugins))
    return EngineCore(settings, plugins, LocalExecutor(settings, plugins))
