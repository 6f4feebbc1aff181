"""Every causal architecture of transformers is served and right in every schedule, or refused by name: none is wrong.

Each of 189, tiny and random, in two configurations: `survey.py` measures and words, `golden/architectures.json` holds
which are served and why others are not. A sample here; all in `make test-all`, for eight minutes of processor time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from survey import ANOTHER, FIRST, KINDS, look, recorded_rows

PINNED = "5.23.0"
"""The version of transformers that the rows were recorded with: with another, a model may be served or refused anew."""
SAMPLE = {("opt", FIRST), ("jamba", FIRST), ("bloom", FIRST), ("lfm3", ANOTHER), ("hrm_text", FIRST), ("moshi", FIRST)}
MOST = 1e-4
LONGEST = 400
"""Characters of a refusal."""
INTERNAL = ("Error", "dovetail-probe", "object has no", "NoneType", "meta tensor", "finish the download", "FOLDER")
"""What no refusal of a whole checkpoint says."""
CASES = [(kind, which) for kind in KINDS for which in (FIRST, ANOTHER)]


@pytest.mark.parametrize(
    ("kind", "which"), [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.full) for case in CASES]
)
def test_it_is_served_and_right_or_refused(kind: str, which: str, tmp_path: Path) -> None:
    """In chunks, decoding, from the cache and retracted; or in one line that says what is missing."""
    row = look(tmp_path, kind, which, model_impl="transformers")
    assert row.worst <= MOST, row
    assert not row.refused or (len(row.refused) < LONGEST and "\n" not in row.refused)
    assert not [word for word in INTERNAL if word in row.refused], row.refused
    if transformers.__version__ == PINNED:
        assert row.refused == recorded_rows()[kind][which]


def test_every_architecture_has_a_row() -> None:
    """Of the version that is pinned, none is left out: of five the folder holds a config alone."""
    assert transformers.__version__ != PINNED or {*KINDS} == {*recorded_rows()}
