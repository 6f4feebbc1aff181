"""The plugin core: names, metadata scan, registry, plan, loader and hooks.

```python
registry = Registry.scan()                                   # metadata only
plan = make_plan(registry, model="Qwen3ForCausalLM", attention_backend="auto", device="cpu")
loaded = load(plan, "engine")                                # in each process, with its role
for planned, backend_class in loaded.candidates("attention_backend"): ...
```

Importing this package imports no plugin, no torch and no pydantic; what it offers is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.plugins.kinds import KINDS, ROLES
    from dovetail.plugins.loader import LoadedPlugins, load
    from dovetail.plugins.manager import HookManager
    from dovetail.plugins.plan import PlannedPlugin, PluginPlan, make_plan
    from dovetail.plugins.records import PluginRecord, PluginState
from dovetail.plugins.registry import Registry

__all__ = [
    "KINDS",
    "ROLES",
    "HookManager",
    "LoadedPlugins",
    "PlannedPlugin",
    "PluginPlan",
    "PluginRecord",
    "Registry",
    "PluginState",
    "load",
    "make_plan",
]

_HOME = {
    "LoadedPlugins": "loader",
    "load": "loader",
    "HookManager": "manager",
    "KINDS": "kinds",
    "ROLES": "kinds",
    "PlannedPlugin": "plan",
    "PluginPlan": "plan",
    "make_plan": "plan",
    "PluginRecord": "records",
    "Registry": "registry",
    "PluginState": "records",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
