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
        Kind,
        Relax,
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
    from dovetail.contracts.observers import LoadStats, RequestEnd, RequestObserver, RequestStart, StatLogger
    from dovetail.contracts.options import Configurable
    from dovetail.contracts.reasoning import (
        ContentDelta,
        Event,
        FormatSpec,
        Markers,
        OutputParser,
        ParserRequest,
        ReasoningDelta,
        ReasoningGate,
        ReasoningParser,
        State,
        TemplateView,
        TokenizerView,
    )
    from dovetail.contracts.tools import (
        Malformed,
        NewCall,
        ToolArgs,
        ToolBody,
        ToolEnd,
        ToolEvent,
        ToolFormat,
        ToolParser,
        ToolStart,
    )

__all__ = [
    "AttentionBackend",
    "AttentionCaps",
    "AttentionLayer",
    "BuildContext",
    "CausalLM",
    "CompiledGrammar",
    "Configurable",
    "ContentDelta",
    "Event",
    "FormatSpec",
    "ForwardBatch",
    "GrammarBackend",
    "GrammarLimits",
    "GrammarMatcher",
    "GrammarSpec",
    "KVPool",
    "Kind",
    "LoadStats",
    "Malformed",
    "Markers",
    "ModelConfig",
    "ModelPlugin",
    "NewCall",
    "OutputParser",
    "ParserRequest",
    "Phase",
    "ReasoningDelta",
    "ReasoningGate",
    "ReasoningParser",
    "Relax",
    "RequestEnd",
    "RequestObserver",
    "RequestStart",
    "RopeConfig",
    "StatLogger",
    "State",
    "Support",
    "SupportLevel",
    "TemplateView",
    "TokenizerView",
    "ToolArgs",
    "ToolBody",
    "ToolEnd",
    "ToolEvent",
    "ToolFormat",
    "ToolParser",
    "ToolStart",
    "Vocabulary",
    "WeightRule",
]

_HOME = {
    "BuildContext": "model",
    "CausalLM": "model",
    "ModelConfig": "model",
    "ModelPlugin": "model",
    "RopeConfig": "model",
    "WeightRule": "model",
    "AttentionBackend": "attention",
    "AttentionCaps": "attention",
    "AttentionLayer": "attention",
    "ForwardBatch": "attention",
    "KVPool": "attention",
    "Phase": "attention",
    "LoadStats": "observers",
    "RequestEnd": "observers",
    "RequestObserver": "observers",
    "RequestStart": "observers",
    "StatLogger": "observers",
    "Configurable": "options",
    "ContentDelta": "reasoning",
    "Event": "reasoning",
    "FormatSpec": "reasoning",
    "Markers": "reasoning",
    "OutputParser": "reasoning",
    "ParserRequest": "reasoning",
    "ReasoningDelta": "reasoning",
    "ReasoningGate": "reasoning",
    "ReasoningParser": "reasoning",
    "State": "reasoning",
    "TemplateView": "reasoning",
    "TokenizerView": "reasoning",
    "Malformed": "tools",
    "NewCall": "tools",
    "ToolArgs": "tools",
    "ToolBody": "tools",
    "ToolEnd": "tools",
    "ToolEvent": "tools",
    "ToolFormat": "tools",
    "ToolParser": "tools",
    "ToolStart": "tools",
    "CompiledGrammar": "grammar",
    "GrammarBackend": "grammar",
    "GrammarLimits": "grammar",
    "GrammarMatcher": "grammar",
    "GrammarSpec": "grammar",
    "Kind": "grammar",
    "Relax": "grammar",
    "Support": "grammar",
    "SupportLevel": "grammar",
    "Vocabulary": "grammar",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
