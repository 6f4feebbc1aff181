"""What others read or import: metrics, log lines with fields, plugins, and names of the packages."""

from __future__ import annotations

import ast
import importlib.util
import json
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from listed_options import ROOT, sources, tree_of

PLUGIN_GROUP = "dovetail."
QUOTES = "'\""


def page() -> Iterator[str]:
    """Yield the lines of metrics, logs, plugins and public names."""
    yield "# Metrics, by --metrics-style: kind, labels beside the style's own, and bounds of buckets"
    yield from metrics()
    yield "\n# Fields of a line of --log-format json, and the lines that have more"
    yield from log_lines()
    yield "\n# Built-in plugins, with their other names"
    yield from plugins()
    yield "\n# Names to import; those of contracts, hooks and kit stand in tests/plugins/golden/public_api.txt"
    yield from public_names()


def metrics() -> Iterator[str]:
    """Yield every series of a server, and of a gateway."""
    from dovetail.contracts.observers import LoadStats
    from dovetail_server.gateway.fan_out import own
    from dovetail_server.metrics.exposition import Metrics, of_keys
    from dovetail_server.metrics.series import STYLES

    seen = set()
    for style in STYLES:
        made = Metrics(style, "m", crashes={"task": 1})
        made.load.stats = LoadStats(**{field.name: 1 for field in fields(LoadStats)})  # type: ignore[arg-type]  # all are numbers
        made.cache = (1, 1)
        keys = SimpleNamespace(tenants={}, watch=SimpleNamespace(num_failures=0, is_current=True))
        for family in (*made.collect(), *of_keys(keys)):  # type: ignore[arg-type]  # what of it is asked for
            line = metric_line(family)
            if line not in seen:
                seen.add(line)
                yield line
    yield from (
        f"metric {line.split()[2]}: {line.split()[3]}" for line in own(1, 1, 1, 1).splitlines() if "TYPE" in line
    )


def metric_line(family: Any) -> str:
    """Return the line of one family."""
    buckets = list(dict.fromkeys(float(one.labels["le"]) for one in family.samples if "le" in one.labels))
    facts = [family.type, *(f"by {label}" for label in family._labelnames)]
    if buckets:
        facts.append(f"{len(buckets)} buckets {' '.join(f'{bound:g}' for bound in buckets)}")
    return f"metric {family.name}: {', '.join(facts)}"


def log_lines() -> Iterator[str]:
    """Yield the fields of a JSON line, and the formats and fields of lines that are given more."""
    from dovetail.base.log_json import JsonFormatter

    yield from (f"log-field {name}: of every line" for name in JsonFormatter("x").fields(0.0, "x", "x", "x"))
    for path in sources():
        if b"extra=" in (text := path.read_bytes()) or b"log_request(" in text:
            texts = {
                ast.unparse(node.targets[0]): node.value
                for node in ast.walk(tree_of(path))
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            }
            yield from (line for node in ast.walk(tree_of(path)) if (line := log_line(node, texts)))


def log_line(node: ast.AST, texts: dict[str, ast.Constant]) -> str | None:
    """Return the line of a call that logs something with fields; `texts` are the constants that have names."""
    if not isinstance(node, ast.Call):
        return None
    called = ast.unparse(node.func)
    extra = next((word.value for word in node.keywords if word.arg == "extra"), None)
    if called == "log_request":
        return f"log {called}: {ast.unparse(node.args[1])}"
    if not isinstance(extra, ast.Dict) or not called.startswith("logger."):
        return None
    text = ast.unparse(texts.get(ast.unparse(node.args[0]), node.args[0]))
    names = sorted(str(key.value) for key in extra.keys if isinstance(key, ast.Constant))
    return f"log {text.lstrip('f').strip(QUOTES).split()[0]}: {text} with {', '.join(names)}"


def plugins() -> Iterator[str]:
    """Yield the built-in plugins, from the package's metadata and the manifests."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted((ROOT / "plugins").rglob("dovetail-plugins.json")):
        for kind, names in json.loads(path.read_text("utf-8")).get("plugins", {}).items():
            rows.setdefault(kind, {}).update(names)
    for group, names in points.items():
        kind = group.removeprefix(PLUGIN_GROUP).rpartition(".")[0]
        for name in sorted(names) if group.startswith(PLUGIN_GROUP) and kind else ():
            row = next(
                (own[name] for own_kind, own in rows.items() if kind.startswith(own_kind[:6]) and name in own), {}
            )
            yield f"plugin {kind} {name}: " + (" ".join(row.get("aliases", [])) or "no other name")


def public_names() -> Iterator[str]:
    """Yield what `dovetail`, its errors and `dovetail.ray` offer, with signatures."""
    import dovetail
    from dovetail.contracts import errors

    spec = importlib.util.spec_from_file_location("public_api", ROOT / "docs/reference/public_api.py")
    assert spec is not None
    assert spec.loader is not None
    api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(api)
    for name in dovetail.__all__:
        if not name.startswith("__"):
            yield from (named(line) for line in sorted(api.of_class("dovetail", name, getattr(dovetail, name))))
    for name, value in vars(errors).items():
        if isinstance(value, type):
            yield f"name dovetail.contracts.errors.{name}: {' '.join(base.__name__ for base in value.__bases__)}"
    for node in tree_of(ROOT / "framework/dovetail/ray.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from (f"name dovetail.ray.{name}: as it is" for name in ast.literal_eval(node.value))


def named(line: str) -> str:
    """Return a line of the public names with a colon behind the name."""
    at = min((at for mark in "(:- =" if (at := line.find(mark)) > 0), default=len(line))
    return f"name {line[:at]}: {line[at:].strip(' :')}"
