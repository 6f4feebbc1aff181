"""All that a plugin author reads: one module per kind of plugin, and this package offers the names of all.

Importing it imports neither torch nor pydantic, and each contract only when one of its names is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.contracts.attention import (
        AttentionBackend,
        AttentionCaps,
        AttentionLayer,
        ForwardBatch,
        KVPool,
        Phase,
    )
    from dovetail.contracts.grammar import (
        CompiledGrammar,
        GrammarBackend,
        GrammarLimits,
        GrammarMatcher,
        GrammarSpec,
        Support,
        SupportLevel,
        Vocabulary,
    )
    from dovetail.contracts.model import (
        BuildContext,
        CausalLM,
        ModelConfig,
        ModelPlugin,
        RopeConfig,
        WeightRule,
    )

__all__ = [
    "AttentionBackend",
    "AttentionCaps",
    "AttentionLayer",
    "BuildContext",
    "CausalLM",
    "CompiledGrammar",
    "ForwardBatch",
    "GrammarBackend",
    "GrammarLimits",
    "GrammarMatcher",
    "GrammarSpec",
    "KVPool",
    "ModelConfig",
    "ModelPlugin",
    "Phase",
    "RopeConfig",
    "Support",
    "SupportLevel",
    "Vocabulary",
    "WeightRule",
]

_MODULES = ("model", "attention", "grammar")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            contract = import_module(f"{__name__}.{module}")
            if getattr(contract.__dict__.get(name), "__module__", None) == contract.__name__:
                return contract.__dict__[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
