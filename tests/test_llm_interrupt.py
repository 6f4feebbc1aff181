"""Ctrl-C and errors in a call of `LLM`: its requests end, nobody else's do, and the `LLM` goes on."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from warm_starts import CODE

from dovetail import LLM, SamplingParams
from dovetail_offline import llm

LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5)
SCRIPT = """
import os, signal, threading, time
from dovetail import LLM, SamplingParams

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started this in the background

def stats(model):
    return model._call(model._client.control("stats"))

def interrupt(model):
    for _ in range(2000):
        if stats(model)["num_running"] >= 4:
            break
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

with LLM(max_total_tokens=16384) as model:
    long = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
    for _ in range(2):
        threading.Thread(target=interrupt, args=[model]).start()
        try:
            model.generate(["one", "two", "three", "four", "five"], long)
        except KeyboardInterrupt:
            print("interrupted")
        for _ in range(500):
            left = stats(model)
            if not (left["num_running"] or left["num_queued"] or left["num_used_tokens"]):
                break
            time.sleep(0.01)
        print(left["num_running"], left["num_queued"], left["num_used_tokens"])
    [reply] = model.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=5))
    print(reply.text)
"""


def test_ctrl_c_ends_the_work_and_the_model_serves_on() -> None:
    """A real SIGINT, twice: `KeyboardInterrupt` each time, nothing is held, and the next call is served."""
    done = subprocess.run([sys.executable, CODE, SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:4] == ["interrupted", "0 0 0", "interrupted", "0 0 0"]
    assert "Paris" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def model() -> Any:
    """The demo model."""
    with LLM(max_total_tokens=16384) as made:
        yield made


def settled(model: LLM) -> tuple[int, int, int]:
    """What runs, waits and is held, once that is nothing, or after a while."""
    found = (-1, -1, -1)
    for _ in range(500):
        stats = model._call(model._client.control("stats"))
        found = (stats["num_running"], stats["num_queued"], stats["num_used_tokens"])
        if not any(found):
            break
        time.sleep(0.01)
    return found


def test_an_error_in_the_progress_bar_ends_that_call_alone(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised to the caller, whose other requests are aborted; a call of another thread gets its replies."""

    class Bar(llm.tqdm):  # type: ignore[type-arg,name-defined,misc]
        def update(self, n: float | None = 1) -> bool | None:
            if not self.disable:
                raise RuntimeError("the terminal is gone")
            return super().update(n)

    monkeypatch.setattr(llm, "tqdm", Bar)
    replies: list[Any] = []
    other = threading.Thread(
        target=lambda: replies.extend(
            model.generate(["a", "b"], SamplingParams(temperature=0, max_tokens=300, ignore_eos=True), use_tqdm=False)
        )
    )
    other.start()
    with pytest.raises(RuntimeError, match="the terminal is gone"):
        model.generate(["one", "two", "three"], [SHORT, LONG, LONG], use_tqdm=True)
    other.join(60)
    assert [len(reply.token_ids) for reply in replies] == [300, 300]
    assert settled(model) == (0, 0, 0)


def test_two_threads_call_at_once(model: LLM) -> None:
    """Each gets its own replies, those of a call of its own."""
    prompts = ["The capital of France is", "The capital of Japan is"]
    want = [model.generate(prompt, SHORT)[0].text for prompt in prompts]
    found: dict[int, list[str]] = {0: [], 1: []}

    def call(which: int) -> None:
        for _ in range(5):
            found[which].append(model.generate(prompts[which], SHORT, use_tqdm=False)[0].text)

    threads = [threading.Thread(target=call, args=[which]) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {0: [want[0]] * 5, 1: [want[1]] * 5}
