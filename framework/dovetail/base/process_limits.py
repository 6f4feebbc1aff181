"""Limits of this process that the system keeps, and that an operator may have set before (`ulimit`, systemd).

Sources: Linux' `Documentation/admin-guide/cgroup-v2.rst` and `scheduler/sched-bwc.rst`.
"""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
QUOTA_V2, QUOTA_V1 = ("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
"""Files of a control group that say how many of how many microseconds it may compute, `max` or -1 for no limit."""

ENGINE_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}
"""What a process that computes is started with, unless the operator has set it.

Threads that spin at a barrier starve each other as soon as the machine has anything else to do: on two busy cores a
decode step took 300 ms instead of 5. Waiting passively costs microseconds. Torch asks for pages of 2 MiB where tensors
are large: a step reads all weights, and finding their places in pages of 4 KiB took a tenth of it.
"""


def num_cores() -> int:
    """Return how many cores this process may keep busy: those it may run on, or the time that its container has.

    A container of two cores on a machine of 64 may run on all of them, and is stopped once its share of a period is
    used. Threads beyond that share make each other wait.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in (QUOTA_V2, QUOTA_V1):
        try:
            words = " ".join((CGROUP / name).read_text(encoding="ascii") for name in names).split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):
            continue
        if quota > 0 and period > 0:
            return max(1, min(cores, math.ceil(quota / period)))
    return cores


def lower(kind: int, wanted: int) -> bool:
    """Bound a resource of this process by `wanted`, or by what bounds it already where that is less.

    Only the soft limit changes: without privileges nobody can raise a hard one, and nobody needs to lower it.

    Args:
        kind: Such as `resource.RLIMIT_AS`.
        wanted: In the units of that resource.

    Returns:
        Whether `wanted` holds; False where the process was allowed less already.
    """
    soft, hard = resource.getrlimit(kind)
    found = min(bound for bound in (wanted, soft, hard) if bound != resource.RLIM_INFINITY)
    resource.setrlimit(kind, (found, hard))
    return found == wanted
