"""What the grammars of a step of many rows cost the host: their masks, and their tokens.

    python tests/benchmarks/grammar_rows.py [--tokenizer-path DIR] [--rows 64]

Every row writes a text of its own, as a model would, by the schema of `dovetail bench serve --suite user` and others,
in a reply and in a tool call. Each is timed as the library computes every mask, and with the masks of states that were
met before. Run it on a quiet machine; ratios hold on a busy one.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.contracts.grammar import GrammarLimits, GrammarSpec, Kind, Vocabulary
from dovetail.grammar.compile.vocabulary import make_vocabulary
from dovetail.grammar.matching.bitmask import fill_masks
from dovetail.grammar.matching.constraint import Constraint, TokenSets
from dovetail.grammar.pipeline import StructuredOutputs
from dovetail.grammar.spec.route import GrammarRouter
from dovetail.grammar.spec.wire import spec_of
from dovetail.plugins import Registry, load, make_plan
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_grammar.llguidance import LlguidanceBackend, LlguidanceGrammar
from dovetail_server.bench.grammar_folder import make_folder
from dovetail_server.bench.workloads import EXTRAS

TOOL = EXTRAS["tools"]["tools"][0]
TABLE = TOOL["function"]["parameters"]
WORDS = ["the", "river", "of", "Paris", "Lake", "Superior", "Everest", "old", "San", "Francisco", "Rhône", "東京"]
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{6}$"},
        "placed": {"type": "string", "format": "date"},
        "notes": {"type": ["string", "null"], "maxLength": 200},
        "lines": {
            "type": "array",
            "minItems": 40,
            "items": {
                "type": "object",
                "properties": {"sku": {"type": "string"}, "price": {"type": "number", "minimum": 0}},
                "required": ["sku", "price"],
            },
        },
    },
    "required": ["id", "placed", "notes", "lines"],
    "additionalProperties": False,
}
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 500}
CALL = '<tool_call>\n{"name": "store", "arguments": '


def words(rng: random.Random, most: int) -> str:
    """Some words of at most so many characters."""
    text = rng.choice(WORDS)
    while len(text) < rng.randint(1, most):
        text += " " + rng.choice(WORDS)
    return text[:most].strip()


def table(rng: random.Random) -> str:
    """A text by the suite's schema."""
    kinds = ["city", "river", "mountain", "lake"]
    rows = [
        {"name": words(rng, 24), "kind": rng.choice(kinds), "year": rng.randint(1, 2100)}
        for _ in range(rng.randint(9, 15))
    ]
    return json.dumps({"rows": rows}, ensure_ascii=False, indent=rng.choice([None, 1]))


def order(rng: random.Random) -> str:
    """A text with a pattern, a format, long strings and prices."""
    lines = [{"sku": words(rng, 30), "price": round(rng.random() * 99, 2)} for _ in range(20)]
    made = {"id": f"ABC-{rng.randint(0, 999999):06}", "placed": f"2026-{rng.randint(1, 12):02}-11"}
    return json.dumps({**made, "notes": rng.choice([words(rng, 200), None]), "lines": lines}, ensure_ascii=False)


def numbers(rng: random.Random) -> str:
    """Integers."""
    return json.dumps([rng.randint(-(10**6), 10**6) for _ in range(60)])


class Rows:
    """Rows of one grammar, each with a text."""

    def __init__(self, backend: LlguidanceBackend, spec: GrammarSpec, texts: Sequence[list[int]]) -> None:
        self._backend, self._texts = backend, texts
        self._sets = TokenSets(backend._vocabulary)
        self._mask = np.zeros((len(texts), backend._vocabulary.mask_words), dtype=np.int32)
        found = backend.compile(spec, GrammarLimits())
        made = backend.load(found) if isinstance(found, bytes) else found
        assert isinstance(made, LlguidanceGrammar)
        self.grammar = made

    def run(self) -> tuple[list[float], list[float]]:
        """Follow the texts; returns seconds of each step's masks, and of its tokens."""
        constraints = [Constraint(self._sets, None, self.grammar.matcher(), self._backend) for _ in self._texts]
        wants, masks, tokens = [False] * len(constraints), [], []
        for place in range(min(map(len, self._texts)) - 8):
            began = time.perf_counter()
            fill_masks(constraints, wants, lambda num: self._mask[:num])
            filled = time.perf_counter()
            for constraint, ids in zip(constraints, self._texts, strict=True):
                error = constraint.accept(ids[place])
                if error is not None:
                    raise SystemExit(f"{error} after {ids[:place]}")
            masks.append(filled - began)
            tokens.append(time.perf_counter() - filled)
        return masks, tokens


def in_a_call(backend: LlguidanceBackend) -> GrammarSpec:
    """The suite's tool, which must be called."""
    parser = load(make_plan(Registry.scan(), tool_parser="hermes"), "api").get("tool_parser", "hermes")()
    front = StructuredOutputs({"llguidance": backend})
    try:
        return spec_of(
            front.tools(parser, "hermes", [TOOL], "required", parallel=True, param="tools").engine_options[0]
        )
    finally:
        front.close()


def of_schema(backend: LlguidanceBackend, schema: Any) -> GrammarSpec:
    """A schema as a request would have it."""
    spec = GrammarSpec(kind=Kind.JSON, source=json.dumps(schema))
    return spec_of(GrammarRouter({"llguidance": backend}).route(spec, "json_schema").engine_options[0])


def vocabulary_of(path: Path | None) -> Vocabulary:
    """The tokens of a model, or of a made-up one of usual size."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = Tokenizer.load(path or make_folder(Path(scratch), None))
        return make_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def main() -> None:
    """Print µs a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer-path", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    backend = LlguidanceBackend(vocabulary_of(options.tokenizer_path))
    encode = backend._vocabulary.encode
    assert encode is not None
    cases: list[tuple[str, GrammarSpec, Callable[[random.Random], str]]] = [
        ("suite's schema", of_schema(backend, TABLE), table),
        ("pattern, format, long strings", of_schema(backend, ORDER), order),
        ("integers", of_schema(backend, NUMBERS), numbers),
    ]
    if options.tokenizer_path is not None:  # a made-up one has no tokens around calls
        cases.insert(1, ("suite's tool", in_a_call(backend), lambda rng: CALL + table(rng)))
    print(f"{options.rows} rows, {backend._vocabulary.size:,} tokens; µs a step")
    print(f"{'':31}{'library':>18}{'states: first time':>22}{'then':>18}{'tokens':>10}")
    for name, spec, write in cases:
        rng = random.Random(1)
        rows = Rows(backend, spec, [encode(write(rng)) for _ in range(options.rows)])
        tell, rows.grammar._make_states = rows.grammar._make_states, None
        figures = [rows.run()]
        rows.grammar._make_states = tell
        rows.grammar.follow()
        figures += [rows.run(), rows.run()]
        told = "".join(f"{np.median(m) * 1e6:10.0f} ({np.mean(m) * 1e6:5.0f})" for m, _ in figures)
        print(f"{name:31}{told}{np.median(figures[-1][1]) * 1e6:10.0f}")
    print("median (mean)")


if __name__ == "__main__":
    main()
