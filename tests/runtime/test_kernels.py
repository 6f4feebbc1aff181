"""Kernels are collected without a launch, compiled in other processes, and found by whoever launches them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.runtime.kernels.ahead import CompiledAhead
from dovetail_backends.devices.cuda import CudaDevice
from dovetail_backends.kernels.ahead import jobs
from dovetail_backends.kernels.ahead.collect import Kernel
from dovetail_backends.kernels.ahead.jobs import CompileJobs
from dovetail_backends.kernels.ahead.worker import CompileWorker

PROGRAM = """
import json, logging, os, sys
import torch, triton
import triton.language as tl
from dovetail_backends.kernels.ahead.collect import collecting, current_target
from dovetail_backends.kernels.ahead.jobs import CompileJobs
from dovetail_backends.kernels.ahead.worker import CompileWorker
from dovetail_backends.kernels.ahead.worker import use_target
import probe_kernels

use_target("cuda", 90, 32)
triton.runtime.driver.active.get_current_stream = lambda device: 0
found = []
with collecting(found.append):
    for _ in range(3):
        results = probe_kernels.launch()
result = {"found": sorted((kernel.module, kernel.name) for kernel in found), "zeros": results}
compiler = CompileJobs()
compiler.set_target(current_target())
for kernel in {kernel.name: kernel for kernel in reversed(found)}.values():
    compiler.add(kernel)  # the first of each name: the others take as long, and say nothing more
result["failed"] = compiler.wait()
compiler.close()
hits = []
triton.knobs.compilation.listener = lambda cache_hit, src, **facts: hits.append((src.name, cache_hit))
try:
    probe_kernels.launch()
except AttributeError:
    pass  # there is no device to launch on
result["hits"] = hits
print(json.dumps(result))
"""
KERNELS = """
import torch, triton
import triton.language as tl


@triton.jit
def add(x, out, num, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < num) + 1, mask=at < num)


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["num"])
@triton.jit
def tuned(x, out, num, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < num) + 2, mask=at < num)


@triton.jit
def broken(x, BLOCK: tl.constexpr):
    tl.store(x, tl.no_such_thing(BLOCK))


def launch():
    x = torch.empty(16)
    x.fill_(3.0)
    out = torch.empty(16)
    add[(1,)](x, out, 16, BLOCK=16)
    broken[(1,)](x, BLOCK=16)
    tuned[(1,)](x, out, 16)
    index = torch.empty(4, dtype=torch.int64)
    add[(1,)](index, index, 4, BLOCK=16)
    return torch.arange(8.0)[index].tolist() + (x[None] @ x[:, None]).flatten().tolist()
"""


def run(folder: Path) -> dict[str, Any]:
    """Collect and compile the kernels of a module in a process that has no interpreter for them."""
    (folder / "probe_kernels.py").write_text(KERNELS)
    (folder / "program.py").write_text(PROGRAM)
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, str(folder / "program.py")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_collected_kernels_are_compiled_for_whoever_launches_them(tmp_path: Path) -> None:
    """Each variant is collected once, all of a tuned kernel; memory reads as zero meanwhile; a launch finds them."""
    result = run(tmp_path)
    names = ["add", "add", "broken", "tuned", "tuned"]
    assert result["found"] == [["probe_kernels", name] for name in names]
    assert result["zeros"] == [0.0] * 5
    assert result["failed"] == 1
    assert result["hits"] == [["add", True]]


def test_a_compiler_that_dies_costs_nothing_but_its_kernels() -> None:
    """What a dead worker was sent, before and after its death, counts as not compiled; nothing raises or waits."""
    started = CompileJobs()
    first, *others = (Kernel("no.such.module", f"kernel_{i}", "{}") for i in range(4))
    started.add(first)
    started._process.kill()
    started._process.wait()
    for kernel in others:
        started.add(kernel)
    assert started.wait() == 4
    started.close()
    started.close()


def test_an_operators_undefined_tensors_are_empty_ones_in_a_rehearsal() -> None:
    """In a list they are None, which torch does not take back from a mode: FlashAttention-3 returns such a list."""
    from dovetail_backends.kernels.ahead.collect import _Zeros

    mode, given = _Zeros(), torch.ones(2)  # type: ignore[no-untyped-call]
    assert mode.__torch_dispatch__(lambda *_: None, ()) is None
    one, undefined = mode.__torch_dispatch__(lambda *_: [given, None], ())
    assert one is given
    assert undefined.shape == (0,)


def test_a_kernel_that_two_rehearsals_collect_is_compiled_once() -> None:
    """Another variant of it is another kernel."""
    started = CompileJobs()
    for specialization in ("{}", "{}", "[]", "{}"):
        started.add(Kernel("no.such.module", "kernel", specialization))
    assert [kernel.specialization for kernel in started.kernels] == ["{}", "[]"]
    started.close()


def test_the_longest_kernel_is_compiled_first() -> None:
    """Those that nobody has timed yet before all; equal ones in the order in which they came."""
    waiting = CompileWorker(num_jobs=1)
    waiting._seconds = {"short": 0.5, "long": 3.0}
    waiting._waiting = [(i, "m", name, "{}") for i, name in enumerate(("short", "long", "new", "long", "other"))]
    assert [waiting._waiting.pop(waiting._next())[0] for _ in range(5)] == [2, 4, 1, 3, 0]


def test_without_a_process_kernels_are_compiled_at_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that may start no further process starts all the same, says so, and notes nothing."""

    def fail() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(jobs, "start_worker", fail)
    monkeypatch.setattr(CudaDevice, "model", "a card")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rehearsed: list[bool] = []
    CompiledAhead(CudaDevice(torch.device("cuda")), "engine").compile([lambda: rehearsed.append(True)])
    assert "at first use" in caplog.text
    assert not rehearsed
    assert not list(tmp_path.iterdir())


KEYS = """
import sys
from dovetail_backends.kernels.ahead.stable_keys import make_keys_stable
make_keys_stable()
make_keys_stable()
import probe_keys
names = ["kernel", "outer", "inner", "other"]
for name in names[:: int(sys.argv[1])]:
    getattr(probe_keys, name).cache_key
print(probe_keys.kernel.cache_key, probe_keys.other.cache_key)
"""
KEYED = """
import triton
import triton.language as tl

HALF: tl.constexpr = tl.constexpr({half})


@triton.jit
def inner(x):
    return x * HALF


@triton.jit
def outer(x):
    return inner(x) + 1


@triton.jit
def kernel(x):
    tl.store(x, outer(tl.load(x)))


@triton.jit
def other(x):
    tl.store(x, inner(tl.load(x)))
"""


def key_of(folder: Path, half: float, order: int) -> str:
    """Names of two kernels, in a process that works out those of what they call after or before theirs."""
    (folder / "probe_keys.py").write_text(KEYED.format(half=half))
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    env |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", KEYS, str(order)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_kernels_name_does_not_depend_on_those_before_it(tmp_path: Path) -> None:
    """Constants of functions within functions are part of it, in whatever order processes come to know them."""
    assert key_of(tmp_path, 0.5, 1) == key_of(tmp_path, 0.5, -1)
    assert key_of(tmp_path, 0.5, 1) != key_of(tmp_path, 0.25, 1)
