"""The options of `dovetail bench grammar`. Imports nothing that a help text does not need."""

from __future__ import annotations

from pathlib import Path

from dovetail.contracts.errors import ConfigError
from dovetail_server.cli.bench_options import BenchParser, count, filled, folder, whole

ABOUT = """Measure structured outputs: new and known JSON schemas, masks, what grammars cost a decode step, and how much
hostile grammars delay others. Schemas are random ones over all of JSON Schema, and realistic ones."""
PARTS = ("compile", "masks", "batch", "first", "step", "hostile")


def main(argv: list[str]) -> int:
    """Run it.

    Raises:
        ConfigError: What the user can fix.
    """
    parser = BenchParser("grammar", ABOUT)
    parser.add_argument("--tokenizer-path", metavar="DIR", type=folder, help="tokenizer [131,072 made-up tokens]")
    parser.add_argument("--model-path", metavar="DIR", type=folder, help="shapes for the engine [a tiny model's]")
    parser.add_argument("--num-schemas", metavar="N", type=count, default=300, help="[300]")
    parser.add_argument("--num-rows", metavar="N", type=count, default=64, help="constrained rows of a step [64]")
    parser.add_argument("--rounds", metavar="N", type=count, default=3, help="of steps with and without grammars [3]")
    parser.add_argument("--num-cores", metavar="N", type=count, default=1, help="CPU cores to run on [1]")
    parser.add_argument("--parts", metavar="NAME,NAME", default=",".join(PARTS), help=f"[{','.join(PARTS)}]")
    parser.add_argument("--seed", metavar="N", type=whole, default=0, help="of schemas and walks [0]")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there")
    args = parser.read(argv)
    parts = tuple(args.parts.split(","))
    wrong = [part for part in parts if part not in PARTS]
    if wrong:
        raise ConfigError(f"--parts: {wrong[0]!r} is no part; possible: {', '.join(PARTS)}")
    from dovetail_server.bench import report
    from dovetail_server.bench.grammar import GrammarOptions
    from dovetail_server.bench.grammar import main as run

    report.check_json(args.json)
    return run(filled(GrammarOptions, args, tokenizer=args.tokenizer_path, model=args.model_path, parts=parts))
