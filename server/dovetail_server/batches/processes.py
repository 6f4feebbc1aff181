"""Which processes live: each counts up its beat in the database, and watches the beats of the others.

A process is gone when its beat stood still for `SILENT_BEATS` looks in a row. Looks are counted, not seconds: no clock
of any server takes part, and who was paused itself has not looked meanwhile. On the same machine a free lock proves it.

Whoever is taken for gone and is not finds that its row is missing, takes a new name and begins again with nothing: what
it held under the old name is fenced off by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from dovetail.contracts.errors import DovetailError
from dovetail_server.storage.database import Database
from dovetail_server.storage.process_lease import ProcessLease
from dovetail_server.storage.tables import batch_lines, batches, processes, responses

BEAT_S = 5.0
SILENT_BEATS = 12


class LeaseLostError(DovetailError):
    """Somebody else has it now, or it has ended: what this process still does for it counts for nothing."""


class Processes:
    """The table `processes`, and what the processes in it hold, as one of them sees it."""

    def __init__(self, database: Database, lease: ProcessLease) -> None:
        """Wrap an open database; `lease` names this process."""
        self.database = database
        self.lease = lease
        self._seen: dict[str, tuple[int, int]] = {}
        """Of each other process the last beat, and in how many looks it has not moved."""

    async def join(self) -> None:
        """Write down that this process lives."""
        async with self.database.write() as db:
            await db.execute(sa.delete(processes).where(processes.c.name == self.lease.name))
            await db.execute(sa.insert(processes).values(name=self.lease.name, beat=0))

    async def beat(self) -> bool:
        """Count up; return False where this process was taken for gone and must `join` under a new name."""
        query = sa.update(processes).where(processes.c.name == self.lease.name).values(beat=processes.c.beat + 1)
        async with self.database.write() as db:
            return bool((await db.execute(query)).rowcount == 1)

    async def own_beat(self) -> int | None:
        """Return the beat of this process, or None where it has no row."""
        async with self.database.read() as db:
            query = sa.select(processes.c.beat).where(processes.c.name == self.lease.name)
            return (await db.execute(query)).scalar_one_or_none()

    async def check(self, db: Any) -> None:
        """Make sure, in a transaction that takes leases, that this process still counts as alive.

        Raises:
            LeaseLostError: It does not.
        """
        query = sa.select(processes.c.name).where(processes.c.name == self.lease.name).with_for_update(read=True)
        if (await db.execute(query)).first() is None:
            raise LeaseLostError(self.lease.name)

    async def others(self) -> dict[str, int | None]:
        """Return the beats of all other processes; None for one that holds something and has no row."""
        holders = sa.union(
            sa.select(batch_lines.c.lease_owner).where(batch_lines.c.state == "leased"),
            sa.select(batches.c.lease_owner).where(batches.c.lease_owner.is_not(None)),
            sa.select(responses.c.process).where(responses.c.process.is_not(None)),
        )
        async with self.database.read() as db:
            found: dict[str, int | None] = {str(row[0]): None for row in await db.execute(holders)}
            for row in await db.execute(sa.select(processes)):
                found[row.name] = int(row.beat)
        found.pop(self.lease.name, None)
        return found

    def silent(self, found: dict[str, int | None]) -> Sequence[str]:
        """Take a look: return those whose beat has stood still for too long."""
        looks = {}
        for name, beat in found.items():
            if beat is not None:
                before = self._seen.get(name)
                looks[name] = (beat, before[1] + 1 if before is not None and before[0] == beat else 0)
        self._seen = looks
        return [n for n, beat in found.items() if beat is None or looks[n][1] >= SILENT_BEATS]

    async def evict(self, name: str, beat: int | None) -> int | None:
        """End all leases of a process, unless it has counted on meanwhile.

        Args:
            name: The process.
            beat: Its last one; None where it has no row.

        Returns:
            How many lines it held, or None if it lives.
        """
        mine = processes.c.name == name
        async with self.database.write() as db:
            await db.execute(sa.delete(processes).where(mine, processes.c.beat == (-1 if beat is None else beat)))
            if (await db.execute(sa.select(processes.c.name).where(mine))).first() is not None:
                return None
            lines = sa.update(batch_lines).where(batch_lines.c.state == "leased", batch_lines.c.lease_owner == name)
            num = (await db.execute(lines.values(state="pending", lease_owner=None))).rowcount
            await db.execute(sa.update(batches).where(batches.c.lease_owner == name).values(lease_owner=None))
        return int(num)
