"""`--log-requests`: a line when a generation request begins and one when it ends, without its text."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dovetail_server.http.auth import CALLER
from dovetail_server.http.origin import ORIGIN

logger = logging.getLogger("dovetail.server")


def log_request(request_id: str, text: str, values: Mapping[str, object]) -> None:
    """Log something of a request, with the client and the hashed key of the present task.

    Args:
        request_id: As its response names it.
        text: What there is to say, a format of `values` in their order.
        values: Fields of the line with `--log-format json`, beside `request_id`, `client` and `key`.
    """
    origin, key = ORIGIN.get(), CALLER.get().tenant.short
    client = "" if origin is None else origin.client or origin.batch_id
    logger.info(
        f"Request %s from %s: {text}.",
        request_id,
        ", ".join(filter(None, (client, key))) or "this process",
        *values.values(),
        extra={"request_id": request_id, "client": client, "key": key, **values},
    )
