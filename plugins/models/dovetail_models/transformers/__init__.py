"""Any decoder that transformers has, on its own modelling code and Dovetail's cache, batches and attention backends.

For architectures that no other plugin serves (`--model-impl auto`), or on request (`--model-impl transformers`). What a
model needs of the cache is found by calling it once without weights, see `probe.py`; what cannot be served is refused
by name. Code that comes with a checkpoint is never run.
"""

from dovetail_models.transformers.plugin import TransformersModel

__all__ = ["TransformersModel"]
