"""The tables. Times are seconds since 1970; the migrations in `migrations/` create the same.

A line goes `pending` -> `leased` -> `done`; a batch that is cancelled or expires turns what is left into `dropped`.
`offset` and `length` say where the request stands in the batch's input, `segment`, `result_offset` and `result_length`
where its result stands. A response holds its JSON text and that of its own input items.
"""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

files = sa.Table(
    "files",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("filename", sa.String(512), nullable=False),
    sa.Column("purpose", sa.String(32), nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger),
    sa.Index("files_by_age", "owner", "created_at", "id"),
)

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("served_model", sa.String(512), nullable=False),  # the server's name for what must run it
    sa.Column("endpoint", sa.String(64), nullable=False),
    sa.Column("model", sa.String(512)),
    sa.Column("input_file_id", sa.String(64), nullable=False),
    sa.Column("output_file_id", sa.String(64)),
    sa.Column("error_file_id", sa.String(64)),
    sa.Column("completion_window", sa.String(16), nullable=False),
    sa.Column("output_expires_s", sa.BigInteger),
    sa.Column("metadata", sa.JSON),
    sa.Column("errors", sa.JSON),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("lease_owner", sa.String(128)),
    sa.Column("lease_until", sa.Float),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False),
    sa.Column("in_progress_at", sa.BigInteger),
    sa.Column("finalizing_at", sa.BigInteger),
    sa.Column("completed_at", sa.BigInteger),
    sa.Column("failed_at", sa.BigInteger),
    sa.Column("expired_at", sa.BigInteger),
    sa.Column("cancelling_at", sa.BigInteger),
    sa.Column("cancelled_at", sa.BigInteger),
    sa.Column("num_total", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("num_completed", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("num_failed", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("input_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("output_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("reasoning_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Index("batches_by_age", "owner", "created_at", "id"),
    sa.Index("batches_by_status", "status", "created_at"),
)

batch_lines = sa.Table(
    "batch_lines",
    metadata,
    sa.Column("batch_id", sa.String(64), primary_key=True),
    sa.Column("line_no", sa.BigInteger, primary_key=True),
    sa.Column("custom_id", sa.String(512), nullable=False),
    sa.Column("state", sa.String(8), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False, server_default="0"),
    sa.Column("lease_owner", sa.String(128)),
    sa.Column("lease_until", sa.Float),
    sa.Column("offset", sa.BigInteger, nullable=False),
    sa.Column("length", sa.BigInteger, nullable=False),
    sa.Column("segment", sa.String(128)),
    sa.Column("result_offset", sa.BigInteger),
    sa.Column("result_length", sa.BigInteger),
    sa.Column("is_error", sa.Boolean),
    sa.Index("batch_lines_by_state", "batch_id", "state", "line_no"),
    sa.Index("batch_lines_by_lease", "lease_owner", "state"),
)

responses = sa.Table(
    "responses",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("previous_id", sa.String(128)),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("is_background", sa.Boolean, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
    sa.Column("process", sa.String(128)),  # who generates it, while it is not finished
    sa.Column("lease_until", sa.Float),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("items", sa.LargeBinary, nullable=False),
    sa.Index("responses_by_age", "owner", "created_at", "id", "bytes"),
    sa.Index("responses_by_process", "process"),
)
