"""What the kit sees of a process holds while threads come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.plugins.process_state import ProcessState

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks where Linux lists processes")


def test_a_thread_that_ends_meanwhile_has_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between listing threads and reading what one has started, it may end."""
    read = Path.read_text
    lost: list[Path] = []

    def vanishing(path: Path) -> str:
        if path.name == "children" and not lost:
            lost.append(path)
            raise FileNotFoundError(path)
        return read(path)

    monkeypatch.setattr(Path, "read_text", vanishing)
    state = ProcessState.now()
    assert lost
    assert not ProcessState.now().differences(state)
