"""A process that loads the plugins of one package for `dovetail plugin doctor` and says what went wrong.

The plan comes as msgpack on standard input; a JSON list of problems is the last line of standard output.
"""

from __future__ import annotations

import json
import logging
import sys

from dovetail.contracts.errors import PluginError
from dovetail.plugins.loader import LoadedPlugins
from dovetail.plugins.manager import HookManager
from dovetail.plugins.plan import PluginPlan


def problems_of(plan: PluginPlan) -> list[str]:
    """Load each plugin and return what failed and what was changed in Dovetail."""
    loaded = LoadedPlugins(plan, None)
    problems = []
    for planned in plan.plugins:
        try:
            found = loaded.get(planned.kind, planned.qualified)
            if planned.kind == "hooks":
                HookManager([(planned, found)], timeout_s=plan.timeout_s)
        except PluginError as error:
            problems.append(str(error))
    return problems + loaded.monkeypatches


def main() -> None:
    """Do the job; what plugins print must not be taken for the report."""
    logging.getLogger("dovetail").addHandler(logging.NullHandler())
    logging.getLogger("dovetail").propagate = False
    plan = PluginPlan.decode(sys.stdin.buffer.read())
    print("\n" + json.dumps(problems_of(plan)), flush=True)


if __name__ == "__main__":
    main()
