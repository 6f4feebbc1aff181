"""Limits of this process that the system keeps, and that an operator may have set before (`ulimit`, systemd)."""

from __future__ import annotations

import resource


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


def cpu_notice() -> str | None:
    """Return what an operator's limit of processor time will do to this process and its children; None for no limit."""
    soft = resource.getrlimit(resource.RLIMIT_CPU)[0]
    if soft == resource.RLIM_INFINITY:
        return None
    return (
        f"dovetail: each process may use {soft:,} s of processor time (ulimit -t, LimitCPU): then the system ends it, "
        "the engine and the server too, which cannot be kept from here; serve without that limit, or expect restarts"
    )
