"""Run by alembic with a connection that `database.migrate` has opened."""

from __future__ import annotations

from alembic import context

from dovetail_server.storage.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
