"""`dovetail warm MODEL`: compiles what an engine launches into the kernel cache, for images and new hosts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.base import log
from dovetail.contracts.errors import ConfigError
from dovetail_server.cli.exits import exit_code

if TYPE_CHECKING:
    from dovetail.messages import EngineInfo
    from dovetail.plugins import PluginPlan
    from dovetail_server.settings.serve import ServeSettings

USAGE = """usage: dovetail warm [MODEL] [options]

Compile every kernel that `dovetail serve` would launch for MODEL on this machine's GPU, and store them in the kernel
cache. A server that starts with that cache, the same options, GPU and packages compiles nothing. Starts the engine,
waits until all graphs are captured, and ends it; no request is served. On a CPU there is nothing to compile.

  --load-format dummy       where config.json is there and the weights are not, as in an image without them

Every option of `dovetail serve` can be given, and those that are served with should be: `dovetail serve --help=all`.
TRITON_CACHE_DIR names another folder than ~/.triton/cache, here and when serving.
"""


def main(argv: list[str]) -> int:
    """Fill the cache. Exit code 2 for what the user can fix, 1 for what the engine could not do."""
    if any(arg in {"-h", "--help"} for arg in argv):
        print(USAGE, end="")
        return 0
    from dovetail_server.cli.options import read_settings

    log.follow("server")
    return exit_code("warm", lambda: warm(read_settings(argv)))


def warm(settings: ServeSettings) -> int:
    """Check what `serve` checks of the model, start the engine until it has all its kernels, and say what was done.

    Raises:
        ConfigError: A flag, the model, the device or the environment is at fault.
        EngineError: The engine could not start.
    """
    from dovetail.processing.prepare import prepare
    from dovetail.runtime.device.devices import choose, installed
    from dovetail_server.start import preflight

    log.setup(settings.log_level, form=settings.log_format)
    prepared = prepare(preflight.with_model(settings), text=False)
    settings = prepared.settings
    device = choose(installed(prepared.registry, settings.device))
    if not device.compiles:
        print("Nothing to compile: this device launches no kernels. Run it where the GPU is.")
        return 0
    if settings.disable_compile_ahead:
        raise ConfigError("--disable-compile-ahead: then a server compiles at first use; leave it out to warm a cache")
    compiler = device.compiler()
    if compiler is None:
        raise ConfigError(f"device {device.kind}: nothing installed compiles its kernels ahead; for cuda, triton does")
    before, started = compiler.kept(), time.perf_counter()
    info = asyncio.run(start_once(settings.model_copy(update={"wait_for_kernels": True}), prepared.plan))
    print(warm_report(info, before, compiler.kept(), compiler.folder(), time.perf_counter() - started))
    return 0


async def start_once(settings: ServeSettings, plan: PluginPlan) -> EngineInfo:
    """Start the engine and end it."""
    from dovetail_server.start.run import make_engine

    engine = make_engine(settings, plan)
    try:
        return await engine.start()
    finally:
        await engine.close()


def warm_report(
    info: EngineInfo, before: Mapping[str, int], after: Mapping[str, int], folder: Path, seconds: float
) -> str:
    """Say what was compiled, and where it is."""
    new = len(after.keys() - before.keys())
    mib = sum(after.values()) / 2**20
    done = f"{new:,} kernel{'s' * (new > 1)} compiled" if new else "nothing was left to compile"
    return (
        f"{info.architecture} on {info.device}, attention {info.attention_backend}: {done}, {seconds:.1f} s with the "
        f"engine's start.\n{folder}: {len(after):,} kernels, {mib:,.1f} MiB. Keep this folder, or copy it to where "
        "TRITON_CACHE_DIR points, and `dovetail serve` with the same options finds them."
    )
