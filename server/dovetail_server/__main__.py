"""`python -m dovetail_server` is `dovetail serve`."""

import sys

from dovetail_server.cli.serve import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
