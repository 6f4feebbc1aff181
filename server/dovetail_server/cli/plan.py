"""`dovetail plan MODEL`: how the engine would divide a device's memory. Loads no weights, and no torch where it can."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from dovetail.contracts.errors import ConfigError
from dovetail_server.cli.exits import OF_A_MODEL, exit_code
from dovetail_server.cli.option_tables import CommandParser

if TYPE_CHECKING:
    from dovetail.base.settings import EngineSettings
    from dovetail.contracts.config import ModelConfig
    from dovetail.plugins.plan import PluginPlan
    from dovetail.runtime.memory.plan import DeviceBytes, MemoryPlan
    from dovetail_server.settings.serve import ServeSettings

USAGE = """usage: dovetail plan [MODEL] [options]

Show how `dovetail serve` would divide the memory of a device between the weights of MODEL, the KV cache, activations
and CUDA graphs, and how many requests the KV cache holds. Reads config.json and the headers of the safetensors files.

  --device-memory SIZE      plan for a device with so much memory, such as 80GiB; a GPU unless --device cpu is given.
                            Default: this machine's device and its free memory
  --json                    print JSON

The options of `dovetail serve` that concern memory can be given too: --device, --dtype, --context-length,
--mem-fraction-static, --gpu-memory-utilization, --max-total-tokens, --max-running-requests, --chunked-prefill-size,
--page-size, --state-dtype, --state-copies, --max-image-patches, --disable-cuda-graph, --load-format dummy,
--quantization, --tensor-parallel-size, --expert-parallel (the plan is that of one rank).
`dovetail serve --help=all` explains them.
"""


def main(argv: list[str]) -> int:
    """Print the plan. Exit code 2 for what the user can fix, a model that does not fit included."""
    if any(arg in {"-h", "--help"} for arg in argv):
        print(USAGE, end="")
        return 0
    return exit_code("plan", lambda: show(parse(argv)), OF_A_MODEL)


def show(wish: argparse.Namespace) -> int:
    """Print a plan; raises as `plan` does."""
    found = plan(wish)
    if wish.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        from dovetail.runtime.memory.host import print_table

        print_table(found, to_stderr=False)
        for note in found.notes:
            print(note)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command's own arguments; the rest becomes `others`.

    Raises:
        ConfigError: A value is missing.
    """
    parser = CommandParser("dovetail plan", add_help=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device-memory", metavar="SIZE, such as 80GiB")
    args, others = parser.parse_known_args(argv)
    args.others = others
    return args


def plan(wish: argparse.Namespace) -> MemoryPlan:
    """Make the plan with the engine's own function.

    Raises:
        ConfigError: A flag, the model or the device is at fault, or the model does not fit.
    """
    from dovetail.processing.prepare import examine
    from dovetail.runtime.cache_dtype import with_cache_dtype
    from dovetail.runtime.checkpoint.weight_size import head_row_bytes, weight_size
    from dovetail.runtime.memory.plan import plan_memory
    from dovetail_server.cli.options import read_settings
    from dovetail_server.start import preflight
    from dovetail_server.start.folder_facts import model_config, read_as, tokenizer_of

    given: ServeSettings = preflight.with_model(read_settings(wish.others))
    elsewhere = None if wish.device_memory is None else given.device
    is_read = given.load_format.lower() != "dummy"  # what is made up may be of a folder without a tokenizer
    found = examine(given, text=is_read, device=elsewhere)
    settings, model = found.settings, found.model
    device = device_of(settings, wish.device_memory)
    ranks = settings.tensor_parallel_size
    facts = model_config(model, found.registry.resolve("model", found.plan.of_kind("model")[0].qualified))
    facts = facts if found.plan.of_kind("processor") else facts.text_only
    config = with_cache_dtype(facts, settings)
    dtype = config.dtype if settings.dtype == "auto" else settings.dtype
    local = config.of_rank(ranks)
    read = read_as(found, config, dtype, device.kind)
    if is_read:
        tokenizer_of(model, config)
    is_repacked = repacks_head(found.plan, config, dtype, device.kind, ranks)
    size = weight_size(
        model.headers if read.checkpoint is None else read.checkpoint.headers, config, dtype, built=read.built,
        head_row_bytes=head_row_bytes(read.head, config, dtype, is_repacked=is_repacked), num_ranks=ranks,
    )  # fmt: skip
    has_graphs = device.kind == "cuda" and not settings.disable_cuda_graph
    made = plan_memory(settings, local, dtype, device.of_rank(ranks), size.num_bytes, has_graphs=has_graphs)
    return made if read.checkpoint is None else dataclasses.replace(made, weight_notes=read.checkpoint.notes)


def repacks_head(plan: PluginPlan, config: ModelConfig, dtype: str, kind: str, ranks: int) -> bool:
    """Whether a kernel set would repack the output head; sets answer without a device."""
    from dovetail.contracts.device import DeviceView, is_interpreted
    from dovetail.contracts.kernels import Ask, Claim, make_ask, repacks
    from dovetail.plugins.loader import import_planned

    sets = [import_planned(planned)() for planned in plan.of_kind("kernels")]

    def serves(ask: Ask) -> bool:
        return any(kind in one.devices and isinstance(one.serves(ask), Claim) for one in sets)

    dims, view = {"N": -(-config.vocab_size // ranks), "K": config.hidden_size}, DeviceView(kind)
    return repacks(make_ask("linear", view._replace(is_interpreted=is_interpreted()), dtype, dims, {}), serves)


def device_of(settings: EngineSettings, memory: str | None) -> DeviceBytes:
    """Find the device to plan for: one of a given size, or the one here.

    Raises:
        ConfigError: The size cannot be read, or the device is not there.
    """
    from dovetail.runtime.memory.checks import gib
    from dovetail.runtime.memory.host import host_bytes
    from dovetail.runtime.memory.plan import CONTEXT_BYTES, DeviceBytes

    name = settings.device
    if memory is not None:
        total = size_of(memory)
        kind: Any = "cpu" if name == "cpu" else "cuda"
        taken = 0 if kind == "cpu" else CONTEXT_BYTES
        if total <= taken:
            raise ConfigError(f"--device-memory {memory!r}: less than the {gib(taken)} that a process takes by itself")
        return DeviceBytes(kind=kind, name=f"a {'host' if kind == 'cpu' else 'GPU'}", total=total, free=total - taken)
    from dovetail.plugins import Registry
    from dovetail.runtime.device.devices import HOST, check_device, choose, installed, take

    registry = Registry.scan()
    if check_device(registry, name) == HOST:
        return host_bytes()
    from dovetail.runtime.device_memory import device_bytes

    return device_bytes(take(choose(installed(registry, name)), settings))


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
