"""`dovetail serve`: settings, checks, then the engine and the HTTP server side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dovetail.base import log
from dovetail.base.distribution import install_extra
from dovetail.contracts.errors import ConfigError
from dovetail.plugins.exits import ended_by, innermost, name_exits
from dovetail_server.cli.exits import OF_A_MODEL, exit_code

if TYPE_CHECKING:
    from dovetail.processing.plugin_settings import PluginSettings
    from dovetail_server.settings.serve import ServeSettings


def main(argv: list[str]) -> int:
    """Serve until a signal. Exit code 2 for what the user can fix, 1 for what the engine could not do."""
    log.follow("server")

    def work() -> int:
        settings = settings_from(argv)
        return 0 if settings is None else serve(settings)

    try:
        return exit_code("serve", work, OF_A_MODEL)
    except SystemExit as error:  # nothing of ours raises it
        text = ended_by(f"sys.exit({error.code!r})", innermost(error.__traceback__))
        log.complain(f"dovetail serve: error: {text}")
        return error.code if isinstance(error.code, int) and error.code else 1


def settings_from(argv: list[str]) -> ServeSettings | None:
    """Read the settings, or print the help and return None."""
    from dovetail_server.cli.options import load_settings, parse_flags

    flags = parse_flags(argv)
    if isinstance(flags, str):
        print(flags, end="")
        print_plugin_help([arg for arg in argv if not arg.startswith(("-h", "--help"))])
        return None
    return load_settings(flags)


def print_plugin_help(argv: list[str]) -> None:
    """Show the options of the plugins that the arguments, the environment or the configuration file name."""
    from dovetail_server.cli.options import load_settings, parse_flags

    try:
        flags = parse_flags(argv)
        lines = [] if isinstance(flags, str) else list(help_text(load_settings(flags)))
    except ConfigError as error:
        lines = [f"\nThe options of plugins cannot be shown: {error}"]
    for line in lines:
        print(line)


def help_text(settings: PluginSettings) -> Iterator[str]:
    """Yield the help of the options of every plugin that is named: hook plugins, files, parsers, backends.

    Raises:
        PluginError: One of them cannot be used.
    """
    from dovetail.plugins.loader import describe
    from dovetail.plugins.options import describe_options, option_key
    from dovetail.plugins.plan import make_plan
    from dovetail.processing.plan import NAMED, options_class, scan
    from dovetail.processing.plugin_settings import ENV_PREFIX

    registry, manager = scan(settings)
    named = {kind: getattr(settings, name) for kind, name in NAMED.items()}
    named = {kind: name for kind, name in named.items() if name not in (None, "auto", [], ["auto"], ["plain"])}
    halves = {name: getattr(settings, name) for name in ("prefill_attention_backend", "decode_attention_backend")}
    plan = make_plan(registry, **named, **halves, hooks=[planned.qualified for planned in manager.planned])
    for plugin in plan.plugins:
        declared = options_class(plugin, manager, settings.plugin_timeout)
        if declared is None:
            continue
        yield f"\noptions of {describe(plugin)}:"
        for option in describe_options(declared):
            default = f" [{option.default}]" if option.default is not None else ""
            unit = option.type if option.type.startswith("{") else option.type.upper()
            flag = f"  --{option_key(plugin.name)}.{option.flag} {unit}"
            yield f"{flag:<29} {option.help}{default}".rstrip()
        variable = f"{ENV_PREFIX}PLUGIN__{option_key(plugin.name).replace('-', '_').upper()}__…"
        yield f"  Each can also be a variable {variable} or a line below plugins.{plugin.name} in --config FILE."


def serve(settings: ServeSettings) -> int:
    """Check everything that is cheap to check, then run."""
    import asyncio
    import signal

    from dovetail.processing.prepare import prepare
    from dovetail_server.http.connections import raise_file_limit
    from dovetail_server.start import preflight
    from dovetail_server.start.startup import CHECKS, StartupTimer

    log.setup(settings.log_level, form=settings.log_format)
    if (notice := cpu_notice()) is not None:
        log.complain(notice)
    if settings.data_parallel_size > 1:
        return serve_several(settings)
    name_exits()
    raise_file_limit()
    phases = StartupTimer()
    is_demo = settings.model_path is None
    with phases.phase(CHECKS) as notes:
        settings = preflight.with_model(settings)
        preflight.check_certificate(settings)
        preflight.check_keys(settings)
        preflight.check_storage(settings)
        prepared = prepare(settings)
        settings, plan = prepared.settings, prepared.plan
        listener = preflight.bind(settings.host, settings.port)
        notes.append(f"{len(plan.plugins)} plugins planned")
    if is_demo:
        print_demo_note()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the HTTP server takes signals over
    from dovetail_server.start.run import new_event_loop, run
    from dovetail_server.supervision.supervisor import Supervisor

    tasks = Supervisor()
    with tasks.cancelling_exit(), asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(run(settings, prepared.registry, plan, prepared.model, listener, phases, tasks))


def serve_several(settings: ServeSettings, urls: Sequence[str] = ()) -> int:
    """Serve with several workers, of our own or those at `urls`.

    Raises:
        ConfigError: What the gateway needs is not installed.
    """
    try:
        from dovetail_server.gateway.run import serve as serve_gateway
    except ModuleNotFoundError as error:
        if error.name not in ("aiohttp", "yarl"):
            raise
        text = f"several workers need {error.name}, which is not installed: {install_extra('gateway')}"
        raise ConfigError(text) from None
    return serve_gateway(settings, urls)


def print_demo_note() -> None:
    """Say that this is a demo, and how to serve something else."""
    import logging

    logging.getLogger("dovetail.server").info(
        "No model given: serving the bundled DEMO model, a toy that knows a few skills. "
        "`dovetail serve DIR` serves your own."
    )


def cpu_notice() -> str | None:
    """Return what an operator's limit of processor time will do to this process and its children; None for no limit."""
    import resource

    soft = resource.getrlimit(resource.RLIMIT_CPU)[0]
    if soft == resource.RLIM_INFINITY:
        return None
    return (
        f"dovetail: each process may use {soft:,} s of processor time (ulimit -t, LimitCPU): then the system ends it, "
        "the engine and the server too, which cannot be kept from here; serve without that limit, or expect restarts"
    )
