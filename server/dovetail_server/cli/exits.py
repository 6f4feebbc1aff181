"""What a command's errors become: one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable

from dovetail.contracts.errors import ConfigError, DovetailError


def exit_code(command: str, work: Callable[[], int]) -> int:
    """Run a command: 2 for what the user can fix, 1 for what else went wrong, 130 for Ctrl-C; else what it returns."""
    try:
        return work()
    except ConfigError as error:
        print(f"dovetail {command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except DovetailError as error:
        print(f"dovetail {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
