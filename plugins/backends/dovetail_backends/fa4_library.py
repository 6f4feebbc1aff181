"""The package `flash-attn-4`: whether it is there, how it is called, and its kernels, compiled before they are needed.

Its kernels are compiled by `nvidia-cutlass-dsl`, a few seconds each. The library can keep them on disk, under a digest
of its sources and of the versions of Python, compiler and runtime, and a key of all that a kernel is specialised on,
the architecture included; it is told to, beside Triton's kernels. They are compiled in processes of their own, which
see no device and share that folder (`fa4_worker`), and then launched once here, so that they are also loaded.

R requests, T queries, Hq and Hk query and KV heads, D head dim, P page size.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts.config import ModelConfig
from dovetail_backends.flash import Queries, ScoreOptions

logger = logging.getLogger("dovetail.backends.fa4")

DISTRIBUTION = "flash-attn-4"
MODULE = "flash_attn.cute.interface"
FUNCTION = "_flash_attn_fwd"
"""What the public function calls; unlike that one it writes to a given tensor, and is no step of autograd."""
INSTALL = "run: pip install 'dovetail-llm[fa4]'"
NEEDED = (
    *("q", "k", "v", "cu_seqlens_q", "seqused_k", "page_table", "softmax_scale", "causal", "window_size_left"),
    *("softcap", "learnable_sink", "num_splits", "out"),
)
ENABLED, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
"""Environment variables that the library reads when it is imported."""
MANY_REQUESTS = 257
"""From this many requests on, the library finds a tile's request with another kernel, and two more."""
COMPILE_S = 300.0
"""What is not compiled in this time is compiled where it is first launched: here."""
MIB_EACH = 2048
"""Memory of a compiling process, by which their number is bounded."""


@dataclass(frozen=True, slots=True)
class Variant:
    """All that a kernel is specialised on, as far as layers differ in it.

    Attributes:
        dtype: `bfloat16` or `float16`.
        heads: Hq, Hk and D.
        page_size: P.
        has_window: Whether queries see only so far back.
        cap: Soft cap; 0: none.
        has_sinks: Whether there are sinks.
        num_requests: R, of a step that launches it.
    """

    dtype: str
    heads: tuple[int, int, int]
    page_size: int
    has_window: bool
    cap: float
    has_sinks: bool
    num_requests: int


class FlashAttention4:
    """See `dovetail_backends.flash.Build`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def attend(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        out: Tensor,
        of: Queries,
        look: ScoreOptions,
        schedule: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """See `Build`."""
        left = look.window[0]
        self.function(
            q, *kv, cu_seqlens_q=of.starts, seqused_k=of.lens, page_table=of.pages, softmax_scale=look.scale,
            causal=True, window_size_left=None if left < 0 else left, softcap=look.cap or None, learnable_sink=sinks,
            num_splits=1, out=out,
        )  # fmt: skip

    def schedule(self, q: Tensor, keys: Tensor, of: Queries, look: ScoreOptions) -> Tensor | None:
        """Nothing: on Hopper the library plans nothing."""
        return None


def missing() -> str | None:
    """Say that the package is not installed, or None; nothing is imported."""
    try:
        version(DISTRIBUTION)
    except PackageNotFoundError:
        return f"FlashAttention-4 is not installed; {INSTALL}"
    return None


def versions() -> str:
    """Return what is installed of the library and of its compiler."""
    found = []
    for name in (DISTRIBUTION, "nvidia-cutlass-dsl", "apache-tvm-ffi"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def find_library() -> FlashAttention4 | str:
    """Import the library, with its kernels kept on disk, or say in one line why it cannot be."""
    keep_kernels()
    try:
        function = getattr(importlib.import_module(MODULE), FUNCTION)
    except ModuleNotFoundError as error:
        return f"FlashAttention-4 cannot be imported: {error.name} is missing; {INSTALL}"
    except Exception as error:  # a library for another CUDA may raise anything when it is imported
        return f"FlashAttention-4 cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}"
    lacking = [name for name in NEEDED if name not in inspect.signature(function).parameters]
    if lacking:
        return f"{DISTRIBUTION} {_version()} does not take {', '.join(lacking)}; it is another version; {INSTALL}"
    return FlashAttention4(function)


def keep_kernels() -> None:
    """Have the library cache its kernels, before its first import; variables that the user set stay."""
    folder = kernel_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.debug("kernels of FlashAttention-4 are not kept: %s", error)
        return
    if os.access(folder, os.W_OK):
        os.environ.setdefault(ENABLED, "1")
        os.environ.setdefault(FOLDER, str(folder))


def kernel_folder() -> Path:
    """Return where kernels are kept: a folder of Triton's cache, which `TRITON_CACHE_DIR` moves."""
    import triton

    return Path(triton.knobs.cache.dir) / "dovetail" / "fa4"


def variants_of(config: ModelConfig, dtype: torch.dtype, page_size: int) -> list[Variant]:
    """Return every kernel that a model's layers launch, each once."""
    name = str(dtype).removeprefix("torch.")
    found = {
        Variant(
            name, (spec.num_qo_heads, spec.num_kv_heads, spec.qk_dim), page_size, spec.sliding_window is not None,
            spec.soft_cap or 0.0, spec.sinks, num,
        )
        for spec in config.layers
        for num in (1, MANY_REQUESTS)
    }  # fmt: skip
    return sorted(found, key=lambda variant: json.dumps(asdict(variant)))


def launch(build: FlashAttention4, variant: Variant, device: torch.device) -> None:
    """Launch a kernel once, on dummy tokens: one for each request, over a page that all of them share."""
    (num_qo, num_kv, dim), num = variant.heads, variant.num_requests
    dtype = getattr(torch, variant.dtype)
    kv = torch.zeros(2, 2, variant.page_size, num_kv, dim, dtype=dtype, device=device)
    q = torch.zeros(num, num_qo, dim, dtype=dtype, device=device)
    of = Queries(
        lens=torch.ones(num, dtype=torch.int32, device=device),
        pages=torch.zeros(num, 1, dtype=torch.int32, device=device),
        starts=torch.arange(num + 1, dtype=torch.int32, device=device),
        longest=1,
        splits=1,
    )
    sinks = torch.zeros(num_qo, dtype=torch.float32, device=device) if variant.has_sinks else None
    look = ScoreOptions(dim**-0.5, (0, 0) if variant.has_window else (-1, -1), variant.cap)
    pair = kv.select(1, 0), kv.select(1, 1)  # not by brackets, which ask for a device where a worker sees none
    build.attend(q, pair, torch.empty_like(q), of, look, None, sinks)


def prepare(build: FlashAttention4, variants: Sequence[Variant], device: torch.device) -> None:
    """Compile what is not on disk, side by side, and load all of it; one line in the log where that took a while."""
    began = time.perf_counter()
    record = None
    if device.type == "cuda" and os.environ.get(ENABLED) == "1":
        digest = hashlib.sha256(repr((variants, versions(), torch.__version__, sys.version_info[:2])).encode())
        record = Path(os.environ[FOLDER]) / f"{digest.hexdigest()[:32]}.json"
    if record is not None and not record.exists():
        compile_side_by_side(variants, device)
    for variant in variants:
        launch(build, variant, device)
    if record is not None and not record.exists():
        note(record, variants)
    if (took := time.perf_counter() - began) > 1.0:
        logger.info("Kernels of FlashAttention-4 are compiled and loaded: %d in %.1f s.", len(variants), took)


def note(record: Path, variants: Sequence[Variant]) -> None:
    """Write that these kernels have been compiled."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=record.parent, delete=False) as file:
            json.dump([asdict(variant) for variant in variants], file)
        os.replace(file.name, record)
    except OSError as error:  # then the next start looks again
        logger.debug("cannot write %s: %s", record, error)


def compile_side_by_side(variants: Sequence[Variant], device: torch.device) -> None:
    """Have processes that see no device compile kernels into the folder; what fails is compiled where it is used."""
    facts = torch.cuda.get_device_properties(device)
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "FLASH_ATTENTION_ARCH": f"sm_{facts.major}{facts.minor}",
        "CUTE_DSL_ARCH": f"sm_{facts.major}{facts.minor}a",
        "FLASH_ATTENTION_NUM_SMS": str(facts.multi_processor_count),
    }
    num = max(1, min(len(variants), len(os.sched_getaffinity(0)) - 1, free_mib() // MIB_EACH))
    run_workers([variants[at::num] for at in range(num)], environment)


def run_workers(shares: Sequence[Sequence[Variant]], environment: dict[str, str]) -> None:
    """Start a process for each share and wait for all of them; whichever way this ends, none is left."""
    until = time.monotonic() + COMPILE_S
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for share in shares:
            encoded = json.dumps([asdict(variant) for variant in share])
            command = [sys.executable, "-m", "dovetail_backends.fa4_worker", encoded]
            workers.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr))
        for worker in workers:
            code = worker.wait(max(0.0, until - time.monotonic()))
            if code:
                logger.debug("a process that compiles for FlashAttention-4 ended with exit code %d", code)
    except subprocess.TimeoutExpired:
        logger.warning("Kernels of FlashAttention-4 took more than %g s to compile; they are compiled here.", COMPILE_S)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()


def free_mib() -> int:
    """Return the free memory of this machine."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "of no known version"
