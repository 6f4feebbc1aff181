"""Tables of Dovetail's own that stand as JSON beside their modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.tables import table


def test_a_table_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    """With its file: an installation that was not finished is no riddle."""
    module = str(tmp_path / "module.py")
    with pytest.raises(ConfigError, match=r"module\.json: No such file or directory.*install dovetail-llm again"):
        table(module)
    for broken in (b'{"name": "a', b"", b"\xff"):
        (tmp_path / "module.json").write_bytes(broken)
        with pytest.raises(ConfigError, match=r"module\.json: .*; it is a part of Dovetail"):
            table(module)
    (tmp_path / "other.json").write_text('{"name": [1]}')
    assert table(module, "other.json") == {"name": [1]}
