"""The JSON Schema Test Suite through routes and verdicts: nothing invalid in full, and no wrong verdict.

    pip download --no-deps --no-binary jsonschema jsonschema      # its source holds the suite
    python tests/benchmarks/schema_suite.py jsonschema-4.26.0.tar.gz

Each schema is routed and compiled as a server does. Where that is called full, every invalid text of the suite must be
refused; a verdict must never call an invalid text valid. Exit code 1 where one does. What is valid and refused, or
judged invalid, is counted, and shown with `--all`: formats are checked here, which the suite leaves to validators.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))

from grammar_routes import Enforced, backends_of
from random_pairs import DRAFTS

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarSpec, Kind
from dovetail.grammar.compile.validity import conforms
from dovetail.grammar.spec.fields import check_spec
from dovetail.grammar.spec.route import GrammarRouter
from dovetail_testing.conformance.grammar_samples import small_vocabulary

FOLDERS = {
    "draft4": "draft-04",
    "draft6": "draft-06",
    "draft7": "draft-07",
    "draft2019-09": "2019-09",
    "draft2020-12": "2020-12",
}


class Group(NamedTuple):
    """A schema of the suite, and texts with their verdicts."""

    name: str
    schema: Any
    tests: list[tuple[str, str, bool]]


def groups(suite: Path) -> Iterator[Group]:
    """Yield what an archive holds, each schema with its draft."""
    with tarfile.open(suite) as archive:
        for member in archive.getmembers():
            _, found, path = member.name.partition("/json/tests/")
            draft = FOLDERS.get(path.partition("/")[0]) if found and path.endswith(".json") else None
            file = archive.extractfile(member) if draft is not None else None
            if draft is None or file is None:
                continue
            uri = next(each for each in DRAFTS if draft in each)
            for group in json.load(file):
                schema = group["schema"]
                schema = {"$schema": uri, **schema} if isinstance(schema, dict) else schema
                tests = [
                    (test["description"], json.dumps(test["data"], ensure_ascii=False), test["valid"])
                    for test in group["tests"]
                ]
                yield Group(f"{path}: {group['description']}", schema, tests)


def judged_as(schema: Any, text: str) -> bool | None:
    """Return the verdict as a server tells it: an expression that Python cannot read leaves none."""
    try:
        return conforms(schema, text)
    except re.error:
        return None


def main() -> int:
    """Run."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("suite", type=Path, help="archive of jsonschema's source")
    arguments.add_argument("--only", default="", help="part of a file's name")
    arguments.add_argument("--all", action="store_true", help="show valid texts that are judged invalid")
    args = arguments.parse_args()
    vocabulary = small_vocabulary()
    backends = backends_of(vocabulary)
    router, count, wrong = GrammarRouter(backends), Counter[str](), []
    for group in groups(args.suite):
        if args.only not in group.name:
            continue
        count["schemas"] += 1
        spec = GrammarSpec(kind=Kind.JSON, source=json.dumps(group.schema, ensure_ascii=False))
        found = None
        try:
            check_spec(spec)
            found = Enforced(router.route(spec, "json_schema"), backends, vocabulary, full_only=True)
            count[found.enforcement] += 1
        except RequestError:
            count["refused with 400"] += 1
        for description, text, expected in group.tests:
            count["texts"] += 1
            if found is not None and found.enforcement == "full":
                accepted = found.accepts(text)
                count["texts in full"] += 1
                count["valid and refused, in full"] += expected and not accepted
                if accepted and not expected:
                    wrong.append(f"ACCEPTED {group.name}: {description}: {text} by {json.dumps(group.schema)}")
            judged = judged_as(group.schema, text) if found is not None else None
            count[f"judged {judged}"] += found is not None
            count["valid and judged invalid"] += expected and judged is False
            if args.all and expected and judged is False:
                print(f"refused: {group.name}: {description}: {text} by {json.dumps(group.schema)}")
            if judged and not expected:
                wrong.append(f"JUDGED {group.name}: {description}: {text} by {json.dumps(group.schema)}")
    print(*wrong, sep="\n")
    print(*(f"{number:7,} {name}" for name, number in sorted(count.items())), sep="\n")
    print(f"{len(wrong)} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
