"""The pipeline's docstring names the steps of a schema: each module that it names is there."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from dovetail.grammar import pipeline

NAMED = re.findall(r"`((?:spec|compile|matching)\.\w+|pipeline)`", pipeline.__doc__ or "")


@pytest.mark.parametrize("name", sorted(set(NAMED)))
def test_each_step_is_where_the_way_says(name: str) -> None:
    """A module that moves takes its step along."""
    assert find_spec(f"dovetail.grammar.{name}") is not None


def test_the_way_has_six_steps() -> None:
    """From the request's bytes to the report."""
    steps = re.findall(r"^\d\. \*\*(\w+)\.\*\*", pipeline.__doc__ or "", re.MULTILINE)
    assert steps == ["Parse", "Normalise", "Choose", "Compile", "Mask", "Validate"]
    assert len(NAMED) > 9
