"""Triton's kernels compile for GPUs that are not here, and what does not is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).with_name("compiled_kernels.py")
BROKEN = """
import sys
sys.path.insert(0, sys.argv[1])
import compiled_kernels as guard
import broken_kernels
from dovetail_backends.kernels.ahead.collect import collecting
found = []
with guard.card(90), collecting(found.append):
    broken_kernels.launch()
for line in guard.faults(90, guard.compile_all(90, found), {}):
    print(line)
"""
KERNELS = """
import torch, triton
import triton.language as tl


@triton.jit
def fine_kernel(x, num):
    total = 0.0
    for at in tl.range(0, num):
        total += tl.load(x + at)
    tl.store(x, total)


@triton.jit
def carried_kernel(x, num):
    total = 0
    for at in tl.range(0, num):
        total += tl.load(x + at)
    tl.store(x, total)


@triton.jit
def narrow_kernel(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    values = tl.load(x + at[:, None] * SIZE + at[None, :])
    tl.store(x + at[:, None] * SIZE + at[None, :], tl.dot(values, values))


@triton.jit
def large_kernel(x, num):
    at = tl.arange(0, 64)
    places = x + at[:, None] * 64 + at[None, :]
    total = tl.zeros([64, 64], tl.float32)
    for step in tl.range(0, num, num_stages=40):
        values = tl.load(places + step * 4096).to(tl.float16)
        total = tl.dot(values, tl.load(places + (step + 7) * 4096).to(tl.float16), total)
    tl.store(places, total)


def launch():
    x = torch.empty(1 << 10)
    fine_kernel[(1,)](x, 3)
    carried_kernel[(1,)](x, 3)
    narrow_kernel[(1,)](x, SIZE=4)
    large_kernel[(1,)](x, 3)
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python without the interpreter of kernels."""
    env = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler is there for Linux")
def test_a_sample_of_kernels_compiles() -> None:
    """One variant of each kernel of two models with packed weights; the whole guard runs by its command."""
    sample = ["fp8 by blocks", "mxfp4 experts"]
    done = run(str(TOOL), "--arch", "90", "100", "--models", *sample)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["sm_90", "sm_100"]


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler is there for Linux")
def test_what_a_compiler_refuses_is_named(tmp_path: Path) -> None:
    """A number that changes its type in a loop, a matrix below 16, and more memory than a program may have."""
    (tmp_path / "broken_kernels.py").write_text(KERNELS)
    done = run("-c", BROKEN, str(TOOL.parent), PYTHONPATH=str(tmp_path), TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.split()[1].rstrip(":") for line in lines] == [
        "broken_kernels.carried_kernel",
        "broken_kernels.narrow_kernel",
        "broken_kernels.large_kernel",
    ]
    assert "loop" in lines[0]
    assert "memory" in lines[2]
