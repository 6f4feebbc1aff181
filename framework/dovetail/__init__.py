"""Dovetail: an LLM server whose every part is a plugin. `LLM` runs a model in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail_offline.llm import LLM
    from dovetail_offline.types import Classification, GeneratedReply, PromptEmbedding, Ranked, SamplingParams, Score

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Classification",
    "GeneratedReply",
    "PromptEmbedding",
    "Ranked",
    "SamplingParams",
    "Score",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import the offline API on first use: `import dovetail` alone must stay light."""
    if name in set(__all__) - {"__version__"}:
        from dovetail_offline import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
