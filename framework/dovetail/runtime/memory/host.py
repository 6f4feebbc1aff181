"""How much memory the host can give: of the machine, and of the container that this process runs in. No torch here.

Sources: `proc_meminfo(5)`; Linux' `Documentation/admin-guide/cgroup-v2.rst` and `cgroup-v1/memory.rst`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from dovetail.runtime.memory.plan import DeviceBytes

logger = logging.getLogger(__name__)

MEMINFO = Path("/proc/meminfo")
STATM = Path("/proc/self/statm")
CGROUP = Path("/sys/fs/cgroup")


class Names(NamedTuple):
    """Files of a control group: its limit, what it uses, and which entry of its statistics is cache that can go."""

    limit: str
    used: str
    stat: str
    cache: str


V2 = Names("memory.max", "memory.current", "memory.stat", "inactive_file")
V1 = Names("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file")


def host_bytes() -> DeviceBytes:
    """Measure the host: what there is, and what it can give without swapping or being killed."""
    found = _numbers(MEMINFO, scale=1024)
    total, free = found.get("MemTotal", 4 << 30), found.get("MemAvailable", 2 << 30)
    if not found:
        logger.debug("no %s; assuming 4 GiB of memory, 2 GiB of it free", MEMINFO)
    for names in (V2, V1):
        limit = _number(CGROUP / names.limit)
        if limit is not None and limit < total:
            cache = _numbers(CGROUP / names.stat).get(names.cache, 0)
            used = (_number(CGROUP / names.used) or 0) - cache
            return DeviceBytes(kind="cpu", name="cpu", total=limit, free=max(0, min(free, limit - used)))
    return DeviceBytes(kind="cpu", name="cpu", total=total, free=free)


def resident_bytes() -> int | None:
    """Return what this process holds in memory; None where the system does not tell."""
    try:
        return int(STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _number(path: Path) -> int | None:
    """Read a file with one number; None if it is not there or says `max`."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _numbers(path: Path, scale: int = 1) -> dict[str, int]:
    """Read lines of a name and a number."""
    try:
        lines = [line.replace(":", " ").split() for line in path.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) * scale for line in lines if len(line) > 1 and line[1].isdigit()}
