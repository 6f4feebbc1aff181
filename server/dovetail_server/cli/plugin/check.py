"""`dovetail plugin check NAME`: the conformance kit on anything that is installed."""

from __future__ import annotations

import argparse

from dovetail.testing import run_conformance
from dovetail_server.cli.plugin import find, scan_as_configured


def run(args: argparse.Namespace) -> int:
    """Run the kit and print one line per test; exit code 1 where a test fails."""
    record = find(scan_as_configured(), args.name, args.kind)
    return run_conformance(record.kind, record.qualified)
