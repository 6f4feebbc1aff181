"""The options of `dovetail bench latency` and `dovetail bench throughput`: their own, and those of the engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail.contracts.errors import ConfigError
from dovetail_server.cli.option_tables import BenchParser, filled, with_dashes

if TYPE_CHECKING:
    from dovetail_server.settings.serve import ServeSettings


def latency(argv: list[str]) -> int:
    """Run `dovetail bench latency`.

    Raises:
        ConfigError: What the user can fix.
        EngineError: What went wrong in the engine.
    """
    args, settings = read("latency", argv)
    from dovetail_server.bench import report
    from dovetail_server.bench.latency import LatencyOptions, main

    report.check_json(args.json)
    sizes = list(dict.fromkeys(args.batch_size))
    return main(filled(LatencyOptions, args, batch_sizes=sizes, settings=settings))


def throughput(argv: list[str]) -> int:
    """Run `dovetail bench throughput`.

    Raises:
        ConfigError: What the user can fix.
        DovetailError: What went wrong in the engine.
    """
    args, settings = read("throughput", argv)
    if args.dataset is not None and (args.input_len is not None or args.shared_prefix_len is not None):
        name = "--input-len" if args.input_len is not None else "--shared-prefix-len"
        raise ConfigError(f"--dataset brings its own prompts; leave out {name}")
    from dovetail_server.bench import report
    from dovetail_server.bench.throughput import ThroughputOptions, main

    report.check_json(args.json)
    lengths = {"input_len": args.input_len or (512, 512), "shared_prefix_len": args.shared_prefix_len or 0}
    return main(filled(ThroughputOptions, args, settings=settings, **lengths))


def read(name: str, argv: Sequence[str]) -> tuple[argparse.Namespace, ServeSettings]:
    """Split the benchmark's own options off and read the others as the engine's.

    Raises:
        ConfigError: An option that neither has, or a wrong value.
    """
    args, others = BenchParser(name).parse_known_args(with_dashes(argv))
    from dovetail.base import log
    from dovetail.base.settings import EngineSettings
    from dovetail_server.cli.options import load_settings, parse_flags

    flags = parse_flags(others)
    if isinstance(flags, str):
        raise ConfigError("`dovetail serve --help=all` lists the options of the engine")
    for flag in flags:
        if flag not in EngineSettings.model_fields and flag != "config":
            raise ConfigError(
                f"--{flag.replace('_', '-')}: no option of the engine, which is measured without a server"
            )
    log.setup("warning")
    return args, load_settings(flags)
