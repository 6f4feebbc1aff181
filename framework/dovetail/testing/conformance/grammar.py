"""What every plugin of kind `grammar_backend` must do."""

from __future__ import annotations

from dovetail.testing.conformance.base import Conformance


class GrammarBackendConformance(Conformance):
    """What every plugin of kind `grammar_backend` must do."""

    kind = "grammar_backend"
