"""What every plugin of kind `attention_backend` must do."""

from __future__ import annotations

from dovetail.testing.conformance.base import Conformance


class AttentionBackendConformance(Conformance):
    """What every plugin of kind `attention_backend` must do."""

    kind = "attention_backend"
