"""`dovetail run-batch`: answers the requests of a file without a server, through the code that serves batches."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError, DovetailError

if TYPE_CHECKING:
    from dovetail_server.settings import ServeSettings

USAGE = """usage: dovetail run-batch -i FILE -o FILE [MODEL] [options]

Answer the requests of a file, in the format of the batches of OpenAI's API, and write one line per request, in order.

  -i, --input-file FILE     one request per line: {"custom_id", "method", "url", "body"}
  -o, --output-file FILE    appears when everything is answered; refused requests are in it with their error
  --no-progress             show no progress bar

Every option of `dovetail serve` that concerns the model can be given too: `dovetail serve --help=all`.
"""


@dataclass(slots=True)
class Args:
    """The command's own arguments."""

    source: Path
    target: Path
    shows_progress: bool
    others: list[str]


def main(argv: list[str]) -> int:
    """Run a file. Exit code 2 for what the user can fix, 1 for what the engine could not do."""
    if not argv or any(arg in {"-h", "--help"} for arg in argv):
        print(USAGE, end="")
        return 0 if argv else 2
    try:
        wish = parse(argv)
        settings = settings_from(wish.others)
        return run(wish, settings)
    except ConfigError as error:
        print(f"dovetail run-batch: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except DovetailError as error:
        print(f"dovetail run-batch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parse(argv: list[str]) -> Args:
    """Read the command's own arguments.

    Raises:
        ConfigError: One is missing or names no usable file.
    """
    paths: dict[str, str] = {}
    names = {"-i": "-i", "--input-file": "-i", "-o": "-o", "--output-file": "-o"}
    others: list[str] = []
    shows_progress = True
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.partition("=")
        if name == "--no-progress":
            shows_progress = False
        elif name in names:
            if not equals and not rest:
                raise ConfigError(f"{name}: expected a file")
            paths[names[name]] = value if equals else rest.pop(0)
        else:
            others.append(arg)
    for name, what in (("-i", "--input-file FILE, the requests"), ("-o", "--output-file FILE, for the replies")):
        if name not in paths:
            raise ConfigError(f"{name} is missing; give {what}")
    source, target = Path(paths["-i"]), Path(paths["-o"])
    if not source.is_file():
        raise ConfigError(f"-i {str(source)!r}: no such file")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"-o {str(target)!r}: its folder does not exist")
    return Args(source, target, shows_progress, others)


def settings_from(argv: list[str]) -> ServeSettings:
    """Read what is left as the options of `dovetail serve`."""
    from dovetail_server.cli.options import load_settings, parse_flags

    flags = parse_flags(argv)
    if isinstance(flags, str):
        raise ConfigError("`dovetail serve --help=all` shows the options of the model")
    return load_settings(flags)


def run(wish: Args, settings: ServeSettings) -> int:
    """Check what is cheap to check, then run."""
    import asyncio

    from dovetail import log
    from dovetail.processing.prepare import prepare
    from dovetail_server import preflight

    if "log_level" not in settings.model_fields_set:
        settings = settings.model_copy(update={"log_level": "warning"})  # the progress bar tells the rest
    log.setup(settings.log_level, form=settings.log_format)
    prepared = prepare(preflight.with_model(settings))
    from dovetail_server.offline_batch import run_file

    return asyncio.run(run_file(prepared.settings, prepared.plan, wish.source, wish.target, wish.shows_progress))
