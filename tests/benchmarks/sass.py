"""Kernels compiled for a GPU that is not here: registers, spills, shared memory, and what their inner loops consist of.

`compiled(run)` calls a launcher with tensors of the device `meta` and returns every kernel that it would have launched,
compiled for sm_90 as Triton would there: the same constants, the same divisibility of arguments. `report` counts the
machine instructions of the loop that holds the most of them that multiply matrices, or of the longest one.

Needs no GPU; the assembler and disassembler are those that Triton brings.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from dovetail_backends.kernels.triton import pdl

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip
OPTIONS = {"num_warps", "num_stages", "num_ctas", "launch_pdl", "maxnreg"}
KINDS = {
    "mma": r"HGMMA|QGMMA|IGMMA|HMMA|QMMA|IMMA",
    "global": r"LDG|LDGSTS|UTMALDG|UBLKCP",
    "shared": r"LDS|LDSM|STS|STSM",
    "convert": r"F2F|F2FP|I2F\w*|F2I\w*|I2FP|HADD2",
    "bits": r"LOP3|PRMT|SHF|BFI|LEA|SGXT",
    "float": r"FFMA|FMUL|FADD|HMUL2|HFMA2|MUFU|FMNMX|FSETP|FSEL",
    "integer": r"IMAD|IADD3|ISETP|VIADD|IABS|SEL|VIMNMX",
    "shuffle": r"SHFL|WARPSYNC|REDUX",
    "wait": r"BAR|WARPGROUP|DEPBAR|LDGDEPBAR|SYNCS",
    "local": r"LDL|STL",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What a compiled kernel is: its resources for a thread or a program, and its inner loop by kinds of instruction.

    Attributes:
        name: Of the kernel.
        registers: Of a thread.
        shared: Bytes of shared memory of a program.
        local: Bytes of local memory of a thread: what did not fit into registers.
        warps: Of a program.
        loop: Instructions that a thread executes in one round of the inner loop, by `KINDS`.
        names: The same by name, without what follows the first dot.
        mma: Names of matrix instructions in full, how often.
        is_rolled: Whether there is a loop; otherwise the counts are of the whole kernel.
        pending: Groups of matrix instructions that may still read registers where the kernel goes on and writes some;
            0 where none reads registers.
    """

    name: str
    registers: int
    shared: int
    local: int
    warps: int
    loop: dict[str, int]
    names: dict[str, int]
    mma: dict[str, int]
    is_rolled: bool
    pending: int

    @property
    def length(self) -> int:
        """Instructions of the loop."""
        return sum(self.names.values())

    @property
    def programs(self) -> int:
        """Programs that a multiprocessor of an H200 holds: by registers, shared memory and threads."""
        threads = self.warps * 32
        of_registers = 65536 // (-(-self.registers // 8) * 8 * threads)
        return min(of_registers, 2048 // threads, (227 << 10) // (self.shared + 1024), 32)

    def __str__(self) -> str:
        """One line."""
        loop = " ".join(f"{kind} {num}" for kind, num in self.loop.items() if num)
        return (
            f"{self.name}: {self.registers} registers, {self.local} B spilled, {self.shared >> 10} KiB shared, "
            f"{self.programs} a multiprocessor; {'loop' if self.is_rolled else 'all'} {self.length}: {loop}; {self.mma}"
        )


def _typed(value: Any, fixed: bool) -> tuple[str, int | None, bool]:
    """Type of an argument in a signature, the constant that Triton makes of it, whether 16 divides it."""
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>", None, False
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}", None, True
    if isinstance(value, bool):
        return "i1", None, False
    if isinstance(value, float):
        return "fp32", None, False
    wide = "i32" if -(2**31) <= value < 2**31 else "i64"
    if not fixed and value == 1:
        return "constexpr", 1, False
    return wide, None, not fixed and value % 16 == 0


def _compile(function: JITFunction[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compile a launch."""
    options = {name: kwargs.pop(name) for name in OPTIONS & set(kwargs)}
    given = dict(zip(function.arg_names, args, strict=False)) | kwargs
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, param in enumerate(function.params):
        value = given.get(param.name, param.default if param.has_default else None)
        if param.is_constexpr:
            signature[param.name], constants[place,] = "constexpr", value
            continue
        if value is None:
            signature[param.name], constants[place,] = "constexpr", None
            continue
        kind, constant, divisible = _typed(value, param.do_not_specialize)
        signature[param.name] = kind
        if constant is not None:
            constants[place,] = constant
        if divisible:
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=TARGET, options=options)


class Launch(NamedTuple):
    """A kernel, compiled, and how it would be launched: its grid, and its constants and options by name."""

    kernel: Any
    grid: tuple[int, ...]
    given: dict[str, Any]


@contextmanager
def _recording(found: list[Launch]) -> Iterator[None]:
    """Compile instead of launching."""

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del warmup
        given = dict(kwargs)
        found.append(Launch(_compile(self, args, kwargs), grid, given))

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(pdl, "supported", return_value=True),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda one: one.device.type == "meta")),
    ):
        yield


def launched(run: Callable[[], Any]) -> list[Launch]:
    """Return what `run` launches, compiled; its tensors are on `meta`."""
    found: list[Launch] = []
    with _recording(found):
        run()
    return found


def compiled(run: Callable[[], Any]) -> list[Any]:
    """Return the kernels that `run` launches, compiled; its tensors are on `meta`."""
    return [one.kernel for one in launched(run)]


def _dump(what: str, kernel: Any) -> str:
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([tool, what, file.name], check=True, capture_output=True, text=True).stdout


def listing(kernel: Any) -> list[tuple[int, str]]:
    """Machine instructions of a kernel, each behind its address."""
    found = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", _dump("-sass", kernel), re.MULTILINE)
    return [(int(address, 16), line) for address, line in found]


def _resources(kernel: Any) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread."""
    text = _dump("-res-usage", kernel)
    found = [max(map(int, re.findall(rf"{name}:(\d+)", text))) for name in ("REG", "STACK")]
    return found[0], found[1]


def _name(line: str) -> str:
    return re.sub(r"^@!?U?P\d+\s+", "", line).split()[0]


def _loops(lines: list[tuple[int, str]]) -> list[list[str]]:
    """Bodies of loops that hold no other loop: from where a branch goes back to, up to it."""
    spans = []
    for address, line in lines:
        goes = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", line)
        if goes and int(goes[1], 16) < address:
            spans.append((int(goes[1], 16), address))
    inner = [
        one for one in spans if not any(other != one and one[0] <= other[0] and other[1] <= one[1] for other in spans)
    ]
    return [[line for address, line in lines if first <= address <= last] for first, last in inner]


def report(kernel: Any) -> Report:
    """Count a kernel's inner loop."""
    lines = listing(kernel)
    loops = _loops(lines)
    mmas = re.compile(KINDS["mma"])

    def weight(body: list[str]) -> tuple[int, int]:
        return sum(bool(mmas.fullmatch(_name(line).split(".")[0])) for line in body), len(body)

    body = max(loops, key=weight) if loops else [line for _, line in lines]
    names = Counter(_name(line).split(".")[0] for line in body)
    mma = Counter(_name(line) for line in body if mmas.fullmatch(_name(line).split(".")[0]))
    loop = {
        kind: sum(num for name, num in names.items() if re.fullmatch(pattern, name)) for kind, pattern in KINDS.items()
    }
    registers, local = _resources(kernel)
    # Of an instruction's operands the first is the sum, the second registers or what describes shared memory.
    reads = any(re.search(r"[HQI]GMMA\S* R\d+, R\d+", line) for _, line in lines)
    left = [int(found, 16) for _, line in lines for found in re.findall(r"WARPGROUP\.DEPBAR\S* gsb0, (0x\w+)", line)]
    return Report(
        kernel.metadata.name, registers, kernel.metadata.shared, local, kernel.metadata.num_warps, loop, dict(names),
        dict(mma), bool(loops), max(left, default=0) if reads else 0,
    )  # fmt: skip
