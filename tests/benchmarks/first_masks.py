"""From a schema's arrival to its first mask, in pairs with the grammar library alone: processor time and where it goes.

    python tests/benchmarks/first_masks.py [--tokenizer FOLDER] [--sets services,pydantic] [--profile]

Sets are schemas of services and clouds, pydantic's tools, random ones of `dovetail bench grammar`, and those that the
package check-jsonschema brings. Each schema is read, routed and compiled in one thread as a server does it, and by the
library, which takes the schema as text: in turns, one first and the other first, each the best of `ROUNDS`. Schemas
that a compile process gets are counted apart: what that costs is seen by `dovetail bench grammar`.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import pstats
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))

from cloud_schemas import CLOUDS
from random_models import tool_of
from service_schemas import SERVICES

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarLimits, GrammarSpec, Kind, Vocabulary
from dovetail.grammar.compile.cache import key_of
from dovetail.grammar.compile.compiling import Compiler
from dovetail.grammar.compile.vocabulary import make_vocabulary
from dovetail.grammar.spec import fields
from dovetail.grammar.spec.route import GrammarRouter
from dovetail.plugins import Registry, load, make_plan
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_server.bench.grammar_folder import make_folder
from dovetail_server.bench.grammar_masks import RawLibrary
from dovetail_server.bench.grammar_schemas import schemas

ROUNDS = 9
STEPS = ("read", "route", "compile", "mask")


def sets() -> dict[str, list[Any]]:
    """Return schemas by where they are from."""
    found = find_spec("check_jsonschema")
    files = [] if found is None or found.origin is None else sorted(Path(found.origin).parent.rglob("*.json"))
    return {
        "services": [given for given, _, _ in (SERVICES | CLOUDS).values()],
        "pydantic": [tool_of(random.Random(f"1 {n}"), "f")["function"]["parameters"] for n in range(100)],
        "random": schemas(150, 0),
        "packages": [json.loads(file.read_text("utf-8")) for file in files],
    }


class Ours:
    """The way of a schema through a server, in one thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        plugins = load(make_plan(Registry.scan(), grammar_backend="auto"), "engine")
        self.compiler = Compiler(plugins, lambda: vocabulary, GrammarLimits(), 1)
        self._router = GrammarRouter(
            {planned.name: backend(vocabulary) for planned, backend in plugins.candidates("grammar_backend")}
        )
        self._row = np.zeros((1, vocabulary.mask_words), dtype=np.int32)

    def run(self, given: Any, clock: Callable[[], float] = time.thread_time) -> list[float] | None:
        """Return when each step ended, from 0; None where a compile process would have it."""
        began = clock()
        asked = fields.read_grammar({"response_format": {"type": "json_schema", "json_schema": {"schema": given}}})
        assert asked is not None
        read = clock()
        route = self._router.route(asked.spec, asked.param)
        steps = route.engine_options
        key_of(steps)
        routed = clock()
        backend = self.compiler.backend(steps[0].backend)
        if route.options[0].enforcement != "full" or not backend.inline(_spec(steps[0])):
            return None
        made = self.compiler.inline(steps[0])
        compiled = clock()
        made.grammar.matcher().fill(self._row, 0)
        return [at - began for at in (read, routed, compiled, clock())]


def _spec(step: Any) -> GrammarSpec:
    from dovetail.grammar.spec.wire import spec_of

    return spec_of(step)


def forget() -> None:
    """Let nothing be known of a schema: it arrives for the first time."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("dovetail.grammar", "dovetail.sdk", "dovetail_grammar")):
            for value in vars(module).values():
                if hasattr(value, "cache_clear") and not isinstance(value, type):
                    value.cache_clear()


def measure(name: str, given: list[Any], ours: Ours, raw: RawLibrary) -> None:
    """Print a set's figures."""
    pairs: list[tuple[float, float, list[float], int]] = []
    elsewhere = 0
    for number, one in enumerate(given):
        spec = GrammarSpec(kind=Kind.JSON, source=json.dumps(one))
        best, alone = None, None
        try:
            for turn in range(ROUNDS):
                for is_ours in (True, False) if (turn + number) % 2 else (False, True):
                    if is_ours:
                        forget()
                        took = ours.run(one)
                        best = took if best is None or (took is not None and took[-1] < best[-1]) else best
                    elif (there := raw.time(spec)) is not None:
                        alone = there[1] if alone is None else min(alone, there[1])
        except RequestError:
            continue
        if best is None or alone is None:
            elsewhere += 1
            continue
        pairs.append((best[-1], alone, best, len(spec.source)))
    if not pairs:
        print(f"{name}: none of {len(given)} is compiled in the engine")
        return
    ratios = sorted(here / there for here, there, _, _ in pairs)
    parts = [
        statistics.median((row[i] - (row[i - 1] if i else 0)) / there for _, there, row, _ in pairs)
        for i in range(len(STEPS))
    ]
    sums = sum(here for here, _, _, _ in pairs) / sum(there for _, there, _, _ in pairs)
    middle = statistics.median(there for _, there, _, _ in pairs)
    print(
        f"{name:10} {len(pairs):4} schemas, {elsewhere} elsewhere; library {middle * 1e3:.2f} ms; times the library: "
        f"p50 {statistics.median(ratios):.2f} p90 {ratios[len(ratios) * 9 // 10]:.2f} sum {sums:.2f}; "
        + " ".join(f"{step} {part:.2f}" for step, part in zip(STEPS, parts, strict=True)),
        flush=True,
    )


def main() -> None:
    """Run."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--tokenizer", type=Path)
    arguments.add_argument("--sets", default=",".join(sets()))
    arguments.add_argument("--profile", type=int, default=0, metavar="LINES", help="of a profile, for each set")
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = Tokenizer.load(make_folder(Path(scratch), args.tokenizer))
    vocabulary = make_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    ours, raw = Ours(vocabulary), RawLibrary(vocabulary)
    ours.run({"type": "null"})
    for name in args.sets.split(","):
        given = sets()[name]
        measure(name, given, ours, raw)
        if args.profile:
            profile = cProfile.Profile(time.thread_time)
            for one in given:
                forget()
                profile.enable()
                with contextlib.suppress(RequestError):
                    ours.run(one)
                profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)


if __name__ == "__main__":
    main()
