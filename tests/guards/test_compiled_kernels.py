"""Triton's kernels compile for GPUs that are not here, and what does not is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).with_name("compiled_kernels.py")
TRY = """
import sys
sys.path.insert(0, sys.argv[1])
import compiled_kernels as guard
import tried_kernels
from dovetail_backends.kernels.ahead.collect import collecting
arch, found = int(sys.argv[2]), []
with guard.card(arch), collecting(found.append):
    tried_kernels.launch()
print(len(found))
for line in guard.faults(arch, guard.compile_all(arch, found), {}):
    print(line)
"""
UNPACKING = """
import torch, triton
import triton.language as tl
from dovetail_backends.kernels.triton.nibbles import e2m1_planes, int4_planes
from dovetail_backends.triton.eight_bits import unpacked, unpacked_words


@triton.jit
def bytes_kernel(numbers, x, E4M3: tl.constexpr):
    at = tl.arange(0, 1024)
    tl.store(x + at, unpacked(tl.load(numbers + at), x.dtype.element_ty, E4M3))


@triton.jit
def words_kernel(numbers, x, E4M3: tl.constexpr):
    row, at = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    words = tl.load(numbers + row * 16 + tl.arange(0, 16)[None, :])
    tl.store(x + row * 64 + at, unpacked_words(words, x.dtype.element_ty, E4M3))


@triton.jit
def nibbles_kernel(numbers, x, INT4: tl.constexpr):
    at = tl.arange(0, 1024)
    words, scale = tl.load(numbers + at), tl.load(x + at)
    if INT4:
        planes = int4_planes(words, scale, scale, scale, scale, tl.bfloat16, True)
    else:
        planes = e2m1_planes(words, words & 255, tl.bfloat16, True)
    for plane in tl.static_range(8):
        tl.store(x + plane * 1024 + at, planes[plane])


def launch():
    for dtype in (torch.bfloat16, torch.float16):
        for flag in (True, False):
            x = torch.empty(1 << 16, dtype=dtype)
            bytes_kernel[(1,)](torch.empty(1 << 10, dtype=torch.int8), x, flag)
            words_kernel[(1,)](torch.empty(1 << 10, dtype=torch.int32), x, flag)
            if dtype == torch.bfloat16:
                nibbles_kernel[(1,)](torch.empty(1 << 10, dtype=torch.int32), x, flag)
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
    """One variant of each kernel of a model with packed weights; the whole guard runs by its command."""
    done = run(str(TOOL), "--arch", "80", "90", "--models", "mxfp4 experts")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["sm_80", "sm_90"]


def tried(kernels: str, arch: int, folder: Path) -> list[str]:
    """Return the number of variants of a module's kernels, and a line for each that is refused."""
    (folder / "tried_kernels.py").write_text(kernels)
    env = {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}
    done = run("-c", TRY, str(TOOL.parent), str(arch), **env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler is there for Linux")
def test_what_a_compiler_refuses_is_named(tmp_path: Path) -> None:
    """A number that changes its type in a loop, a matrix below 16, and more memory than a program may have."""
    num, *lines = tried(KERNELS, 90, tmp_path)
    assert num == "4"
    assert [line.split()[1].rstrip(":") for line in lines] == [
        "tried_kernels.carried_kernel",
        "tried_kernels.narrow_kernel",
        "tried_kernels.large_kernel",
    ]
    assert "loop" in lines[0]
    assert "memory" in lines[2]


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler is there for Linux")
def test_numbers_are_unpacked_before_hopper(tmp_path: Path) -> None:
    """What unpacks small numbers is assembly: sm_80 has all of its instructions."""
    assert tried(UNPACKING, 80, tmp_path) == ["10"]
