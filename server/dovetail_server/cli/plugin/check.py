"""`dovetail plugin check NAME`: the conformance kit on anything that is installed, or that a plugin file defines."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from dovetail.contracts.errors import PluginError
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.plugins.records import PluginRecord
from dovetail_server.cli.plugin import find, registry_of
from dovetail_testing import run_conformance
from dovetail_testing.next_minor import RULES, deprecations_raise


def run(args: argparse.Namespace) -> int:
    """Run the kit and print one line per test; exit code 1 where a test fails, or a rule of the next minor version.

    Raises:
        PluginError: It cannot be imported, or is an API that replaces a route of the server's.
    """
    record = find(registry_of(args), args.name, args.kind)
    try:
        with deprecations_raise(record) if args.next_minor else nullcontext():
            code = _run_kit(record)
    except PluginError as error:
        if not isinstance(error.__cause__, Warning):
            raise
        print(f" failed  It imports without a warning of what is deprecated.\n         {error}")
        code = 1
    has_faults = _follow_rules(record, is_strict=args.next_minor)
    if record.kind == "api" and not code:
        from dovetail_server.start.app import check_apis

        check_apis([import_planned(as_planned(record))()])
    return 1 if has_faults and args.next_minor else code


def _run_kit(record: PluginRecord) -> int:
    if not record.file:
        return run_conformance(record.kind, record.qualified)
    given = {"plugin_class": import_planned(as_planned(record))}  # the kit would look for it among what is installed
    return run_conformance(record.kind, record.name, given)


def _follow_rules(record: PluginRecord, *, is_strict: bool) -> bool:
    """Print what the next minor version may break, as notes or as tests, and say whether there is anything."""
    has_faults = False
    for rule in RULES:
        faults = rule.faults(record)
        has_faults |= bool(faults)
        if is_strict:
            print(f"{'failed' if faults else 'passed':>7}  {rule.claim}")
        for fault in faults:
            print(f"         {fault}" if is_strict else f"note: Dovetail's next minor version may break it: {fault}")
    return has_faults
