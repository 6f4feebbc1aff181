"""The plugin core: names, metadata scan, registry, plan, loader and hooks.

```python
registry = Registry.scan()                                   # metadata only
plan = make_plan(registry, model="Qwen3ForCausalLM", attention_backend="auto", device="cpu")
loaded = load(plan, "engine")                                # in each process, with its role
for planned, backend_class in loaded.candidates("attention_backend"): ...
```

Importing this package imports no plugin, no torch and no pydantic; what it offers is imported on first use.
"""

from dovetail.contracts.offered import offered

__all__, __getattr__ = offered(__name__, __file__)
