"""The tables of `tables.py` as they were before the first release: `database.py` makes them so in a new database."""

from __future__ import annotations

revision = "0006"
down_revision = None


def upgrade() -> None:
    """Change nothing: a new database begins behind this."""
