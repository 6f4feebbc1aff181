"""What every plugin of kind `hooks` must do."""

from __future__ import annotations

from dovetail.testing.conformance.base import Conformance


class HooksConformance(Conformance):
    """What every plugin of kind `hooks` must do."""

    kind = "hooks"
