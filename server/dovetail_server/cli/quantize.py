"""`dovetail quantize MODEL OUT --method …`: write a checkpoint in 8 or 4 bits."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from dovetail.contracts.errors import ConfigError
from dovetail_server.cli.exits import exit_code
from dovetail_server.cli.option_tables import CommandParser

USAGE = """usage: dovetail quantize MODEL OUT --method METHOD

Write the checkpoint of MODEL, a folder in bf16, fp16 or fp32, to the new folder OUT in fewer bits. `dovetail serve OUT`
serves it; transformers and others read it too (compressed-tensors). No samples of text are needed. Norms, embeddings,
routers and the output head stay as they are.

  --method METHOD           fp8    8-bit floating point, a scale for each row
                            int8   8-bit integers, a scale for each row
                            int4   4-bit integers, a scale for 128 inputs of a row (64 or 32 where 128 divides none)
"""
METHODS = ("fp8", "int8", "int4")


def main(argv: list[str]) -> int:
    """Write it. Exit code 2 for what the user can fix, 130 where it was told to end: nothing is left then."""
    if any(arg in {"-h", "--help"} for arg in argv):
        print(USAGE, end="")
        return 0
    return exit_code("quantize", lambda: write(parse(argv)))


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the arguments.

    Raises:
        ConfigError: One is missing, unknown or wrong.
    """
    parser = CommandParser("dovetail quantize", add_help=False)
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--method", choices=METHODS, required=True)
    return parser.parse_args(argv)


def write(wish: argparse.Namespace) -> int:
    """Find the model's plugin and quantise.

    Raises:
        ConfigError: The model cannot be quantised, or the folder not written.
    """
    from dovetail.plugins import Registry
    from dovetail.plugins.loader import import_planned
    from dovetail.plugins.plan import as_planned, model_plugin
    from dovetail.runtime.checkpoint.folder import ModelFolder
    from dovetail.runtime.hf_config import quant_method
    from dovetail_server.quantize.checkpoint import quantize

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    model = ModelFolder.read(wish.model)
    if method := quant_method(model.config):
        raise ConfigError(f"{wish.model}: is quantised already ({method}); give the checkpoint that it was made from")
    registry = Registry.scan()
    record = registry.resolve("model", model_plugin(registry, model.architecture))
    plugin = import_planned(as_planned(record))
    done = quantize(model, wish.out, wish.method, plugin, model.model_config(plugin.config_from_hf))
    print(
        f"{wish.out}: {done.num} matrices in {wish.method}; {done.bytes_before / 2**20:,.1f} MiB became "
        f"{done.bytes_after / 2**20:,.1f} MiB. Left as they are: {len(done.plain)} modules, such as {done.plain[0]}."
    )
    return 0
