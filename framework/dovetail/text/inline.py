"""The error of what must not run in a process that serves others."""

from __future__ import annotations


class InlineCostError(Exception):
    """A chat template or tokenizer of a checkpoint would take too much here: a process that can be killed runs it.

    Only where `ChatTemplate.limits` or `Tokenizer.max_chars` says so, as the server does; it never reaches a client.
    """
