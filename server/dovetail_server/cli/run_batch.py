"""`dovetail run-batch`: answers the requests of a file without a server, through the code that serves batches."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.base.distribution import install_extra
from dovetail.contracts.errors import ConfigError
from dovetail_server.cli.exits import exit_code
from dovetail_server.cli.option_tables import CommandParser, count

if TYPE_CHECKING:
    from dovetail_server.settings.serve import ServeSettings

USAGE = """usage: dovetail run-batch -i FILE -o FILE [MODEL] [options]

Answer the requests of a file, in the format of the batches of OpenAI's API, and write one line per request, in order.

  -i, --input-file FILE     one request per line: {"custom_id", "method", "url", "body"}
  -o, --output-file FILE    appears when everything is answered; refused requests are in it with their error
  --no-progress             show no progress bar
  --ray                     on the actors of a Ray cluster (RAY_ADDRESS, else this machine); needs dovetail-llm[ray].
                            -i and -o may be folders: every *.jsonl of the one becomes a file of the other.
                            A run that was ended goes on where it was when it is given again
  --replicas N              number of actors with --ray, each with its own engine; default: one per device

Every option of `dovetail serve` that concerns the model can be given too: `dovetail serve --help=all`.
"""


def main(argv: list[str]) -> int:
    """Run a file. Exit code 2 for what the user can fix, 1 for what the engine could not do."""
    if not argv or any(arg in {"-h", "--help"} for arg in argv):
        print(USAGE, end="")
        return 0 if argv else 2
    return exit_code("run-batch", lambda: read_and_run(argv))


def read_and_run(argv: list[str]) -> int:
    """Read the arguments and run the file.

    Raises:
        ConfigError: The user can fix it.
        DovetailError: The engine could not do it.
    """
    from dovetail_server.cli.options import read_settings

    wish = parse(argv)
    return run(wish, read_settings(wish.others))


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command's own arguments; the rest becomes `others`.

    Raises:
        ConfigError: One is missing or names no usable file.
    """
    parser = CommandParser("dovetail run-batch", add_help=False)
    parser.add_argument("-i", "--input-file", dest="source", type=Path)
    parser.add_argument("-o", "--output-file", dest="target", type=Path)
    parser.add_argument("--no-progress", dest="shows_progress", action="store_false")
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--replicas", type=count)
    args, others = parser.parse_known_args(argv)
    args.others = others
    if args.source is None:
        raise ConfigError("-i is missing; give --input-file FILE, the requests")
    if args.target is None:
        raise ConfigError("-o is missing; give --output-file FILE, for the replies")
    if args.replicas is not None and not args.ray:
        raise ConfigError(f"--replicas {args.replicas}: only --ray has replicas; give it, too")
    check_paths(args.source, args.target, may_be_folders=args.ray)
    return args


def check_paths(source: Path, target: Path, *, may_be_folders: bool) -> None:
    """Refuse an input or an output that is not there or of the wrong kind.

    Raises:
        ConfigError: Naming the flag.
    """
    if source.is_dir() and may_be_folders:
        if not target.is_dir():
            raise ConfigError(f"-o {str(target)!r}: -i is a folder, so this has to be one that exists")
        if source.resolve() == target.resolve():
            raise ConfigError(f"-o {str(target)!r}: that is the folder of the inputs; give another one")
        return
    if not source.is_file():
        hint = "a folder needs --ray" if source.is_dir() else "no such file"
        raise ConfigError(f"-i {str(source)!r}: {hint}")
    if target.is_dir():
        raise ConfigError(f"-o {str(target)!r}: a folder; give a file")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"-o {str(target)!r}: its folder does not exist")


def run(wish: argparse.Namespace, settings: ServeSettings) -> int:
    """Check what is cheap to check, then run."""
    import asyncio

    from dovetail.base import log
    from dovetail.processing.prepare import prepare
    from dovetail_server.start import preflight

    if "log_level" not in settings.model_fields_set:
        settings = settings.model_copy(update={"log_level": "warning"})  # the progress bar tells the rest
    log.setup(settings.log_level, form=settings.log_format)
    if wish.ray:
        return run_on_ray(wish, settings)
    prepared = prepare(preflight.with_model(settings))
    from dovetail_server.start.offline_batch import run_file

    return asyncio.run(run_file(prepared, wish.source, wish.target, wish.shows_progress))


def run_on_ray(wish: argparse.Namespace, settings: ServeSettings) -> int:
    """Run on a Ray cluster.

    Raises:
        ConfigError: Ray is not installed, or something that the user can fix.
    """
    try:
        from dovetail_server.ray.batch import run_files
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "aiohttp", "yarl"):
            raise
        text = f"--ray needs {error.name}, which is not installed: {install_extra('ray')}"
        raise ConfigError(text) from None
    return run_files(settings, wish.source, wish.target, wish.replicas, wish.shows_progress)
