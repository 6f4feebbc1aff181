"""Limits that an operator has set are kept, and what they prevent is said; nothing tries to raise them."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import Harness
from server_tiny import TEMPLATE, write_model

from dovetail.base.forks import ForkServer, ForkStartError
from dovetail_server.reading.wire import LARGE

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "x" * (LARGE + 1000)}]}
UNDER_LIMITS = """
import json, os, resource, signal
from dovetail_server.reading.child import set_limits
from dovetail_server.reading.wire import BodyJob
from dovetail.grammar.compile.memory import address_space
addresses = address_space()
resource.setrlimit(resource.RLIMIT_AS, (addresses + {soft}, {hard}))
resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
if os.geteuid() == 0:
    os.setuid(65534)  # root may raise a hard limit
fits, has_time = set_limits(BodyJob(task="", num_bytes=1 << 20, is_line=False, cpu_s=60.0), addresses, 1)
assert not has_time and 0 < signal.setitimer(signal.ITIMER_PROF, 0)[0] < 3
print(json.dumps([fits, addresses, resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_CPU)]))
"""


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("soft", "is_hard", "fits"),
    [(1 << 27, True, False), (1 << 27, False, False), (1 << 42, False, True)],
    ids=["ulimit -v", "soft", "wide"],
)
def test_a_body_s_process_only_lowers_limits(soft: int, is_hard: bool, fits: bool) -> None:
    """Under hard limits an unprivileged process reads on, and knows whether it has the memory that is meant."""
    code = UNDER_LIMITS.format(soft=soft, hard=f"addresses + {soft}" if is_hard else 1 << 43)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found, addresses, memory, cpu = json.loads(done.stdout)
    assert found == fits
    assert memory[1] == (addresses + soft if is_hard else 1 << 43)
    assert memory[0] == addresses + soft if not fits else memory[0] < addresses + soft
    assert cpu == [3, 3]


def test_copies_that_ended_while_they_waited_cost_no_request(make_harness: Callable[..., Harness]) -> None:
    """However many they are: another one is started."""
    harness = make_harness(context_len=1 << 20)
    assert harness.post(CHAT, BODY).status_code == 200
    template = harness.state.bodies._template
    assert template is not None
    server = template.get(60)
    while (waiting := server.take_waiting()) is not None:
        waiting.close()
    for _ in range(5):
        ours, theirs = socket.socketpair()
        theirs.close()
        server.put_back(ours, 9)
    assert harness.post(CHAT, BODY).status_code == 200


@pytest.mark.full
def test_a_short_limit_of_processor_time_is_not_the_client_s_fault(tmp_path: Path) -> None:
    """What reads a request ends before the system ends it, and names the limit; what is read in time is answered."""
    folder = write_model(tmp_path)
    busy = (
        '{% if messages[0].content == "busy" %}{% for i in range(99999) %}{{ range(999) | sort | length }}{% endfor %}'
    )
    (folder / "chat_template.jinja").write_text(f"{busy}{{% endif %}}{TEMPLATE}")
    harness = Harness(folder, context_len=1 << 20)
    harness.reset()
    try:
        assert harness.post(CHAT, BODY).status_code == 200
        children = psutil.Process().children(recursive=True)
        commands = [(child, child.as_dict(["cmdline"], [])["cmdline"]) for child in children]  # one may have ended
        (forking,) = [child for child, command in commands if "dovetail_server.reading.child" in command][:1]
        most = int(sum(forking.cpu_times()[:2])) + 2
        harness.state.bodies._cpu_s = most + 1.0
        resource.prlimit(forking.pid, resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        for copy in forking.children():
            copy.kill()  # those that wait have no such limit
        refused = harness.post(CHAT, {**BODY, "messages": [{"role": "user", "content": "busy"}]})
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["code"] == "server_limits"
        assert "ulimit -t" in refused.json()["error"]["message"]
        assert harness.post(CHAT, BODY).status_code == 200
    finally:
        harness.close()


def test_a_start_says_what_a_limit_of_processor_time_does() -> None:
    """Nothing that the server does can keep the system from ending it then."""
    code = "import resource; from dovetail_server.cli.serve import cpu_notice as n; assert n() is None; "
    code += "resource.setrlimit(resource.RLIMIT_CPU, (77, 77)); print(n())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "may use 77 s of processor time (ulimit -t, LimitCPU)" in done.stdout
    assert done.stdout.count("\n") == 1


def test_a_server_that_cannot_read_large_bodies_is_not_ready(
    make_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the process for them does not start, probes say so and why; each tries again, and the server recovers."""
    harness = make_harness(context_len=1 << 20)

    def fails(self: ForkServer, start: Any) -> None:
        self.kill()
        raise ForkStartError("it has no memory")

    with monkeypatch.context() as patch:
        patch.setattr(ForkServer, "load", fails)
        assert harness.post(CHAT, BODY).status_code == 503
        probe = harness.get("/readyz")
        assert probe.status_code == 503
        assert probe.json()["reason"] == "the process that reads requests could not be started: it has no memory"
        assert harness.get("/livez").status_code == 200
        small = {**BODY, "messages": [{"role": "user", "content": "hi"}]}
        assert harness.post(CHAT, small).status_code == 200
    until = time.monotonic() + 60
    while harness.get("/readyz").status_code != 200 and time.monotonic() < until:
        time.sleep(0.05)
    assert harness.get("/readyz").status_code == 200
    assert harness.post(CHAT, BODY).status_code == 200
