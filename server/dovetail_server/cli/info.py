"""`dovetail info MODEL`: what the server would make of a model folder, and why."""

from __future__ import annotations

import argparse
import json

from dovetail.contracts.errors import ConfigError
from dovetail_server.cli.exits import OF_A_MODEL, exit_code


def main(argv: list[str]) -> int:
    """Run `dovetail info`.

    Args:
        argv: The arguments after `info`.

    Returns:
        The exit code; wrong arguments exit with 2 through `SystemExit`.
    """
    parser = argparse.ArgumentParser(
        prog="dovetail info", description="Show what the server makes of a model folder.", allow_abbrev=False
    )
    parser.add_argument("model", nargs="?", help="model directory; default: the bundled demo model")
    parser.add_argument("--model-impl", default="auto", help="as that of `dovetail serve`")
    parser.add_argument("--tokenizer-path", help="folder with the tokenizer, if it is another one")
    parser.add_argument("--chat-template", help="Jinja file or built-in name, instead of the model's own template")
    parser.add_argument("--load-format", default="auto", help="as that of `dovetail serve`; dummy needs no weights")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)

    def work() -> int:
        from dovetail_server.cli.model_facts import info, table

        facts = info(args.model, args.tokenizer_path, args.chat_template, args.model_impl, args.load_format)
        print(json.dumps(facts, indent=2, ensure_ascii=False) if args.json else table(facts))
        if facts["refused"] is not None:
            raise ConfigError(facts["refused"])
        return 0

    return exit_code("info", work, OF_A_MODEL)
