"""`dovetail plugin check NAME`: the conformance kit on anything that is installed, or that a plugin file defines."""

from __future__ import annotations

import argparse

from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.plugins.scan import unmet_by_next
from dovetail_server.cli.plugin import find, registry_of
from dovetail_testing import run_conformance
from dovetail_testing.private_names import private_imports


def run(args: argparse.Namespace) -> int:
    """Run the kit and print one line per test; exit code 1 where a test fails.

    Raises:
        PluginError: It cannot be imported, or is an API that replaces a route of the server's.
    """
    record = find(registry_of(args), args.name, args.kind)
    if record.file:  # the kit would look for it among what is installed
        code = run_conformance(record.kind, record.name, {"plugin_class": import_planned(as_planned(record))})
    else:
        code = run_conformance(record.kind, record.qualified)
        if found := private_imports(record):
            what = ", ".join(found)
            print(f"note: any release may break it: it imports {what}; use dovetail.contracts and dovetail.sdk")
        if why := unmet_by_next(record.distribution):
            print(f"note: Dovetail's next minor version would refuse it: {why}; leave the upper bound out")
    if record.kind == "api" and not code:
        from dovetail_server.app import check_apis

        check_apis([import_planned(as_planned(record))()])
    return code
