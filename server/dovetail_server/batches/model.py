"""What batches share: endpoints, states, and how a row becomes a reply."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy.engine import RowMapping

from dovetail_server.schema import batches as schema

ENDPOINTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify"),
)
NOT_HERE = ("/v1/moderations", "/v1/images/generations", "/v1/images/edits", "/v1/videos")
MAX_ERRORS = 100
"""Findings listed for an input file that is refused."""
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
PLAIN = (
    *("id", "endpoint", "model", "input_file_id", "completion_window", "status", "output_file_id", "error_file_id"),
    *("metadata", "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at"),
    *("expired_at", "cancelling_at", "cancelled_at"),
)
"""Columns that are shown as they are."""
WINDOW_S = {"24h": 24 * 3600}


def endpoint_of(url: str, others: Iterable[str]) -> str | None:
    """Return the endpoint that a line's `url` names; None for none that batches run.

    Args:
        url: As the line says.
        others: Paths of packages' APIs.
    """
    return next((endpoint for endpoint in (*ENDPOINTS, *others) if same_endpoint(url, endpoint)), None)


def same_endpoint(url: str, endpoint: str) -> bool:
    """Tell whether a line's `url` is the batch's endpoint; it may be written without `/v1`."""
    return url == endpoint or f"/v1{url}" == endpoint


def to_batch(row: RowMapping) -> schema.Batch:
    """Return a row as the API shows it."""
    errors = row["errors"]
    shown = None if not errors else schema.BatchErrors(data=[schema.BatchError(**item) for item in errors])
    usage = schema.BatchUsage(
        input_tokens=row["input_tokens"],
        input_tokens_details=schema.InputTokensDetails(row["cached_tokens"]),
        output_tokens=row["output_tokens"],
        output_tokens_details=schema.OutputTokensDetails(row["reasoning_tokens"]),
        total_tokens=row["input_tokens"] + row["output_tokens"],
    )
    counts = schema.RequestCounts(total=row["num_total"], completed=row["num_completed"], failed=row["num_failed"])
    plain = {name: row[name] for name in PLAIN}
    return schema.Batch(object="batch", errors=shown, usage=usage, request_counts=counts, **plain)
