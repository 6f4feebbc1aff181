"""Write the figures of README and docs: `make results`, or this file with `[JSON …]`, which are recorded first.

A JSON file is what `dovetail bench serve --suite standard --json FILE` wrote, or `--suite user`. Its figures replace
those of the same model, suite, kernel cache, prompts and flags in `docs/results.toml`; those of several files of one
run become repeated runs. Then every page whose figures differ is written.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path

from record_results import Given, dump, record
from results import FILE, PART, ROOT, TEMPLATES, Results, ResultsError, with_parts


def pages() -> list[Path]:
    """Return the pages that have parts."""
    found = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    return [path for path in found if PART.search(path.read_text("utf-8"))]


def record_all(files: list[Path], given: Given) -> None:
    """Record files, and say which measurements no page shows.

    Raises:
        ResultsError: A file cannot be recorded; nothing is written.
    """
    runs = tomllib.loads(FILE.read_text("utf-8"))
    names = record(runs, files, given)
    Results.of(runs)
    FILE.write_text(dump(runs), "utf-8")
    templates = "".join(path.read_text("utf-8") for path in sorted(TEMPLATES.glob("*.md")))
    for name in names:
        told = "" if f"{name}." in templates else ", which no page shows"
        print(f"{FILE.relative_to(ROOT)}: {name}{told}")


def main() -> int:
    """Record what is given, and write every page whose figures differ."""
    parser = argparse.ArgumentParser(description="Write the figures of README and docs from docs/results.toml.")
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="JSON", help="of `dovetail bench serve --json`: recorded"
    )
    parser.add_argument("--model", help="the model's name [its folder's]")
    parser.add_argument("--device", help="such as 'one H200'; what the file tells")
    parser.add_argument(
        "--kernel-cache", choices=("empty", "full"), help="of a server that ran before; what the file tells"
    )
    parser.add_argument("--run", metavar="NAME", help="name of the run [made of what was measured]")
    parser.add_argument("--source", help="where a peer's figures are from [measured here]")
    options = vars(parser.parse_args())
    try:
        if files := options.pop("files"):
            record_all(files, Given(**options))
        elif any(options.values()):
            raise ResultsError("options are for JSON files; give one")
        results = Results.read(FILE)
        for page in pages():
            old = page.read_text("utf-8")
            new = with_parts(old, results)
            if new != old:
                page.write_text(new, "utf-8")
                print(f"{page.relative_to(ROOT)}: written")
    except ResultsError as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
