"""The options of `dovetail bench serve`."""

from __future__ import annotations

import argparse
import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dovetail.base.distribution import install_extra
from dovetail.contracts.errors import ConfigError
from dovetail_server.bench.options import ServeOptions
from dovetail_server.bench.wire import PATHS
from dovetail_server.bench.workloads import CHAT_SUITES, SUITES, Workload
from dovetail_server.cli.bench_options import (
    BenchParser,
    count,
    filled,
    folder,
    positive,
    rate,
    span,
    temperature,
    whole,
)

ABOUT = """Put load on a server and print what its clients saw. With --base-url, any server that speaks OpenAI's API;
with --model-path alone, our own, started for the purpose with the flags of `dovetail serve` after `--`."""
OF_A_SUITE = ("num_prompts", "concurrency", "request_rate", "input_len", "output_len", "shared_prefix_len", "stream")
OF_LENGTHS = ("input_len", "shared_prefix_len")


def build_parser() -> BenchParser:
    """Describe the options."""
    parser = BenchParser("serve", ABOUT)
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", metavar="URL", help="server to measure, such as http://127.0.0.1:30000")
    server.add_argument("--model", metavar="NAME", help="name of the model in requests; the first served one")
    server.add_argument(
        "--model-path",
        metavar="DIR",
        type=folder,
        help="model folder: of the server at --base-url, for the floor; without --base-url, served here",
    )
    server.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    load = parser.add_argument_group("load")
    load.add_argument("--endpoint", choices=tuple(PATHS), help="[completions; chat for --suite user]")
    load.add_argument(
        "--prompts", choices=("text", "ids"), help="random prompts as text of a tokenizer, or as token ids [text]"
    )
    load.add_argument("--num-prompts", metavar="N", type=count, help="requests [64]")
    arrival_rate = load.add_mutually_exclusive_group()
    arrival_rate.add_argument(
        "--concurrency", "--max-concurrency", metavar="N", type=count, help="requests in flight at once [16]"
    )
    arrival_rate.add_argument(
        "--request-rate", metavar="R", type=rate, help="requests a second, at random moments; or inf"
    )
    load.add_argument(
        "--input-len", "--random-input-len", metavar="N", type=span, help="prompt tokens; LOW:HIGH for a range [512]"
    )
    load.add_argument(
        "--output-len", "--random-output-len", metavar="N", type=span, help="tokens to generate; or LOW:HIGH [256]"
    )
    load.add_argument(
        "--shared-prefix-len", metavar="N", type=whole, help="tokens before each prompt, the same for all [0]"
    )
    load.add_argument(
        "--dataset", metavar="FILE", type=Path, help='JSON lines {"prompt" or "messages", "output_len"} to send instead'
    )
    load.add_argument("--stream", action=argparse.BooleanOptionalAction, help="stream replies [yes]")
    load.add_argument("--temperature", metavar="T", type=temperature, default=0.0, help="[0]")
    load.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="generate the full length [yes]"
    )
    load.add_argument("--warmup", metavar="N", type=whole, help="requests before the clock starts [as are in flight]")
    load.add_argument("--seed", metavar="N", type=whole, help="seed of the prompts; default: a new one")
    suite = parser.add_argument_group("suite")
    suite.add_argument("--suite", choices=tuple(SUITES), help="run named workloads instead of one")
    suite.add_argument("--only", metavar="NAME,NAME", help="these workloads of the suite")
    more = parser.add_argument_group("measuring")
    more.add_argument("--tokenizer", metavar="DIR", type=folder, help="folder with tokenizer.json, for random prompts")
    more.add_argument("--bandwidth", metavar="GB/s", type=positive, help="bandwidth of the device; default: measured")
    more.add_argument("--workers", metavar="N", type=count, help="client processes; default: by load and cores")
    more.add_argument("--timeout", metavar="S", type=positive, default=600.0, help="of one request [600]")
    more.add_argument(
        "--start-timeout", metavar="S", type=positive, default=600.0, help="of the server that is started [600]"
    )
    more.add_argument("--json", metavar="FILE", type=Path, help="write everything here too")
    return parser


def main(argv: list[str]) -> int:
    """Run `dovetail bench serve`.

    Raises:
        ConfigError: What the user can fix.
        DovetailError: What went wrong on the way.
    """
    own, flags = split_flags(argv)
    options = options_from(build_parser().read(own), flags)
    try:
        from dovetail_server.bench import report, serve
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ConfigError(f"aiohttp is not installed; run `{install_extra('bench')}`") from None
    report.check_json(options.json)
    return serve.main(options)


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the benchmark's own arguments, and the server's flags after `--`."""
    if "--" not in argv:
        return list(argv), []
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def options_from(args: argparse.Namespace, flags: Sequence[str]) -> ServeOptions:
    """Check what does not fit together.

    Raises:
        ConfigError: Options that exclude or need each other.
    """
    if args.base_url is None and args.model_path is None:
        raise ConfigError("give --base-url URL to measure a running server, or --model-path DIR to start one")
    if args.base_url is not None and flags:
        raise ConfigError(f"flags after `--` ({flags[0]} …) are for a server that is started here, not for --base-url")
    if args.dataset is not None and (args.tokenizer is not None or args.suite is not None):
        given = "--tokenizer" if args.tokenizer is not None else "--suite"
        raise ConfigError(f"--dataset brings its own prompts; leave out {given}")
    endpoint = endpoint_from(args)
    return filled(
        ServeOptions,
        args,
        workloads=suite_from(args) if args.suite is not None else [workload_from(args)],
        seed=args.seed if args.seed is not None else secrets.randbelow(1 << 31),
        serve_flags=tuple(flags),
        endpoint=endpoint,
        sends_text=args.prompts != "ids",
        bandwidth=args.bandwidth * 1e9 if args.bandwidth is not None else None,
        timeout_s=args.timeout,
        start_timeout_s=args.start_timeout,
    )


def endpoint_from(args: argparse.Namespace) -> str:
    """Choose the endpoint.

    Raises:
        ConfigError: It does not take what is to be sent.
    """
    is_chat = args.suite in CHAT_SUITES
    endpoint: str = args.endpoint or ("chat" if is_chat else "completions")
    if is_chat and endpoint != "chat":
        raise ConfigError(f"--endpoint {endpoint}: --suite {args.suite} is of conversations; leave --endpoint out")
    if endpoint == "chat" and args.prompts == "ids":
        raise ConfigError("--prompts ids: conversations are text; leave it out, or take another --endpoint")
    if args.dataset is not None and args.prompts is not None:
        raise ConfigError("--dataset brings its own prompts; leave out --prompts")
    return endpoint


def suite_from(args: argparse.Namespace) -> list[Workload]:
    """Choose the workloads of a suite.

    Raises:
        ConfigError: An option that a suite sets itself, or a name it does not have.
    """
    for name in OF_A_SUITE:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: set by --suite; leave one of them out")
    suite = SUITES[args.suite]
    names = [name.strip() for name in args.only.split(",")] if args.only is not None else [w.name for w in suite]
    known = {workload.name for workload in suite}
    if strange := [name for name in names if name not in known]:
        raise ConfigError(f"--only {strange[0]!r}: no such workload; there are {', '.join(w.name for w in suite)}")
    chosen = [workload for workload in suite if workload.name in names]
    return chosen if args.warmup is None else [replace(workload, warmup=args.warmup) for workload in chosen]


def workload_from(args: argparse.Namespace) -> Workload:
    """Build the one workload that the options describe.

    Raises:
        ConfigError: `--only` without a suite, or a length beside a file that has its own.
    """
    if args.only is not None:
        raise ConfigError("--only chooses workloads of a suite; give --suite standard")
    if args.dataset is not None and (given := [n for n in OF_LENGTHS if getattr(args, n) is not None]):
        raise ConfigError(f"--dataset brings its own prompts; leave out --{given[0].replace('_', '-')}")
    num, arrival_rate = args.num_prompts or 64, args.request_rate
    return Workload(
        name="load",
        num_prompts=num,
        concurrency=args.concurrency or 16 if arrival_rate is None else num if arrival_rate == math.inf else None,
        request_rate=None if arrival_rate == math.inf else arrival_rate,
        input_len=args.input_len or (512, 512),
        output_len=args.output_len or (256, 256),
        shared_prefix_len=args.shared_prefix_len or 0,
        stream=args.stream is not False,
        warmup=args.warmup,
    )
