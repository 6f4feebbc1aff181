"""The conformance kit, and what this speculator promises."""

import json
from pathlib import Path

import pytest
from dovetail_phrases import Phrases, PhrasesOptions

from dovetail_testing import SpeculatorConformance
from dovetail_testing.conformance.speculation import Drafted


class TestPhrases(SpeculatorConformance):
    name = "phrases"


def test_a_phrase_is_finished_once_it_is_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "phrases.json"
    file.write_text(json.dumps([[1, 2, 3, 4, 5, 6, 7]]))
    monkeypatch.setattr(Phrases, "options", PhrasesOptions(file=str(file)))
    speculator, request = Phrases(), Drafted([9, 1, 2], 1, 3)
    assert speculator.draft([request]) == [[]]
    request.ids = [*request.ids, 3]
    assert speculator.draft([request]) == [[4, 5, 6]]
    request.ids = [*request.ids, 4, 5]
    assert speculator.draft([request]) == [[6, 7]]
    request.ids = [*request.ids, 8]
    assert speculator.draft([request]) == [[]]
