"""`python -m dovetail_server` is `dovetail`; with anything but a command first, it is `dovetail serve`."""

import sys

from dovetail_server.cli import main
from dovetail_server.cli.commands import COMMANDS

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] if sys.argv[1:2] and sys.argv[1] in COMMANDS else ["serve", *sys.argv[1:]]))
