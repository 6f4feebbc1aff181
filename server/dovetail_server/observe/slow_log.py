"""`--log-slow-requests`: one line for each generation request that took long, which says where its time went."""

from __future__ import annotations

import logging

from dovetail.contracts.observers import ChoiceTimes, RequestEnd, RequestObserver

logger = logging.getLogger("dovetail.server")


class SlowLog(RequestObserver):
    """Logs the requests that took `limit_s` seconds or longer, counted from their headers."""

    def __init__(self, limit_s: float) -> None:
        """Log from `limit_s` on."""
        self.limit_s = limit_s

    def request_ended(self, request: RequestEnd) -> None:
        """Log it, if it was slow."""
        seconds = request.body_s + request.prepare_s + request.seconds
        if seconds < self.limit_s:
            return
        slowest = max(request.choices, key=_whole, default=ChoiceTimes(queued_s=request.seconds))
        parts = _parts(request, slowest)
        beside = {"grammar": slowest.grammar_s, "parsing": request.parse_s, "retracted": slowest.waited_s}
        shown = [f"{name} {value:.3f}" for name, value in beside.items() if value]
        text = "Slow request %s: %.3f s = %s%s; %d prompt tokens (%d cached), %d generated, %s."
        logger.warning(
            text,
            request.request_id,
            seconds,
            " + ".join(f"{name} {value:.3f}" for name, value in parts.items()),
            f"; of it {', '.join(shown)}" if shown else "",
            request.num_prompt_tokens,
            request.num_cached_tokens,
            request.num_completion_tokens,
            ",".join(dict.fromkeys(reason or "cut off" for reason in request.finish_reasons)),
            extra={"request_id": request.request_id, "seconds": seconds, "parts": parts, "beside": beside},
        )


def _parts(request: RequestEnd, choice: ChoiceTimes) -> dict[str, float]:
    """Return what the whole is the sum of; `end` is what came after the slowest choice's last token."""
    parts = {
        "body": request.body_s,
        "tokenize": request.prepare_s,
        "queue": choice.queued_s,
        "prefill": choice.prefill_s or 0.0,
        "decode": choice.decode_s,
        "client": choice.delivery_s,
    }
    return {**parts, "end": max(0.0, request.seconds - _whole(choice))}


def _whole(choice: ChoiceTimes) -> float:
    return choice.queued_s + (choice.prefill_s or 0.0) + choice.decode_s + choice.delivery_s
