"""What every plugin of kind `model` must do."""

from __future__ import annotations

from dovetail.testing.conformance.base import Conformance


class ModelConformance(Conformance):
    """What every plugin of kind `model` must do."""

    kind = "model"
