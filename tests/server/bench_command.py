"""`dovetail bench` as a command, in this process."""

from __future__ import annotations

import pytest

from dovetail_server.cli import bench


def run_bench(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Run the command in this process; its clients are processes all the same."""
    code = bench.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err
