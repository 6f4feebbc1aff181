"""Leases that are held by processes with a heartbeat, and fenced by counters: no clock decides who may write."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
LEASED = ("batches", "batch_lines", "responses")


def upgrade() -> None:
    """Add the heartbeats and the fencing token, drop the times."""
    op.create_table(
        "processes",
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("beat", sa.BigInteger, nullable=False, server_default="0"),
    )
    op.add_column("batches", sa.Column("lease_epoch", sa.BigInteger, nullable=False, server_default="0"))
    for table in LEASED:
        op.drop_column(table, "lease_until")


def downgrade() -> None:
    """Go back."""
    for table in LEASED:
        op.add_column(table, sa.Column("lease_until", sa.Float))
    op.drop_column("batches", "lease_epoch")
    op.drop_table("processes")
