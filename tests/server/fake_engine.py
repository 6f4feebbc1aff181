"""The scripted engine under the name that the server's tests use."""

from __future__ import annotations

from dovetail.contracts.errors import ConfigError
from dovetail_testing.scripted import Script, ScriptedEngine

__all__ = ["FakeEngine", "Script", "failing"]

FakeEngine = ScriptedEngine


def failing(message: str) -> ConfigError:
    """An error as the engine reports one of the user's."""
    return ConfigError(message)
