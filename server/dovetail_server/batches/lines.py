"""What the database knows of lines: leases, results, and what to do when a process is gone."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from dovetail_server.batches.execute import Result
from dovetail_server.batches.model import OPEN
from dovetail_server.storage.database import Database
from dovetail_server.storage.tables import batch_lines as lines
from dovetail_server.storage.tables import batches

LEASE_S = 60.0
INSERT_ROWS = 500


@dataclass(frozen=True, slots=True)
class Leased:
    """A line that this process may run."""

    batch_id: str
    owner: str
    endpoint: str
    line_no: int
    custom_id: str
    offset: int
    length: int
    attempt: int

    @property
    def key(self) -> tuple[str, int]:
        """What names it."""
        return self.batch_id, self.line_no


@dataclass(frozen=True, slots=True)
class Written:
    """A result that is on disk: where in the segment."""

    line: Leased
    result: Result
    offset: int


class LineStore:
    """The table `batch_lines`, as one process uses it."""

    def __init__(self, database: Database, me: str) -> None:
        """Wrap an open database; `me` is this process."""
        self.database = database
        self.me = me

    async def insert(self, db: Any, batch_id: str, found: Sequence[tuple[int, str, int, int]]) -> None:
        """Write down all lines of a batch, in the caller's transaction."""
        await db.execute(sa.delete(lines).where(lines.c.batch_id == batch_id))
        for start in range(0, len(found), INSERT_ROWS):
            rows = [
                {"batch_id": batch_id, "line_no": n, "custom_id": c, "state": "pending", "offset": o, "length": size}
                for n, c, o, size in found[start : start + INSERT_ROWS]
            ]
            await db.execute(sa.insert(lines), rows)

    async def claim(self, batch: RowMapping, limit: int) -> list[Leased]:
        """Lease up to `limit` lines of a batch. Two servers never get the same one."""
        picked = (
            sa.select(lines.c.line_no, lines.c.custom_id, lines.c.offset, lines.c.length, lines.c.attempt)
            .where(lines.c.batch_id == batch["id"], lines.c.state == "pending")
            .order_by(lines.c.line_no)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        async with self.database.write() as db:
            status = sa.select(batches.c.status).where(batches.c.id == batch["id"])
            if (await db.execute(status)).scalar_one_or_none() != "in_progress":
                return []
            rows = (await db.execute(picked)).all()
            if rows:
                query = sa.update(lines).where(lines.c.batch_id == batch["id"])
                query = query.where(lines.c.line_no.in_([row.line_no for row in rows]))
                values = {"state": "leased", "lease_owner": self.me, "lease_until": time.time() + LEASE_S}
                await db.execute(query.values(attempt=lines.c.attempt + 1, **values))
        return [
            Leased(
                batch["id"],
                batch["owner"],
                batch["endpoint"],
                row.line_no,
                row.custom_id,
                row[2],
                row[3],
                row.attempt + 1,
            )
            for row in rows
        ]

    async def commit(self, segment: str, written: Sequence[Written]) -> int:
        """Write down results. One whose lease is lost meanwhile is forgotten: somebody else has the line.

        Returns:
            How many counted.
        """
        num = 0
        async with self.database.write() as db:
            sums: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
            for item in written:
                query = sa.update(lines).where(*self._mine(item.line))
                values = {"segment": segment, "result_offset": item.offset, "result_length": len(item.result.text)}
                values |= {"is_error": item.result.is_error, "state": "done", "lease_owner": None, "lease_until": None}
                if (await db.execute(query.values(values))).rowcount == 1:
                    num += 1
                    add_up(sums[item.line.batch_id], item.result)
            for batch_id, counts in sums.items():
                more = {name: batches.c[name] + count for name, count in counts.items()}
                await db.execute(sa.update(batches).where(batches.c.id == batch_id).values(more))
        return num

    def _mine(self, line: Leased) -> tuple[sa.ColumnElement[bool], ...]:
        return (
            lines.c.batch_id == line.batch_id,
            lines.c.line_no == line.line_no,
            lines.c.state == "leased",
            lines.c.lease_owner == self.me,
        )

    async def give_back(self, leased: Sequence[Leased], *, has_counted: bool) -> None:
        """Let others, or this process later, run lines; `has_counted` keeps the attempt on record."""
        async with self.database.write() as db:
            for line in leased:
                attempt = line.attempt if has_counted else line.attempt - 1
                query = sa.update(lines).where(*self._mine(line))
                await db.execute(query.values(state="pending", lease_owner=None, lease_until=None, attempt=attempt))

    async def renew(self) -> None:
        """Keep the leases of this process, and end those that have run out."""
        now = time.time()
        leased = sa.update(lines).where(lines.c.state == "leased")
        async with self.database.write() as db:
            await db.execute(leased.where(lines.c.lease_owner == self.me).values(lease_until=now + LEASE_S))
            free = {"state": "pending", "lease_owner": None, "lease_until": None}
            await db.execute(leased.where(lines.c.lease_until < now).values(free))

    async def owners(self) -> set[str]:
        """Return the processes that hold leases."""
        async with self.database.read() as db:
            query = sa.select(lines.c.lease_owner).where(lines.c.state == "leased").distinct()
            found = {str(row[0]) for row in await db.execute(query)}
            query = sa.select(batches.c.lease_owner).where(batches.c.lease_owner.is_not(None)).distinct()
            return found | {str(row[0]) for row in await db.execute(query)}

    async def free_owner(self, owner: str) -> int:
        """End all leases of a process that is gone, and return how many lines it held."""
        free = {"lease_owner": None, "lease_until": None}
        async with self.database.write() as db:
            query = sa.update(lines).where(lines.c.state == "leased", lines.c.lease_owner == owner)
            num = (await db.execute(query.values(state="pending", **free))).rowcount
            await db.execute(sa.update(batches).where(batches.c.lease_owner == owner).values(free))
        return int(num)

    async def segment_lengths(self, segment: str) -> dict[str, int]:
        """Return for each open batch how many bytes of a process's segment count."""
        end = sa.func.max(lines.c.result_offset + lines.c.result_length)
        async with self.database.read() as db:
            open_ids = list((await db.execute(sa.select(batches.c.id).where(batches.c.status.in_(OPEN)))).scalars())
            query = sa.select(lines.c.batch_id, end).where(lines.c.segment == segment).group_by(lines.c.batch_id)
            ends = {str(row[0]): int(row[1]) for row in await db.execute(query)}
        return {batch_id: ends.get(batch_id, 0) for batch_id in open_ids}

    async def has_open(self, batch_id: str) -> bool:
        """Tell whether lines of a batch wait or run."""
        query = sa.select(lines.c.line_no).where(lines.c.batch_id == batch_id)
        async with self.database.read() as db:
            query = query.where(lines.c.state.in_(["pending", "leased"])).limit(1)
            return (await db.execute(query)).first() is not None

    async def drop_rest(self, batch_id: str) -> None:
        """Mark what has no result yet: it will get none."""
        query = sa.update(lines).where(lines.c.batch_id == batch_id, lines.c.state.in_(["pending", "leased"]))
        async with self.database.write() as db:
            await db.execute(query.values(state="dropped", lease_owner=None, lease_until=None))

    async def chunk(self, batch_id: str, after: int, limit: int) -> list[Any]:
        """Return the next lines of a batch in order."""
        query = sa.select(lines).where(lines.c.batch_id == batch_id, lines.c.line_no > after)
        async with self.database.read() as db:
            return list((await db.execute(query.order_by(lines.c.line_no).limit(limit))).mappings())


def add_up(counts: dict[str, int], result: Result) -> None:
    """Add a result to the counters of its batch."""
    counts["num_failed" if result.is_error else "num_completed"] += 1
    if result.usage is not None:
        usage, details = result.usage, result.usage.prompt_tokens_details
        counts["input_tokens"] += usage.prompt_tokens
        counts["cached_tokens"] += details.cached_tokens if details is not None else 0
        counts["output_tokens"] += usage.completion_tokens
        counts["reasoning_tokens"] += usage.reasoning_tokens
