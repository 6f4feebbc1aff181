"""The conformance kit, and a model that is served with it."""

from dovetail import LLM, SamplingParams
from dovetail_testing import KernelSetConformance


class TestVectorNorm(KernelSetConformance):
    name = "vector-norm"
    device = "cpu"


def test_a_model_says_the_same() -> None:
    """The bundled model's greedy reply is that of plain torch, and the table says what computed it."""
    replies = []
    for kernels in (["plain"], ["vector-norm"]):
        with LLM(kernels=kernels, device="cpu", max_total_tokens=2048) as llm:
            replies.append(llm.generate("Hello", SamplingParams(temperature=0, max_tokens=12))[0].text)
    assert replies[0] == replies[1]
