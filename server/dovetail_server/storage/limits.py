"""How much is kept for an owner."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

NONE = sa.false()


def too_much(
    table: sa.Table, now: Any, max_num: int, max_bytes: int, is_kept: sa.ColumnElement[bool] = NONE
) -> sa.ColumnElement[bool]:
    """Select what has expired, and of each owner the oldest rows beyond a number and a size.

    Args:
        table: With `id`, `owner`, `created_at`, `expires_at` and `bytes`.
        now: The database's time.
        max_num: Of rows.
        max_bytes: Of all of them.
        is_kept: Rows that stay in any case.
    """
    newest: dict[str, Any] = {
        "partition_by": table.c.owner,
        "order_by": (table.c.created_at.desc(), table.c.id.desc()),
    }
    rank = sa.func.row_number().over(**newest).label("rank")
    total = sa.func.sum(table.c.bytes).over(**newest).label("total")
    ranked = sa.select(table.c.id, rank, total).subquery()
    beyond = sa.select(ranked.c.id).where(sa.or_(ranked.c.rank > max_num, ranked.c.total > max_bytes))
    return sa.and_(sa.or_(table.c.expires_at <= now, table.c.id.in_(beyond)), sa.not_(is_kept))
