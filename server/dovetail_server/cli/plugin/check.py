"""`dovetail plugin check NAME`: the conformance kit on anything that is installed, or that a plugin file defines."""

from __future__ import annotations

import argparse

from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.plugins.scan import unmet_by_next
from dovetail.testing import run_conformance
from dovetail_server.cli.plugin import find, registry_of


def run(args: argparse.Namespace) -> int:
    """Run the kit and print one line per test; exit code 1 where a test fails."""
    record = find(registry_of(args), args.name, args.kind)
    if record.file:  # the kit would look for it among what is installed
        return run_conformance(record.kind, record.name, {"plugin_class": import_planned(as_planned(record))})
    code = run_conformance(record.kind, record.qualified)
    if why := unmet_by_next(record.distribution):
        print(f"note: Dovetail's next minor version would refuse it: {why}; leave the upper bound out")
    return code
