"""`dovetail top`: numbers of a server as people read them."""

from __future__ import annotations

import pytest

from dovetail_server.cli import main as dovetail
from dovetail_server.terminal.top import Load
from dovetail_server.testing import ScriptedServer

TEXT = """\
# TYPE dovetail_requests_running gauge
dovetail_requests_running{model_name="a"} 3.0
# TYPE dovetail_engine_step gauge
dovetail_engine_step{model_name="a"} 100.0
# TYPE dovetail_time_to_first_token_seconds histogram
dovetail_time_to_first_token_seconds_bucket{le="0.1",model_name="a"} 1.0
dovetail_time_to_first_token_seconds_bucket{le="1.0",model_name="a"} 3.0
dovetail_time_to_first_token_seconds_bucket{le="+Inf",model_name="a"} 4.0
dovetail_time_to_first_token_seconds_count{model_name="a"} 4.0
dovetail_time_to_first_token_seconds_sum{model_name="a"} 2.0
"""


def test_numbers_rates_and_quantiles() -> None:
    """Gauges as they are, counters by the second, histograms by straight lines; what is unknown is None."""
    before, now = Load.read(TEXT, 10.0), Load.read(TEXT.replace("100.0", "150.0"), 12.0)
    assert now.get("requests_running") == 3
    assert now.get("requests_queued") is None
    assert now.rate("engine_step", before) == 25
    assert before.rate("engine_step", now) is None
    assert now.rate("engine_step", None) is None
    assert now.quantile("time to first token", 0.5) == pytest.approx(0.1 + 0.9 / 2)
    assert now.quantile("time to first token", 0.99) == 1.0
    assert now.quantile("inter-token latency", 0.5) is None


def test_one_look(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    """`--once` prints what there is; a server that is away, or an address that is none, is said to be."""
    server.chat("Some text")
    server.get("/livez")
    assert dovetail(["top", "--url", server.base, "--once"]) == 0
    shown = capsys.readouterr().out
    for part in ("tokens/s", "1 requests", "time to first token", "queue time", "KV cache"):
        assert part in shown
    assert dovetail(["top", "--url", "http://127.0.0.1:9", "--once"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert dovetail(["top", "--url", "nonsense", "--once"]) == 2
