"""The conformance kit, and which tokens are left."""

import torch
from dovetail_top_a import TopA, TopAParams

from dovetail.contracts import LogitsRows
from dovetail_testing import LogitsProcessorConformance


class TestTopA(LogitsProcessorConformance):
    name = "top-a"
    params = ({}, {"a": 0.7}, {"a": 0.0})
    wrong_params = ({"a": -1}, {"a": "much"})


def test_what_is_left_depends_on_how_sure_the_model_is() -> None:
    processor = TopA(3, 4, torch.device("cpu"))
    for row in range(2):
        processor.admit(row, TopAParams(a=0.5), [1], 1)
    logits = torch.tensor([[0.8, 0.15, 0.05], [0.4, 0.35, 0.25]]).log()
    processor.apply(logits, LogitsRows(torch.tensor([0, 1]), torch.tensor([0, 0])))
    assert torch.isfinite(logits).tolist() == [[True, False, False], [True, True, True]]
