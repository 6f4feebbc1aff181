"""`python -m dovetail.base.aside NAME MODULE:FUNCTION`: a plugin's program in a process beside the engine.

What it writes to standard error is written as this server writes its log, under NAME.
"""

from __future__ import annotations

import sys

from dovetail.base import log
from dovetail.contracts.kernels import named

if __name__ == "__main__":
    log.follow(sys.argv[1])
    named(sys.argv[2])()
