"""Fixtures for the plugin core's tests: made-up distributions and names."""

from __future__ import annotations

import pytest

from dovetail_testing.site import FakeSite


@pytest.fixture
def site(dovetail_site: FakeSite) -> FakeSite:
    """The kit's folder of made-up distributions."""
    return dovetail_site
