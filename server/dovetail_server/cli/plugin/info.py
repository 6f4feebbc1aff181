"""`dovetail plugin info NAME`: one plugin, where it comes from, what it says of itself, and its options."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from dovetail.contracts.errors import PluginError
from dovetail.plugins.clues import PARSERS
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.loader import import_planned
from dovetail.plugins.options import describe_options
from dovetail.plugins.plan import PlannedPlugin, as_planned, make_plan
from dovetail.plugins.records import UNUSABLE, PluginRecord
from dovetail_server.cli.plugin import find, registry_of


def run(args: argparse.Namespace) -> int:
    """Print what is known; exit code 1 where the plugin cannot be imported."""
    registry = registry_of(args)
    record = find(registry, args.name, args.kind)
    _print_record(record)
    names: dict[str, Any] = {record.kind: [record.qualified] if record.kind == "hooks" else record.qualified}
    if record.state in UNUSABLE:
        make_plan(registry, **names)  # raises, with the reason; what a package is missing for can be looked at
    planned = as_planned(record)
    try:
        loaded = import_planned(planned)
    except PluginError as error:
        print(f"problem      {error}")
        return 1
    about = loaded.__doc__ or ""  # its own: `inspect.getdoc` would take that of the contract, which tells of no plugin
    summary = inspect.cleandoc(about).partition("\n")[0]
    if summary and record.kind != "hooks":
        print(f"about        {summary}")
    _print_hooks(planned, loaded)
    _print_options(record.name, _options_class(planned, loaded))
    return 0


def _print_record(record: PluginRecord) -> None:
    facts = record.facts
    lines = {
        "plugin": f"{record.kind} {record.name}",
        "package": f"{record.distribution} {record.version}",
        "use it": KINDS[record.kind].usage(record.name),
        "also": ", ".join((*facts.aliases, record.qualified)),
        "state": record.state.value + (f": {record.reason}" if record.reason else ""),
        "API": str(record.api),
        "target": record.target,
        "location": record.location,
        "loaded in": ", ".join(facts.roles or KINDS[record.kind].roles),
        "devices": ", ".join(facts.devices),
        "needs": ", ".join(facts.packages),
        "auto": _auto(record),
    }
    for key, value in lines.items():
        if value:
            print(f"{key:<13}{value}")


def _auto(record: PluginRecord) -> str:
    """Say when `auto` takes a plugin; empty where it never does."""
    facts = record.facts
    if record.kind in PARSERS:
        opens = [f"what opens with {facts.opens!r}"] if facts.opens else []
        return " and ".join([*([f"templates that fit {len(facts.clues)} clues"] if facts.clues else []), *opens])
    return "" if facts.matches is None else f"a candidate for {facts.matches or 'everything'}"


def _print_hooks(planned: PlannedPlugin, loaded: Any) -> None:
    if planned.kind == "hooks":
        names = [name for name in dir(loaded) if name.startswith("dovetail_")]
        print(f"hooks        {', '.join(names) or 'none'}")


def _options_class(planned: PlannedPlugin, loaded: Any) -> type | None:
    if planned.kind != "hooks":
        found: type | None = loaded.Options
        return found
    from dovetail.plugins.manager import HookManager

    return next((result.value for result in HookManager([(planned, loaded)]).settings()), None)


def _print_options(name: str, options: type | None) -> None:
    if options is None:
        return
    print("options")
    for option in describe_options(options):
        default = f" [{option.default}]" if option.default is not None else ""
        print(f"  --{name}.{option.flag} ({option.type})  {option.help}{default}".rstrip())
