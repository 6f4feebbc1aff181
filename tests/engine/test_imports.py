"""An engine's process imports its core first: nothing that it imports needs something else to be there before."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.client import launch
from dovetail.messages import EngineInfo
from dovetail.plugins import Registry, make_plan
from dovetail_server.supervision import engine_main, imports


@pytest.mark.parametrize(
    "module", ["dovetail.engine.core", "dovetail.grammar.matching.constraint", "dovetail.grammar.compile.child"]
)
def test_a_module_can_be_the_first(module: str) -> None:
    """No circle of imports is hidden by whoever comes before."""
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]


def test_imports_stay_out_of_the_collectors_rounds() -> None:
    """No round takes place while a process imports what it keeps, and later ones do not look at it."""
    code = (
        "import gc; from dovetail_server.supervision import imports\n"
        "def rounds(): return sum(generation['collections'] for generation in gc.get_stats())\n"
        "with imports.for_good():\n"
        "    before = rounds(); kept = [[] for _ in range(100_000)]; print(rounds() - before)\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
        "gc.disable()\n"
        "with imports.for_good(): pass\n"
        "print(gc.isenabled())\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "0\nTrue True\nFalse\n"


def test_what_a_start_has_made_stays_out_of_the_collectors_rounds() -> None:
    """Garbage of the start is freed, the rest is not looked at again, and rounds over the youngest are rarer."""
    code = (
        "import gc, weakref; from dovetail_server.supervision import imports\n"
        "class Knot: pass\n"
        "knot = Knot(); knot.me = knot; gone = weakref.ref(knot); del knot\n"
        "kept = [[] for _ in range(100_000)]; imports.started()\n"
        "print(gone() is None, gc.get_freeze_count() > 100_000, gc.get_threshold()[0] == imports.GC_YOUNG)\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True True True\n"


def test_an_engine_that_is_ready_has_taken_its_start_out_of_the_collectors_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Vocabulary and model are made, then they are taken out, then the client is told, then requests are served."""
    said: list[str] = []

    def make_engine(*_: Any) -> Any:
        said.append("made")
        warm = SimpleNamespace(wait=lambda _: said.append("warm"))
        service = SimpleNamespace(warm_up=lambda: warm)
        return SimpleNamespace(grammars=SimpleNamespace(service=service), info=engine_info(), why_slow=str)

    monkeypatch.setattr(launch, "make_engine", make_engine)
    monkeypatch.setattr(imports, "started", lambda: said.append("taken out"))
    monkeypatch.setattr(engine_main, "run_loop", lambda *_: said.append("serves"))
    monkeypatch.setattr(engine_main.log, "setup", lambda *_, **__: None)
    transport: Any = SimpleNamespace(send=lambda message: said.append(type(message).__name__))
    plan = make_plan(Registry.scan(), schedule_policy="fcfs")
    engine_main.serve(
        transport, engine_main.Start(settings={"model_path": "."}, plan=plan, log_level="info", hang_s=60)
    )
    assert [word for word in said if word != "Working"] == ["made", "warm", "taken out", "Ready", "serves"]


def engine_info() -> EngineInfo:
    """Facts of no engine."""
    return EngineInfo(
        architecture="None", dtype="float32", device="cpu", vocab_size=8, hidden_size=1, context_len=8,
        max_total_tokens=8, max_running_requests=1, page_size=1, attention_backend="none", weight_bytes=0, kv_bytes=0,
        load_s=0.0,
    )  # fmt: skip


def test_a_process_ends_whatever_its_destructors_wait_for() -> None:
    """At that point no Python runs that could notice: the kernel ends it."""
    hangs = "import atexit, time; from dovetail_server.supervision import imports; imports.END_S = 0.2; "
    hangs += "atexit.register(time.sleep, 60); imports.ending()"
    ran = subprocess.run([sys.executable, "-c", hangs], check=False, timeout=30)
    assert ran.returncode == -signal.SIGALRM
