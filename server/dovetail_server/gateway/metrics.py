"""One `/metrics` of all workers: their series, each with the label `worker`."""

from __future__ import annotations

import re

SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*?\})?(?= [^}]*$)")
SUFFIXES = ("_bucket", "_sum", "_count", "_created", "_total")


def merged(texts: dict[str, str]) -> str:
    """Put together what workers publish in Prometheus' text format.

    Args:
        texts: By the worker's number.

    Returns:
        The families in the order of the first worker that has them, each with its help and type once.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head and len(head) < 2:
                    head.append(line)
            elif line and not line.startswith("#") and (found := SAMPLE.match(line)) is not None:
                name, labels = found[1], found[2]
                owner = family if name == family or name.removeprefix(family) in SUFFIXES else name
                inside = f'worker="{number}"' + (f",{labels[1:-1]}" if labels and len(labels) > 2 else "")
                samples.setdefault(owner, []).append(f"{name}{{{inside}}}{line[found.end() :]}")
    lines: list[str] = []
    for family, rows in samples.items():
        lines += heads.get(family, [])
        lines += rows
    return "".join(f"{line}\n" for line in lines)


def own(ready: int, workers: int, starts: int, placed: int) -> str:
    """Return the gateway's own series."""
    rows = (
        ("dovetail_gateway_workers", "gauge", "Workers of this gateway.", workers),
        ("dovetail_gateway_workers_ready", "gauge", "Workers that take requests.", ready),
        ("dovetail_gateway_worker_starts_total", "counter", "Worker processes started here.", starts),
        ("dovetail_gateway_placed_total", "counter", "Requests whose worker was chosen by prefix.", placed),
    )
    return "".join(
        f"# HELP {name} {about}\n# TYPE {name} {kind}\n{name} {value}\n" for name, kind, about, value in rows
    )
