"""What a command's errors become: one line and an exit code."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.base import log
from dovetail.contracts.errors import ConfigError, DovetailError, RequestError, said

OF_A_MODEL = (ConfigError, RequestError)
"""What the user can fix where no request is made: of a start's own texts, which only a model's file can refuse."""


def exit_code(command: str, work: Callable[[], int], refusals: tuple[type[DovetailError], ...] = (ConfigError,)) -> int:
    """Run a command: 2 for what the user can fix, 1 for what else went wrong, 130 for Ctrl-C; else what it returns."""
    try:
        return work()
    except refusals as error:
        log.complain(f"dovetail {command}: error: {said(error)}")
        return 2
    except DovetailError as error:
        log.complain(f"dovetail {command}: {said(error)}")
        return 1
    except KeyboardInterrupt:
        return 130
