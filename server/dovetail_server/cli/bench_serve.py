"""The options of `dovetail bench serve`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace

from dovetail.base.distribution import install_extra
from dovetail.contracts.errors import ConfigError
from dovetail_server.bench.workloads import CHAT_SUITES, SUITES, ServeOptions, Workload
from dovetail_server.cli.option_tables import BenchParser, cut_at_dashes, filled

OF_A_SUITE = ("num_prompts", "concurrency", "request_rate", "input_len", "output_len", "shared_prefix_len", "stream")
OF_LENGTHS = ("input_len", "shared_prefix_len")


def main(argv: list[str]) -> int:
    """Run `dovetail bench serve`.

    Raises:
        ConfigError: What the user can fix.
        DovetailError: What went wrong on the way.
    """
    own, flags = cut_at_dashes(argv)
    options = options_from(BenchParser("serve").read(own), flags)
    try:
        from dovetail_server.bench import report, serve
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ConfigError(f"aiohttp is not installed; run `{install_extra('bench')}`") from None
    report.check_json(options.json)
    return serve.main(options)


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
        serve_flags=tuple(flags),
        endpoint=endpoint,
        sends_text=args.prompts != "ids",
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
