"""`dovetail top`: what a server does now, once a second."""

from __future__ import annotations

import argparse
import time
from contextlib import suppress

from dovetail.contracts.errors import DovetailError
from dovetail_server.cli.exits import exit_code


def main(argv: list[str]) -> int:
    """Watch a server until Ctrl-C. Exit code 1 where the first look gets no answer, 2 for what the user can fix."""
    from dovetail_server.terminal.client import DEFAULT_URL

    parser = argparse.ArgumentParser(
        prog="dovetail top", description="Watch a server at work; Ctrl-C ends.", allow_abbrev=False
    )
    parser.add_argument("--url", default=DEFAULT_URL, help="address of the server (%(default)s)")
    parser.add_argument("--api-key", help="key of the server; default: DOVETAIL_API_KEY")
    parser.add_argument("--interval", type=_seconds, default=1.0, help="refresh interval in seconds (%(default)s)")
    parser.add_argument("--once", action="store_true", help="print one snapshot and exit")
    args = parser.parse_args(argv)
    return exit_code("top", lambda: watch(args.url, args.api_key, args.interval, once=args.once))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("expected 0.1 to 3600 seconds")
    return value


def watch(url: str, key: str | None, interval: float, *, once: bool) -> int:
    """Draw looks at a server until interrupted; return 0.

    Raises:
        DovetailError: The first look failed; later ones may, and are tried again.
    """
    from rich.console import Console
    from rich.live import Live

    from dovetail_server.terminal.client import ServerClient, key_from
    from dovetail_server.terminal.top import Load, picture

    server = ServerClient(url, key_from(key))

    def look() -> Load:
        return Load.read(server.get("/metrics").decode(), time.monotonic())

    console = Console()
    load, before, problem = look(), None, ""
    if once:
        console.print(picture(server.url, load, None, ""))
        return 0
    first = picture(server.url, load, None, "")
    with suppress(KeyboardInterrupt), Live(first, console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval)
            try:
                before, load, problem = load, look(), ""
            except DovetailError as error:
                problem = str(error)
            live.update(picture(server.url, load, before, problem), refresh=True)
    return 0
