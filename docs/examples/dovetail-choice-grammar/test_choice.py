"""The conformance kit, with a sample where one string begins another."""

from dovetail.contracts import GrammarSpec, Kind
from dovetail_testing import GrammarBackendConformance, GrammarSample


class TestChoice(GrammarBackendConformance):
    name = "choice"
    samples = (
        GrammarSample(GrammarSpec(kind=Kind.CHOICE, source='["no", "not", "né"]'), ["no", "not", "né"], ["n", "nott"]),
    )
