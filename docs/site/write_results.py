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


def written(files: list[Path], given: Given) -> dict[Path, str]:
    """Record files, and return the file of results and every page as they should be.

    Raises:
        ResultsError: A file cannot be recorded, or a page shows a figure that is not there.
    """
    runs = tomllib.loads(FILE.read_text("utf-8"))
    names = record(runs, files, given)
    results = Results.of(runs)
    templates = "".join(path.read_text("utf-8") for path in sorted(TEMPLATES.glob("*.md")))
    for name in names:
        print(f"{name}: recorded{'' if f'{name}.' in templates else ', but no page shows it'}")
    return {FILE: dump(runs)} | {page: with_parts(page.read_text("utf-8"), results) for page in pages()}


def main() -> int:
    """Record what is given, and write every page whose figures differ; all of it or nothing."""
    parser = argparse.ArgumentParser(description="Write the figures of README and docs from docs/results.toml.")
    parser.add_argument("files", nargs="*", type=Path, metavar="JSON", help="of `dovetail bench serve`, to be recorded")
    parser.add_argument("--model", help="the model's name [its folder's]")
    parser.add_argument("--device", help="such as 'one H200' [what the file tells]")
    parser.add_argument("--kernel-cache", choices=("empty", "full"), help="when it started [what the file tells]")
    parser.add_argument("--run", metavar="NAME", help="name of the run [made of what was measured]")
    parser.add_argument("--source", help="where a peer's figures are from [measured here]")
    options = vars(parser.parse_args())
    files = options.pop("files")
    try:
        if any(options.values()) and not files:
            raise ResultsError("options are for JSON files; give one")
        for path, text in written(files, Given(**options)).items():
            if text != path.read_text("utf-8"):
                path.write_text(text, "utf-8")
                print(f"{path.relative_to(ROOT)}: written")
    except ResultsError as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
