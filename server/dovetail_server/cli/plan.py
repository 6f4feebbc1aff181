"""`dovetail plan MODEL`: how the engine would divide a device's memory. Loads no weights, and no torch where it can."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.contracts.config import ModelConfig
    from dovetail.runtime.checkpoint.files import Checkpoint
    from dovetail.runtime.memory.plan import DeviceBytes, MemoryPlan
    from dovetail.settings import EngineSettings
    from dovetail_server.settings import ServeSettings

USAGE = """usage: dovetail plan [MODEL] [options]

Show how `dovetail serve` would divide the memory of a device between the weights of MODEL, the KV cache, activations
and CUDA graphs, and how many requests the KV cache holds. Reads config.json and the headers of the safetensors files.

  --device-memory SIZE      plan for a device with so much memory, such as 80GiB; a GPU unless --device cpu is given.
                            If not given, for the device here, with what is free on it now
  --json                    print JSON

The options of `dovetail serve` that concern memory can be given too: --device, --dtype, --context-length,
--mem-fraction-static, --gpu-memory-utilization, --max-total-tokens, --max-running-requests, --chunked-prefill-size,
--page-size, --disable-cuda-graph, --load-format dummy, --quantization, --tensor-parallel-size (the plan is that of one
rank).
`dovetail serve --help=all` explains them.
"""
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(slots=True)
class Args:
    """The command's own arguments."""

    device_memory: str | None
    as_json: bool
    others: list[str]


def main(argv: list[str]) -> int:
    """Print the plan. Exit code 2 for what the user can fix, a model that does not fit included."""
    if any(arg in {"-h", "--help"} for arg in argv):
        print(USAGE, end="")
        return 0
    try:
        wish = parse(argv)
        found = plan(wish)
    except ConfigError as error:
        print(f"dovetail plan: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if wish.as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        from dovetail.runtime.memory.table import print_table

        print_table(found, to_stderr=False)
        for note in found.notes:
            print(note)
    return 0


def parse(argv: list[str]) -> Args:
    """Split off the command's own arguments.

    Raises:
        ConfigError: A value is missing.
    """
    wish = Args(None, False, [])
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.partition("=")
        if name == "--json":
            wish.as_json = True
        elif name == "--device-memory":
            if not equals and not rest:
                raise ConfigError("--device-memory: expected a size, such as 80GiB")
            wish.device_memory = value if equals else rest.pop(0)
        else:
            wish.others.append(arg)
    return wish


def plan(wish: Args) -> MemoryPlan:
    """Make the plan with the engine's own function.

    Raises:
        ConfigError: A flag, the model or the device is at fault, or the model does not fit.
    """
    from dovetail.processing.prepare import check_model
    from dovetail.runtime.cache_dtype import with_cache_dtype
    from dovetail.runtime.checkpoint.weight_size import weight_size
    from dovetail.runtime.memory.plan import plan_memory
    from dovetail_server import preflight
    from dovetail_server.cli.options import load_settings, parse_flags

    flags = parse_flags(wish.others)
    settings: ServeSettings = preflight.with_model(load_settings(flags if isinstance(flags, dict) else {}))
    architecture = check_model(settings)
    device = device_of(settings, wish.device_memory)
    from dovetail_server.model_facts import config_of

    config = with_cache_dtype(config_of(settings.folder, architecture, settings.model_impl), settings)
    dtype = config.dtype if settings.dtype == "auto" else settings.dtype
    read = quantised(settings, architecture, config, dtype, device.kind)
    packed = {"packed_dummies": read} if isinstance(read, int) else {"headers": None if read is None else read.headers}
    is_dummy = settings.load_format == "dummy"
    size = weight_size(settings.folder, config, dtype, device.kind, dummy=is_dummy, **packed)
    has_graphs, ranks = device.kind == "cuda" and not settings.disable_cuda_graph, settings.tensor_parallel_size
    share = config.of_rank(ranks), dtype, device.of_rank(ranks), size.num_bytes // ranks
    made = plan_memory(settings, *share, has_graphs=has_graphs)
    return made if read is None or isinstance(read, int) else dataclasses.replace(made, weight_notes=read.notes)


def quantised(
    settings: ServeSettings, architecture: str, config: ModelConfig, dtype: str, device: str
) -> Checkpoint | int | None:
    """Return the checkpoint as a quantisation has it read, or the bytes of its dummies; None where nothing is packed.

    Raises:
        ConfigError: No plugin reads it, or it lacks tensors that belong to others.
    """
    from dovetail.runtime.hf_config import quant_method, read_config

    hf = read_config(settings.folder)
    named = settings.quantization not in (None, "auto")
    if not (named or quant_method(hf)):
        return None
    import torch

    from dovetail.contracts.quantization import Target
    from dovetail.plugins import Registry, load, make_plan
    from dovetail.runtime.checkpoint.quantization import Place, choose_quantization, converted, dummy_bytes

    plugins = load(
        make_plan(
            Registry.scan(),
            model=architecture,
            quantization=settings.quantization,
            quant_method=quant_method(hf),
            model_impl=settings.model_impl,
        ),
        "engine",
    )
    chosen = choose_quantization(plugins, hf)
    model = plugins.get("model", plugins.plan.of_kind("model")[0].qualified)
    quantization = None if chosen is None else chosen[1]
    if settings.load_format == "dummy":
        return dummy_bytes(quantization, hf, model, config, getattr(torch, dtype))
    return converted(quantization, hf, model, config, Place(settings.folder, Target(dtype, device)))


def device_of(settings: EngineSettings, memory: str | None) -> DeviceBytes:
    """Find the device to plan for: one of a given size, or the one here.

    Raises:
        ConfigError: The size cannot be read, or the device is not there.
    """
    from dovetail.runtime.memory.host import host_bytes
    from dovetail.runtime.memory.plan import CUDA_CONTEXT_BYTES, DeviceBytes, gib

    name = settings.device
    if memory is not None:
        total = size_of(memory)
        kind: Any = "cpu" if name == "cpu" else "cuda"
        taken = 0 if kind == "cpu" else CUDA_CONTEXT_BYTES
        if total <= taken:
            raise ConfigError(f"--device-memory {memory!r}: less than the {gib(taken)} that a process takes by itself")
        return DeviceBytes(kind=kind, name=f"a {'host' if kind == 'cpu' else 'GPU'}", total=total, free=total - taken)
    if name == "cpu" or (name == "auto" and not NVIDIA_DRIVER.exists()):
        return host_bytes()
    from dovetail.runtime.attention.backends import find_device
    from dovetail.runtime.device_memory import device_bytes

    return device_bytes(find_device(settings))


def size_of(text: str) -> int:
    """Read `80GiB`, `80GB`, `24576MiB` or plain bytes.

    Raises:
        ConfigError: It is none of these.
    """
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size <= 0:
        raise ConfigError(f"--device-memory {text!r}: expected a size such as 80GiB, 24576MiB or 85899345920")
    return size
