"""What is kept of the batch shapes that were computed is bounded."""

from __future__ import annotations

import pytest

from dovetail.runtime.start.load import CACHED_PRIMITIVES, bound_primitive_caches


def test_caches_by_shape_are_bounded_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both caches, oneDNN's and that of torch's binding of it, get the bound; a variable that is set stays."""
    import os

    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "x")
    monkeypatch.delenv("LRU_CACHE_CAPACITY")
    bound_primitive_caches()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
    assert os.environ["LRU_CACHE_CAPACITY"] == CACHED_PRIMITIVES
