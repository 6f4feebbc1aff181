"""How many threads tokenize a text that may be cut: the library's own, which it makes when it is first given one.

It takes as many as there are cores; each keeps the words that it has met, some megabytes of them, and an engine wants
cores, too. It reads the environment, so there is one number for a process: what the user says there counts.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

MOST = 8
"""Threads: an eighth of the 30 to 55 ms that a prompt of 16,000 tokens takes is little beside computing it."""
NUMBER, SWITCH = "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"


def num_threads(environment: MutableMapping[str, str] = os.environ) -> int:
    """Return how many threads there are for this process, by its environment or by the cores it may use."""
    if environment.get(SWITCH, "").lower() in ("off", "false", "f", "no", "n", "0"):
        return 1
    given = environment.get(NUMBER, "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(given) if given.isdecimal() and int(given) else min(MOST, cores)


def set_threads(number: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the number of threads of this process and its children. It has no effect after the first text.

    Where threads were made before a fork, the copy waits for them for ever: a process that forks has to have none.
    """
    environment[NUMBER] = str(number)
    if number == 1 or SWITCH in environment:  # unset, the library also switches threads off in forked copies
        environment[SWITCH] = "true" if number > 1 else "false"
