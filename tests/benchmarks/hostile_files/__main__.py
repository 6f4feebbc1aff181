"""Puts hostile model files through the readers, each in a process of its own, and says what became of them.

    python tests/benchmarks/hostile_files [--count 10000] [--seed 1] [--kinds templates tokenizers gguf configs]
    python tests/benchmarks/hostile_files --starts 300

A file is *refused* if the reader raises one of our errors, of one line; *loaded* if it raises none. Whatever else it
raises is a traceback, and so is the end of its process: by a signal, or after `--seconds` of processor time. Callbacks
are pieces that run on the event loop of a server. Exit code 1 with a traceback, or a callback of more than 50 ms.

With `--starts`, as many files go through a whole start instead, with a few chats behind it (`starts.py`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
sys.path[:] = [
    str(HERE.parent),
    str(HERE.parents[1] / "server"),
    str(HERE.parents[1] / "models"),
    *[p for p in sys.path if Path(p or ".").resolve() != HERE],
]
KINDS = ("templates", "tokenizers", "gguf", "configs")
LONGEST_S = 0.05


@dataclass
class Row:
    """What became of the files of one kind."""

    files: int = 0
    refused: int = 0
    loaded: int = 0
    longest_s: float = 0.0
    grown_mib: float = 0.0
    tracebacks: list[str] = field(default_factory=list)


def apart(read: Callable[[Path], float], path: Path, seconds: int) -> dict[str, Any]:
    """Read a file in a process of its own; returns what it says."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where panics are printed
        before = _peak_mib()
        said = _read(read, path)
        os.write(theirs, json.dumps(said | {"grown_mib": _peak_mib() - before}).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    if said:
        found: dict[str, Any] = json.loads(said)
        return found
    return {"traceback": f"its process ended by {os.waitstatus_to_exitcode(status)}"}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _read(read: Callable[[Path], float], path: Path) -> dict[str, Any]:
    from dovetail.contracts.errors import DovetailError

    try:
        return {"longest_s": read(path)}
    except DovetailError as error:
        text = str(error)
        return {"refused": text} if "\n" not in text.strip() else {"traceback": f"an error of several lines: {text}"}
    except BaseException:
        return {"traceback": traceback.format_exc()[-1500:]}


def plain_read(path: Path) -> float:
    """What a start does with a model before anything is computed."""
    from dovetail.processing.prepare import check_model
    from dovetail_server.settings.serve import ServeSettings

    check_model(ServeSettings(model_path=str(path)))
    return 0.0


def hostile(modules: list[ModuleType], rng: random.Random, count: int) -> Iterator[tuple[ModuleType, str, Path]]:
    """Yield the files of all modules, in equal parts."""
    for number, module in enumerate(modules):
        share = count // len(modules) + (number < count % len(modules))
        for kind, path in module.files(rng, share):
            yield module, kind, path


def main() -> int:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[k for k in KINDS if (HERE / f"{k}.py").exists()])
    parser.add_argument("--starts", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--keep", type=Path, help="folder for files that end in a traceback")
    given = parser.parse_args()
    from hostile_files.starts import start

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    modules = [importlib.import_module(f"hostile_files.{name}") for name in given.kinds]
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as scratch:
        tempfile.tempdir = scratch
        many = hostile(modules, random.Random(given.seed), given.starts or given.count)
        for number, (module, kind, path) in enumerate(many):
            row = rows.setdefault(kind, Row())
            read = getattr(module, "read", plain_read)
            begin = getattr(module, "start", start)
            said = begin(path) if given.starts else apart(read, path, given.seconds)
            row.files += 1
            row.refused += "refused" in said
            row.loaded += "longest_s" in said
            row.longest_s = max(row.longest_s, said.get("longest_s", 0.0))
            row.grown_mib = max(row.grown_mib, said.get("grown_mib", 0.0))
            is_long = said.get("longest_s", 0.0) > LONGEST_S
            if "traceback" in said:
                row.tracebacks.append(said["traceback"])
            if given.keep is not None and ("traceback" in said or is_long):
                kept = given.keep / f"{given.seed}-{number}"
                (shutil.copytree if path.is_dir() else shutil.copy)(path, kept)
                print(f"{kind}, {kept}: {said}", flush=True)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    print(table(rows))
    return any(row.tracebacks or row.longest_s > LONGEST_S for row in rows.values())


def table(rows: dict[str, Row]) -> str:
    """Write the table, and one traceback of each kind."""
    titles = ("kind", "files", "refused in one line", "loaded", "longest callback", "memory grown", "tracebacks")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for kind, row in sorted(rows.items()):
        cells = [kind, row.files, row.refused, row.loaded, f"{row.longest_s * 1e3:.0f} ms", f"{row.grown_mib:.0f} MiB"]
        lines.append(f"| {' | '.join(map(str, [*cells, len(row.tracebacks)]))} |")
    return "\n".join([*lines, *(f"\n{kind}: {row.tracebacks[0]}" for kind, row in rows.items() if row.tracebacks)])


if __name__ == "__main__":
    sys.exit(main())
