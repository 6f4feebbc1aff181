"""The conformance kit, and what the desk counts."""

import dovetail_desk

from dovetail.contracts import LoadStats, RequestEnd, RequestStart
from dovetail_testing import HooksConformance


class TestDesk(HooksConformance):
    name = "desk"


def test_counts_and_health():
    """Requests are counted, the last ones kept, and a long queue is complained about."""
    desk = dovetail_desk.Desk(dovetail_desk.DeskOptions(keep=1, max_queued=2))
    for name in ("a", "b"):
        desk.request_started(RequestStart(request_id=name, num_choices=1, num_prompt_tokens=3))
        end = RequestEnd(request_id=name, num_prompt_tokens=3, num_completion_tokens=4, finish_reasons=(), seconds=0.1)
        desk.request_ended(end)
    assert (desk.started, desk.ended, desk.completion_tokens) == (2, 2, 8)
    assert [request["request_id"] for request in desk.last] == ["b"]
    numbers = dict.fromkeys(("num_running", "num_used_tokens", "num_cached_tokens", "max_total_tokens"), 0)
    assert desk.health() is None
    desk.log(LoadStats(step=1, num_queued=3, gen_throughput=0.0, **numbers))
    assert desk.health() == "3 requests are waiting"
