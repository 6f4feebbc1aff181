"""Runs the code that it is given, as `python -c` does, in a process that is forked as those of scripts of tests are."""

import sys

exec(sys.argv.pop(1))
