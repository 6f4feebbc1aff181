"""`dovetail run-batch`: answers the requests of a file without a server, through the code that serves batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.base.distribution import install_extra
from dovetail.contracts.errors import ConfigError
from dovetail_server.cli.exits import exit_code

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


@dataclass(slots=True)
class RunBatchArgs:
    """The command's own arguments."""

    source: Path
    target: Path
    shows_progress: bool
    others: list[str]
    uses_ray: bool = False
    num_replicas: int | None = None


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
    wish = parse(argv)
    return run(wish, settings_from(wish.others))


def parse(argv: list[str]) -> RunBatchArgs:
    """Read the command's own arguments.

    Raises:
        ConfigError: One is missing or names no usable file.
    """
    paths: dict[str, str] = {}
    names = {"-i": "-i", "--input-file": "-i", "-o": "-o", "--output-file": "-o"}
    others: list[str] = []
    shows_progress, uses_ray = True, False
    num_replicas: int | None = None
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.partition("=")
        if name == "--no-progress":
            shows_progress = False
        elif name == "--ray" and not equals:
            uses_ray = True
        elif name == "--replicas":
            num_replicas = count(value if equals else rest.pop(0) if rest else "")
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
    if num_replicas is not None and not uses_ray:
        raise ConfigError(f"--replicas {num_replicas}: only --ray has replicas; give it, too")
    check_paths(source, target, may_be_folders=uses_ray)
    return RunBatchArgs(source, target, shows_progress, others, uses_ray, num_replicas)


def count(text: str) -> int:
    """Read a number of replicas.

    Raises:
        ConfigError: It is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--replicas {text!r}: expected a number from 1")
    return int(text)


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


def settings_from(argv: list[str]) -> ServeSettings:
    """Read what is left as the options of `dovetail serve`."""
    from dovetail_server.cli.options import load_settings, parse_flags

    flags = parse_flags(argv)
    if isinstance(flags, str):
        raise ConfigError("`dovetail serve --help=all` shows the options of the model")
    return load_settings(flags)


def run(wish: RunBatchArgs, settings: ServeSettings) -> int:
    """Check what is cheap to check, then run."""
    import asyncio

    from dovetail.base import log
    from dovetail.processing.prepare import prepare
    from dovetail_server.start import preflight

    if "log_level" not in settings.model_fields_set:
        settings = settings.model_copy(update={"log_level": "warning"})  # the progress bar tells the rest
    log.setup(settings.log_level, form=settings.log_format)
    if wish.uses_ray:
        return run_on_ray(wish, settings)
    prepared = prepare(preflight.with_model(settings))
    from dovetail_server.start.offline_batch import run_file

    return asyncio.run(run_file(prepared, wish.source, wish.target, wish.shows_progress))


def run_on_ray(wish: RunBatchArgs, settings: ServeSettings) -> int:
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
    return run_files(settings, wish.source, wish.target, wish.num_replicas, wish.shows_progress)
