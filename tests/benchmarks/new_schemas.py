"""What an engine's grammars take of memory with ever new schemas: compiled, followed by texts, kept and let go of.

    python tests/benchmarks/new_schemas.py [--seconds 600] [--cache-mib 32] [--rows 8]

The service of an engine without the engine: `--rows` requests at a time have a schema of their own that nobody has
asked for before, and a text of it is read token by token, with each step's masks. Prints the process's own memory over
time, and how much of it the cache says it holds. Exit code 1 if the last third after a warm-up of a quarter is more
than 5 % over the first one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.contracts.grammar import GrammarSpec, Kind
from dovetail.demo import MODEL_DIR
from dovetail.grammar.compile.cache import Enforced
from dovetail.grammar.compile.early import EarlyTokenizer
from dovetail.grammar.compile.service import GrammarService
from dovetail.grammar.spec.route import option_of
from dovetail.plugins import Registry, load, make_plan

WARM, MOST = 0.25, 1.05
TEXTS = ["hello", "some words of a reply", "a longer text " * 8, "", "é中文"]


def schema(rng: random.Random) -> tuple[Any, Any]:
    """Draw a schema that is new, and an instance."""
    number = rng.getrandbits(40)
    kinds = {f"n{number}x{at}": rng.randrange(5) for at in range(rng.choice((1, 3, 8, 8, 40)))}
    parts: list[Any] = [
        {"type": "integer", "minimum": 0}, {"type": "string"}, {"type": "boolean"},
        {"enum": [f"v{number}", "other"]}, {"type": "array", "items": {"type": "string"}},
    ]  # fmt: skip
    values: list[Any] = [rng.randrange(10**6), rng.choice(TEXTS), True, "other", [rng.choice(TEXTS)] * 4]
    made = {"type": "object", "properties": {key: parts[kind] for key, kind in kinds.items()}, "required": [*kinds]}
    return made, {key: values[kind] for key, kind in kinds.items()}


def own_mib() -> float:
    """Return the memory that this process shares with no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def follow(service: GrammarService, rng: random.Random, rows: int, tokenizer: Any) -> None:
    """Have some new grammars compiled, and read a text of each."""
    wanted = [schema(rng) for _ in range(rows)]
    specs = [GrammarSpec(kind=Kind.JSON, source=json.dumps(given)) for given, _ in wanted]
    futures = [service.request((option_of("llguidance", spec),)) for spec in specs]
    while not all(future.is_ready for future in futures):
        service.wait(0.1)
    found = [future.outcome for future in futures]
    in_force = [each for each in found if isinstance(each, Enforced)]
    assert len(in_force) == rows, found
    matchers = [each.compiled.matcher() for each in in_force]
    ids = [tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False) for _, value in wanted]
    mask = np.zeros((rows, service._compiler.vocabulary().mask_words), dtype=np.int32)
    for step in range(max(map(len, ids))):
        going = [row for row in range(rows) if step < len(ids[row])]
        in_force[0].backend.fill_batch([matchers[row] for row in going], mask, going)
        assert all(matchers[row].accept([ids[row][step]]) == 1 for row in going)


def main() -> int:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description="Memory of grammars with ever new schemas.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--cache-mib", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8)
    given = parser.parse_args()
    early = EarlyTokenizer(MODEL_DIR)
    plugins = load(make_plan(Registry.scan(), grammar_backend="llguidance"), "engine")
    cache_bytes = given.cache_mib << 20
    service = GrammarService(plugins, lambda: early.vocabulary(4096, (4089,)), timeout_s=60, cache_bytes=cache_bytes)
    from dovetail.text.tokenizer.tokenizer import Tokenizer

    tokenizer, rng, began, said = Tokenizer.load(MODEL_DIR), random.Random(1), time.monotonic(), 0.0
    samples: list[float] = []
    num = 0
    while (passed := time.monotonic() - began) < given.seconds:
        follow(service, rng, given.rows, tokenizer)
        num += given.rows
        if passed > given.seconds * WARM:
            samples.append(own_mib())
        if passed - said > given.seconds / 20:
            said = passed
            cache = service._cache
            held = f"cache {cache.num_bytes / 2**20:6.1f} MiB of {len(cache)}"
            print(f"{passed:6.0f} s {num:7,} schemas {own_mib():7.1f} MiB own, {held}", flush=True)
    service.close()
    third = len(samples) // 3
    first, last = statistics.median(samples[:third]), statistics.median(samples[-third:])
    print(f"{num:,} schemas: {first:.1f} MiB in the first third after warm-up, {last:.1f} MiB in the last")
    return last > MOST * first


if __name__ == "__main__":
    sys.exit(main())
