"""The conformance kit, with this package's own packing."""

from collections.abc import Mapping
from types import MappingProxyType

import dovetail_nibble
from torch import Tensor

from dovetail_testing import QuantizationConformance


class TestNibble(QuantizationConformance):
    name = "nibble"
    config = MappingProxyType({"quant_method": "nibble"})
    has_experts = False

    def pack(self, weight: Tensor) -> Mapping[str, Tensor]:
        return dovetail_nibble.pack(weight)

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return dovetail_nibble.unpack(tensors[".weight_packed"], tensors[".weight_scale"])
