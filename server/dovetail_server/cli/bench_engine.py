"""The options of `dovetail bench latency` and `dovetail bench throughput`: their own, and those of the engine."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.contracts.errors import ConfigError
from dovetail_server.cli.bench_options import (
    BenchParser,
    count,
    counts,
    filled,
    positive,
    probability,
    span,
    temperature,
    whole,
    with_dashes,
)

if TYPE_CHECKING:
    from dovetail_server.settings.serve import ServeSettings

ENGINE_FLAGS = (
    "The engine's options (--model-path, --load-format, --dtype, …) are those of `dovetail serve --help=all`."
)
LATENCY = f"""Time the engine without HTTP, in a process of its own as it serves: requests of one length that begin
together, in batches of a size. {ENGINE_FLAGS}"""
THROUGHPUT = f"""Let the offline LLM answer many requests at once, in this process. {ENGINE_FLAGS}"""


def latency(argv: list[str]) -> int:
    """Run `dovetail bench latency`.

    Raises:
        ConfigError: What the user can fix.
        EngineError: What went wrong in the engine.
    """
    parser = BenchParser("latency", LATENCY)
    parser.add_argument("--batch-size", metavar="N,N", type=counts, default=[1, 16, 64], help="[1,16,64]")
    parser.add_argument("--input-len", metavar="N", type=count, default=512, help="tokens of a prompt [512]")
    parser.add_argument("--output-len", metavar="N", type=count, default=128, help="tokens to generate [128]")
    parser.add_argument("--rounds", metavar="N", type=count, default=3, help="of which the median is taken [3]")
    parser.add_argument("--top-p", metavar="P", type=probability, default=1.0, help="[1]")
    add_common(parser)
    args, settings = read(parser, argv)
    from dovetail_server.bench import report
    from dovetail_server.bench.latency import LatencyOptions, main

    report.check_json(args.json)
    sizes = list(dict.fromkeys(args.batch_size))
    own = {"settings": settings, "seed": seed_of(args), "bandwidth": bandwidth_of(args)}
    return main(filled(LatencyOptions, args, batch_sizes=sizes, **own))


def throughput(argv: list[str]) -> int:
    """Run `dovetail bench throughput`.

    Raises:
        ConfigError: What the user can fix.
        DovetailError: What went wrong in the engine.
    """
    parser = BenchParser("throughput", THROUGHPUT)
    parser.add_argument("--num-prompts", metavar="N", type=count, default=256, help="requests [256]")
    parser.add_argument("--input-len", metavar="N", type=span, help="prompt tokens; LOW:HIGH for a range [512]")
    parser.add_argument(
        "--output-len", metavar="N", type=span, default=(128, 128), help="tokens to generate; or LOW:HIGH [128]"
    )
    parser.add_argument("--shared-prefix-len", metavar="N", type=whole, help="tokens before each prompt [0]")
    parser.add_argument("--dataset", metavar="FILE", type=Path, help='JSON lines {"prompt", "output_len"} instead')
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="[yes]")
    add_common(parser)
    args, settings = read(parser, argv)
    if args.dataset is not None and (args.input_len is not None or args.shared_prefix_len is not None):
        name = "--input-len" if args.input_len is not None else "--shared-prefix-len"
        raise ConfigError(f"--dataset brings its own prompts; leave out {name}")
    from dovetail_server.bench import report
    from dovetail_server.bench.throughput import ThroughputOptions, main

    report.check_json(args.json)
    lengths = {"input_len": args.input_len or (512, 512), "shared_prefix_len": args.shared_prefix_len or 0}
    own = {"settings": settings, "seed": seed_of(args), "bandwidth": bandwidth_of(args)}
    return main(filled(ThroughputOptions, args, **lengths, **own))


def add_common(parser: BenchParser) -> None:
    """Add what both have."""
    parser.add_argument("--temperature", metavar="T", type=temperature, default=0.0, help="[0]")
    parser.add_argument("--seed", metavar="N", type=whole, help="seed of the prompts; default: random")
    parser.add_argument("--bandwidth", metavar="GB/s", type=positive, help="bandwidth of the device; default: measured")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything here too")


def read(parser: BenchParser, argv: Sequence[str]) -> tuple[argparse.Namespace, ServeSettings]:
    """Split the benchmark's own options off and read the others as the engine's.

    Raises:
        ConfigError: An option that neither has, or a wrong value.
    """
    args, others = parser.parse_known_args(with_dashes(argv))
    from dovetail.base import log
    from dovetail.base.settings import EngineSettings
    from dovetail_server.cli.options import load_settings, parse_flags

    flags = parse_flags(others)
    if isinstance(flags, str):
        raise ConfigError("`dovetail serve --help=all` lists the options of the engine")
    for name in flags:
        if name not in EngineSettings.model_fields and name != "config":
            raise ConfigError(
                f"--{name.replace('_', '-')}: no option of the engine, which is measured without a server"
            )
    log.setup("warning")
    return args, load_settings(flags)


def seed_of(args: argparse.Namespace) -> int:
    """Return the seed that was given, or any."""
    return args.seed if args.seed is not None else secrets.randbelow(1 << 31)


def bandwidth_of(args: argparse.Namespace) -> float | None:
    """Return bytes a second."""
    return args.bandwidth * 1e9 if args.bandwidth is not None else None
