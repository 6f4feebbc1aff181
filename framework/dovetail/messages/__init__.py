"""What travels between an engine and its client: msgpack structs, never pickle.

Client to engine: `Submit`, `Abort`, `Control`. Engine to client: `Working` now and then, `Ready` or `EngineFailed`
once, then `Admitted`, `StepDeltas` and `ControlReply`s. What goes on between an engine and its devices is in
`messages.step`.
"""

from __future__ import annotations

from dovetail.messages.outputs import (
    OUT_OF_MEMORY,
    POISON,
    Admitted,
    CacheChanged,
    ControlReply,
    EngineFailed,
    EngineInfo,
    Finish,
    FromEngine,
    Ready,
    Stats,
    StepDeltas,
    Times,
    TokenDelta,
    Working,
)
from dovetail.messages.requests import (
    BACKGROUND,
    MAX_PROFILE_STEPS,
    Abort,
    Control,
    GrammarOption,
    MarkedThinking,
    Marker,
    MessageThinking,
    ProfileSpec,
    Submit,
    Thinking,
    ToEngine,
)
from dovetail.messages.sampling import (
    Pool,
    SamplerParams,
    TokenLogprob,
    TopLogprob,
)

__all__ = [
    "BACKGROUND",
    "MAX_PROFILE_STEPS",
    "OUT_OF_MEMORY",
    "POISON",
    "Abort",
    "Admitted",
    "CacheChanged",
    "Control",
    "ControlReply",
    "EngineInfo",
    "EngineFailed",
    "Finish",
    "FromEngine",
    "GrammarOption",
    "MarkedThinking",
    "Marker",
    "MessageThinking",
    "Pool",
    "ProfileSpec",
    "Ready",
    "SamplerParams",
    "Stats",
    "StepDeltas",
    "Submit",
    "Thinking",
    "Times",
    "ToEngine",
    "TokenDelta",
    "TokenLogprob",
    "TopLogprob",
    "Working",
]
