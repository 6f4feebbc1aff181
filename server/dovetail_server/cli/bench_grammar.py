"""The options of `dovetail bench grammar`. Imports nothing that a help text does not need."""

from __future__ import annotations

from dovetail.contracts.errors import ConfigError
from dovetail_server.cli.option_tables import BenchParser, filled

PARTS = ("compile", "masks", "batch", "first", "step", "hostile")


def main(argv: list[str]) -> int:
    """Run it.

    Raises:
        ConfigError: What the user can fix.
    """
    args = BenchParser("grammar").read(argv)
    parts = tuple(args.parts.split(","))
    wrong = [part for part in parts if part not in PARTS]
    if wrong:
        raise ConfigError(f"--parts: {wrong[0]!r} is no part; possible: {', '.join(PARTS)}")
    from dovetail_server.bench import report
    from dovetail_server.bench.grammar import GrammarOptions
    from dovetail_server.bench.grammar import main as run

    report.check_json(args.json)
    return run(filled(GrammarOptions, args, tokenizer=args.tokenizer_path, model=args.model_path, parts=parts))
