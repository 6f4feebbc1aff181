"""Keeps transformers to its own code for layers that fold tokens into a state.

Where one of these packages happens to be installed, transformers calls its kernels instead: other sums in another
order, and states that are written in place. The same model would give other answers on another machine, and copies of
states would not be what their requests computed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = ("fla", "mamba_ssm", "causal_conv1d")
"""Those that transformers looks for when it imports a model's code."""


@contextmanager
def reference_only() -> Iterator[None]:
    """Inside, none of these packages can be imported: a model whose code is imported here does without them."""
    imported = {name: sys.modules.get(name) for name in PACKAGES}
    sys.modules.update(dict.fromkeys(PACKAGES))  # type: ignore[arg-type]  # None: there is no such module
    try:
        yield
    finally:
        for name, module in imported.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
