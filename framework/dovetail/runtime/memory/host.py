"""How much memory the host can give: of the machine, of this process's container, and by its own limit. No torch here.

Sources: `proc_meminfo(5)`; Linux' `Documentation/admin-guide/cgroup-v2.rst` and `cgroup-v1/memory.rst`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import resource
from pathlib import Path
from typing import NamedTuple

from dovetail.runtime.memory.plan import DeviceBytes

logger = logging.getLogger(__name__)

MEMINFO = Path("/proc/meminfo")
STATM = Path("/proc/self/statm")
CGROUP = Path("/sys/fs/cgroup")
MAPPED_LATER = 640 << 20
"""Address space that an engine takes beside its pool once it serves, for arenas of threads, code that is made, and
grammars: 586 MiB with the demo model on two cores, of which little is ever used."""


class ControlGroupFiles(NamedTuple):
    """Files of a control group: its limit, what it uses, and which entry of its statistics is cache that can go."""

    limit: str
    used: str
    stat: str
    cache: str


V2 = ControlGroupFiles("memory.max", "memory.current", "memory.stat", "inactive_file")
V1 = ControlGroupFiles(
    "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"
)


def host_bytes() -> DeviceBytes:
    """Measure the host: what there is, and what it can give to this process without swapping, killing or refusing it.

    A limit of address space (`ulimit -v`, systemd's `LimitAS`) counts what is mapped, used or not.
    """
    found = _machine()
    most, mapped = resource.getrlimit(resource.RLIMIT_AS)[0], _own_bytes(0)
    if most == resource.RLIM_INFINITY or mapped is None:
        return found
    free = max(0, min(found.free, most - mapped - MAPPED_LATER))
    name = found.name if free == found.free else "cpu within ulimit -v"
    return dataclasses.replace(found, name=name, total=min(found.total, most), free=free)


def _machine() -> DeviceBytes:
    """Measure the machine, or the container."""
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
    return _own_bytes(1)


def _own_bytes(index: int) -> int | None:
    """Return a size of this process by its place in `statm`."""
    try:
        return int(STATM.read_text(encoding="ascii").split()[index]) * os.sysconf("SC_PAGE_SIZE")
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
