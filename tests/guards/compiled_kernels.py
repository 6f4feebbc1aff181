"""Whether every Triton kernel compiles for the GPUs it may run on: `python tests/guards/compiled_kernels.py [--all]`.

Needs no GPU. Engines of the families in `MODELS` start on a stand-in for a card, up to where their kernels would be
compiled ahead: what they collect then is what a card would compile, with its constants and types. Operations over
ranks, which one engine does not have, are called with the kit's operands. One variant of each kernel is compiled, or
all with `--all`. What the interpreter accepts and a compiler refuses fails here, as does a kernel that takes more
shared memory than a program may have, or more local memory than `compiled_kernels.json` records. `--write` records
what is found, which signs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import sass
import torch
import transformers
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

import dovetail_backends
from dovetail.contracts.compiler import AheadCompiler
from dovetail.contracts.device import DeviceView
from dovetail.contracts.kernels import OPS, make_ask
from dovetail.contracts.ranks import PeerMemory
from dovetail_backends.kernels.ahead.collect import Kernel, collecting
from dovetail_backends.kernels.ahead.worker import use_target
from dovetail_backends.kernels.triton import SUMS, TritonKernels, pdl
from dovetail_backends.triton import TritonBackend
from dovetail_testing.conformance.kernels_samples import NUM_RANKS, sample
from dovetail_testing.engine import make_core
from dovetail_testing.late_device import LateDevice, playing

RECORD = Path(__file__).with_suffix(".json")
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that a program may have, in bytes, by architecture."""
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
QWEN3 = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
GPT_OSS = {
    **{"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8},
    **{"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 4, "num_hidden_layers": 2},
    "layer_types": ["sliding_attention", "full_attention"],
}
EXPERTS = {
    **{"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4},
    **{"num_experts": 16, "num_experts_per_tok": 8, "head_dim": 128},
}
LATENT = {
    **{"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512},
    **{"q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64},
    **{"n_routed_experts": 16, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 0},
}
NEXT = {
    **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 256},
    **{"num_attention_heads": 16, "num_key_value_heads": 2, "shared_expert_intermediate_size": 512},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
}
FALCON = {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 2}
LFM2 = {**QWEN3, "head_dim": 64, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}


class Family(NamedTuple):
    """A model of a family at the widths of a real one, with few layers, experts and words; how, and from where on."""

    model_type: str
    architecture: str
    config: Mapping[str, Any]
    settings: Mapping[str, Any] = {}
    least: int = 80


MODELS = {
    "dense": Family("qwen3", "Qwen3ForCausalLM", QWEN3),
    "dense, fp8 cache": Family("qwen3", "Qwen3ForCausalLM", QWEN3, {"kv_cache_dtype": "fp8"}),
    "soft caps": Family("gemma2", "Gemma2ForCausalLM", {**QWEN3, "head_dim": 256, "num_hidden_layers": 2}),
    "fp8 by blocks": Family("llama", "LlamaForCausalLM", {**LLAMA, "quantization_config": BLOCKS}),
    "fp8 by rows": Family("llama", "LlamaForCausalLM", LLAMA, {"quantization": "fp8"}),
    "int4": Family("llama", "LlamaForCausalLM", LLAMA, {"quantization": "int4"}),
    "int8": Family("qwen3", "Qwen3ForCausalLM", QWEN3, {"quantization": "int8", "kv_cache_dtype": "int8"}),
    "mxfp4 experts": Family("gpt_oss", "GptOssForCausalLM", {**GPT_OSS, "quantization_config": MXFP4}),
    "experts": Family("qwen3_moe", "Qwen3MoeForCausalLM", EXPERTS),
    "latent": Family("deepseek_v2", "DeepseekV2ForCausalLM", LATENT),
    "Gated DeltaNet": Family("qwen3_next", "Qwen3NextForCausalLM", {**EXPERTS, **NEXT}),
    "Mamba 2": Family("falcon_h1", "FalconH1ForCausalLM", FALCON),
    "convolutions": Family("lfm2", "Lfm2ForCausalLM", LFM2),
    "fp8 experts": Family("qwen3_moe", "Qwen3MoeForCausalLM", {**EXPERTS, "quantization_config": BLOCKS}),
}
for _name, _least in {
    "dense": 80,
    "experts": 80,
    "latent": 80,
    "int4": 90,
    "mxfp4 experts": 90,
    "fp8 experts": 90,
}.items():
    _settings = {**MODELS[_name].settings, "batch_invariant": True}
    MODELS[f"{_name}, invariant"] = MODELS[_name]._replace(settings=_settings, least=_least)
USUAL = {
    **{"vocab_size": 4096, "num_hidden_layers": 1, "max_position_embeddings": 8192, "head_dim": 128},
    **{"bos_token_id": None, "eos_token_id": 198, "pad_token_id": None, "tie_word_embeddings": False},
}
SETTINGS = {
    **{"device": "cuda", "dtype": "bfloat16", "attention_backend": "triton", "load_format": "dummy"},
    **{"disable_compile_ahead": False, "max_running_requests": 16, "max_total_tokens": 4096},
    **{"chunked_prefill_size": 512, "context_length": 1024},
}

SAME = {100: 90}
"""Architectures that launch what another one does, so that nothing is collected for them."""
GIVEN = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "enable_fp_fusion", "debug")
"""Options of a launch; the others follow from the architecture."""


class Report(NamedTuple):
    """A variant, compiled: bytes of shared memory of a program, of local memory of a thread, or what went wrong."""

    name: str
    specialization: str
    shared: int
    local: int
    error: str


class _CollectedError(Exception):
    """Ends a start where kernels would be compiled."""


class Noted(AheadCompiler):
    """Collects, and ends the start."""

    found: ClassVar[dict[Kernel, None]] = {}
    failures: ClassVar[list[str]] = []

    @classmethod
    def folder(cls) -> Path:
        """See `AheadCompiler`."""
        return Path(os.devnull)

    @classmethod
    def kept(cls) -> dict[str, int]:
        """See `AheadCompiler`."""
        return {}

    @classmethod
    def report_late(cls, report: Callable[[str, float], None]) -> None:
        """See `AheadCompiler`."""

    def __init__(self, fingerprint: str) -> None:
        """See `AheadCompiler`."""

    @property
    def is_known(self) -> bool:
        """See `AheadCompiler`."""
        return False

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """See `AheadCompiler`."""
        try:
            with collecting(lambda kernel: self.found.setdefault(kernel)):
                yield
        except Exception:  # what an engine logs and goes on without
            self.failures.append(traceback.format_exc(limit=-3))
            raise

    def compile(self) -> tuple[int, int]:
        """See `AheadCompiler`."""
        raise _CollectedError

    def close(self) -> None:
        """See `AheadCompiler`."""


class Card(LateDevice):
    """Stands for a card, on CPU tensors; `capability` is the architecture's."""

    kind = "cuda"
    compiles = True
    by_rows = frozenset({"sums"})
    num_bytes = 64 << 30
    capability: ClassVar[tuple[int, int]] = (9, 0)

    @property
    def view(self) -> DeviceView:
        """See `Device`."""
        return DeviceView(self.kind, self.model, self.capability)

    @classmethod
    def compiler(cls) -> type[AheadCompiler]:
        """See `Device`."""
        return Noted


@contextmanager
def card(arch: int) -> Iterator[None]:
    """Inside, CPU tensors are a card's, and Triton compiles for it."""
    use_target("cuda", arch, 32)
    triton.runtime.driver.active.get_current_stream = lambda device: 0
    caps = dataclasses.replace(TritonBackend.caps, devices=frozenset({"cpu", "cuda"}))
    with ExitStack() as stack:
        for patch in (
            mock.patch.object(Card, "capability", divmod(arch, 10)),
            mock.patch.object(TritonBackend, "caps", caps),
            mock.patch("dovetail_backends.devices.cuda.CudaDevice", Card),
            mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True)),
            mock.patch.object(pdl, "supported", return_value=arch >= 90),
            playing(Card),
        ):
            stack.enter_context(patch)
        yield


def start(family: Family) -> None:
    """Start an engine, up to where it has collected its kernels."""
    config_class = transformers.CONFIG_MAPPING[family.model_type]
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(**USUAL | dict(family.config), architectures=[family.architecture])
        config.save_pretrained(folder)
        try:
            make_core(Path(folder), **SETTINGS | dict(family.settings))
        except _CollectedError:
            return
    raise RuntimeError("the start collected no kernels")


def add_up(view: DeviceView) -> None:
    """Launch the operations over ranks, as one rank that stands for all."""
    made, place = TritonKernels(), torch.device("cpu")
    made.connect(PeerMemory.alone(0, NUM_RANKS, made.peer_bytes(NUM_RANKS), place))
    for op in sorted(SUMS):
        dims = dict.fromkeys(OPS[op].dims, 4096)
        ask = make_ask(op, view, "bfloat16", dims, {}, peers=NUM_RANKS)
        kernel = made.make(ask)
        for rows in (1, 16, 64):
            with torch.inference_mode():
                kernel(*sample(ask, rows, place, 0))


def collect(arch: int, names: Sequence[str]) -> tuple[list[Kernel], list[str]]:
    """Return the variants that families launch on an architecture, and what failed while they were collected."""
    Noted.found.clear()
    Noted.failures.clear()
    with card(arch):
        for name in (one for one in names if arch >= MODELS[one].least):
            try:
                start(MODELS[name])
            except Exception:
                Noted.failures.append(f"{name}: {traceback.format_exc(limit=-6)}")
        with Noted("").collecting():
            add_up(DeviceView("cuda", "", divmod(arch, 10)))
    return list(Noted.found), list(Noted.failures)


def chosen(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return one variant of each kernel, whichever's constants have the least checksum: the same one in any folder.

    A specialization as a whole names files of the installation, too.
    """
    by_name: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        by_name.setdefault(f"{kernel.module}.{kernel.name}", []).append(kernel)
    return [min(some, key=_checksum) for some in by_name.values()]


def _checksum(kernel: Kernel) -> int:
    signature = json.loads(kernel.specialization)["signature"]
    return zlib.crc32(f"{signature} {constants(kernel.specialization)}".encode())


def _name(kernel: Kernel) -> str:
    return f"{kernel.module.removeprefix('dovetail_backends.')}.{kernel.name}"


def translated(kernel: Kernel, arch: int) -> Kernel:
    """Return a variant for another architecture on which the same code launches it."""
    facts = json.loads(kernel.specialization)
    target = GPUTarget("cuda", arch, 32)
    given = {name: facts["options"][name] for name in GIVEN}
    facts["options"] = dataclasses.asdict(make_backend(target).parse_options(given))
    facts["target"] = target.__dict__
    return kernel._replace(specialization=json.dumps(facts))


def compiled(arch: int, kernel: Kernel) -> Report:
    """Compile a variant."""
    use_target("cuda", arch, 32)
    triton.runtime.driver.active.get_current_device = lambda: arch  # by which a function keeps its target
    name = _name(kernel)
    function: Any = getattr(import_module(kernel.module), kernel.name)
    while not hasattr(function, "preload"):
        function = function.fn
    try:
        made = function.preload(kernel.specialization)
        _, local = sass._resources(made)
    except Exception as error:
        return Report(name, kernel.specialization, 0, 0, f"{type(error).__name__}: {' '.join(str(error).split())}")
    return Report(name, kernel.specialization, made.metadata.shared, local, "")


def forked(num: int) -> ProcessPoolExecutor:
    """Return a pool of copies of this process."""
    return ProcessPoolExecutor(num, mp_context=get_context("fork"))


def compile_all(arch: int, kernels: Sequence[Kernel]) -> list[Report]:
    """Compile variants, two at a time; a compiler that crashes ends this with an error."""
    with forked(2) as pool:
        return list(pool.map(partial(compiled, arch), kernels))


def constants(specialization: str) -> str:
    """Return a variant's constants and options in short."""
    facts = json.loads(specialization)
    names = list(facts["signature"])
    given = {names[key[0]]: value for key, value in zip(facts["constant_keys"], facts["constant_vals"], strict=True)}
    options = {name: facts["options"][name] for name in ("num_warps", "num_stages")}
    return ", ".join(f"{name}={value}" for name, value in (given | options).items())


def faults(arch: int, reports: Sequence[Report], record: Mapping[str, int]) -> list[str]:
    """Return a line for each variant that does not compile, does not fit, or spills more than is on record."""
    lines = []
    for one in reports:
        allowed = record.get(one.name, 0)
        said = one.error
        if one.shared > SHARED[arch]:
            said = f"{one.shared} bytes of shared memory; a program may have {SHARED[arch]}"
        elif one.local > allowed:
            said = f"{one.local} bytes of local memory a thread; {allowed} are on record"
        if said:
            lines.append(f"sm_{arch} {one.name}: {said[:600]} ({constants(one.specialization)})")
    return lines


def unreached(kernels: Sequence[Kernel]) -> list[str]:
    """Return the product's kernels that were not launched: functions of Triton's whose names end as kernels' do."""
    reached = {_name(kernel) for kernel in kernels}
    found = set()
    for folder in ("kernels/triton", "triton"):
        for path in sorted((Path(dovetail_backends.__file__).parent / folder).glob("*.py")):
            module = f"dovetail_backends.{folder.replace('/', '.')}.{path.stem}".removesuffix(".__init__")
            for name, value in vars(import_module(module)).items():
                if isinstance(value, JITFunction) and value.module == module and name.endswith("_kernel"):
                    found.add(_name(Kernel(module, name, "")))
    return sorted(found - reached)


def main() -> int:
    """Collect, compile, compare."""
    torch.set_num_threads(1)  # what is computed is small, or left out
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="*", default=list(SHARED), choices=list(SHARED))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", default="", help="a part of a kernel's name")
    parser.add_argument("--all", action="store_true", help="all variants, not one of each kernel")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    record: dict[str, Any] = json.loads(RECORD.read_text())
    found: list[str] = []
    collected: dict[int, list[Kernel]] = {}
    for arch in args.arch:
        source = SAME.get(arch, arch)
        if source not in collected:
            with forked(1) as pool:  # Triton keeps the first architecture of a process
                collected[source], failures = pool.submit(collect, source, args.models).result()
            found += failures
        kernels = collected[source]
        some = [one for one in (kernels if args.all else chosen(kernels)) if args.only in one.name]
        reports = compile_all(arch, some if source == arch else [translated(one, arch) for one in some])
        of_arch = record.setdefault(str(arch), {})
        if args.write:
            for one in reports:
                if one.local > of_arch.get(one.name, 0):
                    of_arch[one.name] = one.local
        found += faults(arch, reports, of_arch)
        print(f"sm_{arch}: {len(kernels)} variants, {len(some)} compiled", flush=True)
    if set(args.models) == set(MODELS):
        missed = unreached([kernel for some in collected.values() for kernel in some])
        if args.write:
            record["unreached"] = missed
        found += [f"{name}: no family launches it; add one" for name in missed if name not in record["unreached"]]
    if args.write:
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    for line in found:
        print(line)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
