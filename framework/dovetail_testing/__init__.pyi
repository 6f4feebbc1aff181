"""The names that the package offers, each once, for type checkers and the package itself."""

from dovetail_testing.conformance.api import ApiConformance as ApiConformance
from dovetail_testing.conformance.attention import AttentionBackendConformance as AttentionBackendConformance
from dovetail_testing.conformance.checkpoint import CheckpointConformance as CheckpointConformance
from dovetail_testing.conformance.device import DeviceConformance as DeviceConformance
from dovetail_testing.conformance.grammar import GrammarBackendConformance as GrammarBackendConformance
from dovetail_testing.conformance.hooks import HooksConformance as HooksConformance
from dovetail_testing.conformance.kernels import KernelSetConformance as KernelSetConformance
from dovetail_testing.conformance.logits import LogitsProcessorConformance as LogitsProcessorConformance
from dovetail_testing.conformance.model import ModelConformance as ModelConformance
from dovetail_testing.conformance.parsers import (
    ReasoningParserConformance as ReasoningParserConformance,
    ToolParserConformance as ToolParserConformance,
)
from dovetail_testing.conformance.processor import ImageProcessorConformance as ImageProcessorConformance
from dovetail_testing.conformance.quantization import QuantizationConformance as QuantizationConformance
from dovetail_testing.conformance.scheduling import SchedulePolicyConformance as SchedulePolicyConformance
from dovetail_testing.conformance.speculation import SpeculatorConformance as SpeculatorConformance
from dovetail_testing.run import (
    Report as Report,
    check_class as check_class,
    conformance_class as conformance_class,
    run_conformance as run_conformance,
)
from dovetail_testing.samples import GrammarSample as GrammarSample, Sample as Sample
from dovetail_testing.site import FakeSite as FakeSite
