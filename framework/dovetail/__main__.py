"""`python -m dovetail` is the command `dovetail`, whichever package brings it: the core knows no server."""

import sys
from collections.abc import Sequence
from importlib.metadata import distribution

from dovetail.base.distribution import DISTRIBUTION


def run(argv: Sequence[str]) -> int:
    """Run the command; `argv` is what comes after its name. Another project's command of that name is none of ours."""
    [command] = distribution(DISTRIBUTION).entry_points.select(group="console_scripts", name="dovetail")
    return int(command.load()(list(argv)))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
