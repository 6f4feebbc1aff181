"""`python -m dovetail.launch_server` is `dovetail serve`: the name that SGLang's users type."""

import sys

from dovetail.__main__ import run

if __name__ == "__main__":
    sys.exit(run(["serve", *sys.argv[1:]]))
