"""Responses that are kept."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "responses",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("previous_id", sa.String(128)),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("is_background", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        sa.Column("process", sa.String(128)),
        sa.Column("lease_until", sa.Float),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("items", sa.LargeBinary, nullable=False),
    )
    op.create_index("responses_by_age", "responses", ["owner", "created_at", "id", "bytes"])
    op.create_index("responses_by_process", "responses", ["process"])


def downgrade() -> None:
    """Drop it."""
    op.drop_table("responses")
