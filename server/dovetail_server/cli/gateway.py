"""`dovetail gateway`: one address in front of servers that run already, on any hosts."""

from __future__ import annotations

from urllib.parse import urlsplit

from dovetail.base import log
from dovetail.contracts.errors import ConfigError
from dovetail_server.cli.exits import exit_code
from dovetail_server.cli.option_tables import CommandParser
from dovetail_server.cli.options import HELP, load_settings, parse_flags
from dovetail_server.cli.serve import serve_several
from dovetail_server.settings.serve import ServeSettings

FIELDS = frozenset(HELP["gateway"].split())
"""Settings of `dovetail serve` that are about the address and its routes, not about the model behind it."""
USAGE = """usage: dovetail gateway --worker URL --worker URL … [options]

Put one address in front of several servers of one model. Requests that share the beginning of their prompts go to the
server that has it cached. A server that stops or fails gets none.

  --worker URL              where a `dovetail serve` listens, such as http://10.0.0.5:30000; once for each

Options of `dovetail serve` that concern the address can be given too: {names}.
Give --apis as the servers have it: routes of packages are then placed and resumed, too.
"""


def main(argv: list[str]) -> int:
    """Serve until a signal. Exit code 2 for what the user can fix, 1 for the rest."""
    if not argv or any(arg in {"-h", "--help"} for arg in argv):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(FIELDS))
        print(USAGE.format(names=names), end="")
        return 0 if argv else 2
    log.follow("gateway")
    return exit_code("gateway", lambda: serve(argv))


def serve(argv: list[str]) -> int:
    """Serve until a signal.

    Raises:
        ConfigError: An argument cannot be used, or is a setting of the servers.
    """
    urls, others = split_workers(argv)
    flags = parse_flags(others)
    if isinstance(flags, str):
        raise ConfigError("--help=all: give --help")
    settings = load_settings(flags)
    # Of flags only: the environment may be that of servers, too, as in an image.
    if path := flags.get("model_path"):
        raise ConfigError(f"{path!r}: unexpected; each server's address needs a --worker, and each server its model")
    if strange := sorted((set(flags) & set(ServeSettings.model_fields)) - FIELDS):
        name = f"--{strange[0].replace('_', '-')}"
        raise ConfigError(f"{name}: a setting of the servers behind a gateway; give it to each `dovetail serve`")
    log.setup(settings.log_level, form=settings.log_format)
    return serve_several(settings.model_copy(update={"served_model_name": ["the workers' model"]}), urls)


def split_workers(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the workers' addresses, and the other arguments.

    Raises:
        ConfigError: None is given, one twice, or one that is no address of a server.
    """
    parser = CommandParser("dovetail gateway", add_help=False)
    parser.add_argument("--worker", action="append", default=[], type=checked, nargs="?", const="", metavar="URL")
    found, others = parser.parse_known_args(argv)
    urls: list[str] = found.worker
    if not urls:
        raise ConfigError(
            "no --worker is given; give the address of each server, such as --worker http://10.0.0.5:30000"
        )
    if len(set(urls)) < len(urls):
        twice = next(url for url in urls if urls.count(url) > 1)
        raise ConfigError(f"--worker {twice} is given twice; give each server once")
    return urls, others


def checked(given: str) -> str:
    """Return an address as it is used.

    Raises:
        ConfigError: It is none.
    """
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"--worker {given!r}: not the address of a server; give one such as http://10.0.0.5:30000")
    if parts.path.strip("/"):
        raise ConfigError(f"--worker {given!r}: leave out {parts.path!r}; a gateway adds the routes itself")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "")
