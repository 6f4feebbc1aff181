"""What tests of plugins need, ours and third parties'; `docs/testing.md` is its documentation.

```python
from dovetail_testing import ReasoningParserConformance, Sample

class TestAcme(ReasoningParserConformance):
    name = "acme-r2"
    samples = [Sample("<r>think</r>answer", reasoning="think", content="answer")]
```

The conformance classes need pytest; nothing else here does. What this package offers is imported on first use, so that
importing it imports neither pytest nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail_testing.conformance.api import ApiConformance
    from dovetail_testing.conformance.attention import AttentionBackendConformance
    from dovetail_testing.conformance.checkpoint import CheckpointConformance
    from dovetail_testing.conformance.device import DeviceConformance
    from dovetail_testing.conformance.grammar import GrammarBackendConformance
    from dovetail_testing.conformance.hooks import HooksConformance
    from dovetail_testing.conformance.kernels import KernelSetConformance
    from dovetail_testing.conformance.logits import LogitsProcessorConformance
    from dovetail_testing.conformance.model import ModelConformance
    from dovetail_testing.conformance.parsers import ReasoningParserConformance, ToolParserConformance
    from dovetail_testing.conformance.processor import ImageProcessorConformance
    from dovetail_testing.conformance.quantization import QuantizationConformance
    from dovetail_testing.conformance.scheduling import SchedulePolicyConformance
    from dovetail_testing.conformance.speculation import SpeculatorConformance
    from dovetail_testing.run import Report, check_class, conformance_class, run_conformance
    from dovetail_testing.samples import GrammarSample, Sample
    from dovetail_testing.site import FakeSite

__all__ = [
    "ApiConformance",
    "AttentionBackendConformance",
    "CheckpointConformance",
    "DeviceConformance",
    "FakeSite",
    "GrammarBackendConformance",
    "GrammarSample",
    "HooksConformance",
    "ImageProcessorConformance",
    "KernelSetConformance",
    "LogitsProcessorConformance",
    "ModelConformance",
    "QuantizationConformance",
    "ReasoningParserConformance",
    "Report",
    "Sample",
    "SchedulePolicyConformance",
    "SpeculatorConformance",
    "ToolParserConformance",
    "check_class",
    "conformance_class",
    "run_conformance",
]

_HOME = {
    "ApiConformance": "conformance.api",
    "AttentionBackendConformance": "conformance.attention",
    "CheckpointConformance": "conformance.checkpoint",
    "DeviceConformance": "conformance.device",
    "GrammarBackendConformance": "conformance.grammar",
    "HooksConformance": "conformance.hooks",
    "KernelSetConformance": "conformance.kernels",
    "LogitsProcessorConformance": "conformance.logits",
    "ModelConformance": "conformance.model",
    "ReasoningParserConformance": "conformance.parsers",
    "ToolParserConformance": "conformance.parsers",
    "ImageProcessorConformance": "conformance.processor",
    "QuantizationConformance": "conformance.quantization",
    "SchedulePolicyConformance": "conformance.scheduling",
    "SpeculatorConformance": "conformance.speculation",
    "Report": "run",
    "check_class": "run",
    "conformance_class": "run",
    "run_conformance": "run",
    "GrammarSample": "samples",
    "Sample": "samples",
    "FakeSite": "site",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
