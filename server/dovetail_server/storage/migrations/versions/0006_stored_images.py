"""Images of stored responses, completions and conversations, each once."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "stored_images",
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "image_uses",
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("holder", sa.String(64), primary_key=True),
        sa.Column("part", sa.String(128), primary_key=True),
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(64), nullable=False),
    )
    op.create_index("image_uses_by_image", "image_uses", ["owner", "digest"])


def downgrade() -> None:
    """Drop them."""
    op.drop_table("image_uses")
    op.drop_table("stored_images")
