"""Conversations, which responses go on with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "conversations",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("metadata", sa.Text, nullable=False),
        sa.Column("next_no", sa.BigInteger, nullable=False),
    )
    op.create_index("conversations_by_age", "conversations", ["owner", "created_at", "id", "bytes"])
    op.create_table(
        "conversation_items",
        sa.Column("conversation_id", sa.String(64), primary_key=True),
        sa.Column("item_no", sa.BigInteger, primary_key=True),
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("conversation_items_by_id", "conversation_items", ["conversation_id", "id"], unique=True)


def downgrade() -> None:
    """Drop them."""
    op.drop_table("conversation_items")
    op.drop_table("conversations")
