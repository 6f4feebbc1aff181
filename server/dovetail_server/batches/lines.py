"""What the database knows of lines: leases and results.

A lease of a line is the name of the process and the attempt, which grows with every lease. Both are compared in the
transaction that ends the lease, so that a result counts only if nobody else got the line meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from dovetail_server.batches.processes import Processes
from dovetail_server.batches.result import Result
from dovetail_server.storage.database import Database
from dovetail_server.storage.process_lease import ProcessLease
from dovetail_server.storage.tables import batch_lines as lines
from dovetail_server.storage.tables import batches

INSERT_ROWS = 500
FEWER_AFTER = 4
"""Leases of a line without a result, after which it is tried among fewer and fewer others."""


@dataclass(frozen=True, slots=True)
class Leased:
    """A line that this process may run; `process` and `attempt` are the lease's token."""

    process: str
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
class WrittenLines:
    """A result that is on disk: where in the segment."""

    line: Leased
    result: Result
    offset: int


def at_once(attempt: int, most: int) -> int:
    """Return how many lines may be leased beside one that has been so often, where else there may be `most`.

    What ends a server again and again may be any of those that it was at. The fewer these are the sooner the others of
    them get done, and in the end it is alone.
    """
    return max(1, most >> max(0, attempt - FEWER_AFTER))


class LineStore:
    """The table `batch_lines`, as one process uses it."""

    def __init__(self, database: Database, lease: ProcessLease, processes: Processes) -> None:
        """Wrap an open database; `lease` names this process."""
        self.database = database
        self.lease = lease
        self.processes = processes

    async def insert(self, db: Any, batch_id: str, found: Sequence[tuple[int, str, int, int]]) -> None:
        """Write down all lines of a batch, in the caller's transaction."""
        await db.execute(sa.delete(lines).where(lines.c.batch_id == batch_id))
        for start in range(0, len(found), INSERT_ROWS):
            rows = [
                {"batch_id": batch_id, "line_no": n, "custom_id": c, "state": "pending", "offset": o, "length": size}
                for n, c, o, size in found[start : start + INSERT_ROWS]
            ]
            await db.execute(sa.insert(lines), rows)

    async def claim(self, batch: RowMapping, limit: int, num_held: int, most: int) -> tuple[list[Leased], bool]:
        """Lease lines of a batch. Two servers never get the same one.

        Args:
            batch: Whose.
            limit: How many, at most.
            num_held: How many lines this process has leased already.
            most: See `at_once`.

        Returns:
            What is leased, and whether the next one has to wait until fewer are.
        """
        picked = (
            sa.select(lines.c.line_no, lines.c.custom_id, lines.c.offset, lines.c.length, lines.c.attempt)
            .where(lines.c.batch_id == batch["id"], lines.c.state == "pending")
            .order_by(lines.c.line_no)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        async with self.database.write() as db:
            await self.processes.check(db)
            me = self.lease.name
            status = sa.select(batches.c.status).where(batches.c.id == batch["id"])
            if (await db.execute(status)).scalar_one_or_none() != "in_progress":
                return [], False
            found = (await db.execute(picked)).all()
            bounds = accumulate((at_once(row.attempt + 1, most) for row in found), min)
            rows = found[: sum(num_held + at < bound for at, bound in enumerate(bounds))]
            if rows:
                query = sa.update(lines).where(lines.c.batch_id == batch["id"])
                query = query.where(lines.c.line_no.in_([row.line_no for row in rows]))
                await db.execute(query.values(attempt=lines.c.attempt + 1, state="leased", lease_owner=me))
        leased = [
            Leased(
                process=me,
                batch_id=batch["id"],
                owner=batch["owner"],
                endpoint=batch["endpoint"],
                line_no=row.line_no,
                custom_id=row.custom_id,
                offset=row[2],
                length=row[3],
                attempt=row.attempt + 1,
            )
            for row in rows
        ]
        return leased, len(rows) < len(found)

    async def commit(self, segment: str, written: Sequence[WrittenLines]) -> int:
        """Write down results. One whose lease is lost meanwhile is forgotten: somebody else has the line.

        Returns:
            How many counted.
        """
        num = 0
        async with self.database.write() as db:
            sums: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
            for item in written:
                query = sa.update(lines).where(*held(item.line))
                values = {"segment": segment, "result_offset": item.offset, "result_length": len(item.result.text)}
                values |= {"is_error": item.result.is_error, "state": "done", "lease_owner": None}
                if (await db.execute(query.values(values))).rowcount == 1:
                    num += 1
                    add_up(sums[item.line.batch_id], item.result)
            for batch_id, counts in sums.items():
                more = {name: batches.c[name] + count for name, count in counts.items()}
                await db.execute(sa.update(batches).where(batches.c.id == batch_id).values(more))
        return num

    async def return_leases(self, leased: Sequence[Leased], *, has_counted: bool) -> None:
        """Let others, or this process later, run lines; `has_counted` keeps the attempt on record."""
        async with self.database.write() as db:
            for line in leased:
                attempt = line.attempt if has_counted else line.attempt - 1
                query = sa.update(lines).where(*held(line))
                await db.execute(query.values(state="pending", lease_owner=None, attempt=attempt))

    async def free_lost(self, in_hand: Collection[tuple[str, int]]) -> int:
        """Free what this process holds in the database and no longer knows of, as after an error; return how much."""
        query = sa.select(lines).where(lines.c.state == "leased", lines.c.lease_owner == self.lease.name)
        async with self.database.read() as db:
            found = (await db.execute(query)).mappings().all()
        lost = [row for row in found if (row["batch_id"], row["line_no"]) not in in_hand]
        if not lost:
            return 0
        async with self.database.write() as db:
            for row in lost:
                mine = [
                    lines.c[name] == row[name] for name in ("batch_id", "line_no", "state", "lease_owner", "attempt")
                ]
                await db.execute(sa.update(lines).where(*mine).values(state="pending", lease_owner=None))
        return len(lost)

    async def segment_end(self, batch_id: str, segment: str) -> int:
        """Return how many bytes of a process's segment count."""
        end = sa.func.max(lines.c.result_offset + lines.c.result_length)
        query = sa.select(end).where(lines.c.batch_id == batch_id, lines.c.segment == segment)
        async with self.database.read() as db:
            return int((await db.execute(query)).scalar_one() or 0)

    async def is_open(self, batch_id: str) -> bool:
        """Tell whether results of a batch are still wanted."""
        async with self.database.read() as db:
            query = sa.select(batches.c.status).where(batches.c.id == batch_id)
            return (await db.execute(query)).scalar_one_or_none() == "in_progress"

    async def has_unanswered(self, db: Any, batch_id: str) -> bool:
        """Tell in the caller's transaction whether lines of a batch have no result, or were dropped without one."""
        query = sa.select(lines.c.line_no).where(lines.c.batch_id == batch_id)
        query = query.where(lines.c.state != "done").limit(1)
        return (await db.execute(query)).first() is not None

    async def drop_rest(self, db: Any, batch_id: str) -> None:
        """Mark what has no result yet, in the caller's transaction: it will get none."""
        query = sa.update(lines).where(lines.c.batch_id == batch_id, lines.c.state.in_(["pending", "leased"]))
        await db.execute(query.values(state="dropped", lease_owner=None))

    async def chunk(self, batch_id: str, after: int, limit: int) -> list[Any]:
        """Return the next lines of a batch in order."""
        query = sa.select(lines).where(lines.c.batch_id == batch_id, lines.c.line_no > after)
        async with self.database.read() as db:
            return list((await db.execute(query.order_by(lines.c.line_no).limit(limit))).mappings())


def held(line: Leased) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the condition that a lease is still the present one."""
    return (
        lines.c.batch_id == line.batch_id,
        lines.c.line_no == line.line_no,
        lines.c.state == "leased",
        lines.c.lease_owner == line.process,
        lines.c.attempt == line.attempt,
    )


def add_up(counts: dict[str, int], result: Result) -> None:
    """Add a result to the counters of its batch."""
    counts["num_failed" if result.is_error else "num_completed"] += 1
    if result.usage is not None:
        usage, details = result.usage, result.usage.prompt_tokens_details
        counts["input_tokens"] += usage.prompt_tokens
        counts["cached_tokens"] += details.cached_tokens if details is not None else 0
        counts["output_tokens"] += usage.completion_tokens
        counts["reasoning_tokens"] += usage.reasoning_tokens
