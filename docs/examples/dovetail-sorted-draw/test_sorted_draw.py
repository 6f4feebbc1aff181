"""The conformance kit, and a model that is served with it."""

from dovetail import LLM, SamplingParams
from dovetail_testing import KernelSetConformance


class TestSortedDraw(KernelSetConformance):
    name = "sorted-draw"
    device = "cpu"


def test_a_model_draws_the_same() -> None:
    """The bundled model's seeded reply is that of plain torch, with filters and without."""
    replies = []
    for kernels in (["plain"], ["sorted-draw"]):
        with LLM(kernels=kernels, device="cpu", max_total_tokens=2048) as llm:
            for more in ({}, {"top_p": 0.8, "top_k": 20}):
                params = SamplingParams(temperature=1.0, max_tokens=12, seed=7, **more)
                replies.append(llm.generate("Hello", params)[0].text)
    assert replies[:2] == replies[2:]
