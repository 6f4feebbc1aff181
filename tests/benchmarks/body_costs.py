"""What bodies cost a server: each of 19 shapes in each field of each route, at 10 KB and 1 MB, and some at 32 MB.

    python tests/benchmarks/body_costs.py [grid|largest]

Shown are the most processor time, the longest stall of the event loop, and memory. Exit code 1 where a body costs more
than in proportion to its size. The grid takes an hour, the largest bodies half of one.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))  # the server in a thread

from cost import (
    BIG,
    FLOOR_S,
    KIB,
    LARGE,
    MORE_THAN_LINEAR,
    SHAPES,
    SMALL,
    TRIES,
    Case,
    Cost,
    Meter,
    cases,
    check,
    fields_of,
    kinds_of_fields,
    measure,
    meter_of,
    wrong_with,
)  # fmt: skip
from server_tiny import write_model

Rows = dict[str, list[tuple[Case, Cost]]]


def check_apart(case: Case, small: Cost, big: Cost) -> str | None:
    """Say what is wrong with what the process that reads a body takes for the largest."""
    times = big.num_bytes / small.num_bytes
    if big.apart_s > MORE_THAN_LINEAR * times * max(small.apart_s, FLOOR_S):
        return f"{case}: {small.apart_s:.3f} s for {small.num_bytes} bytes, {big.apart_s:.3f} s for {big.num_bytes}"
    if big.grown_bytes > 10 * big.num_bytes:
        return f"{case}: {big.ratio:.1f} times {big.num_bytes} bytes in memory"
    return None


def grid(meter: Meter, fields: list[Case]) -> tuple[Rows, list[str]]:
    """Measure all shapes in all fields."""
    rows: Rows = defaultdict(list)
    wrong = []
    for case in fields:
        small, big = measure(meter, case, SMALL), measure(meter, case, BIG)
        wrong.append(check(case, small, big) and wrong_with(meter, case))
        rows["10 KB"].append((case, small))
        rows["1 MB"].append((case, big))
    return rows, [each for each in wrong if each]


def largest(meter: Meter, fields: list[Case]) -> tuple[Rows, list[str]]:
    """Measure each kind of field at the limit of a body, with each shape that may be large."""
    limit = meter.harness.settings.max_body_bytes - 64 * KIB
    rows: Rows = defaultdict(list)
    wrong = []
    for at, case in enumerate(sorted(fields, key=lambda case: LARGE.index(case.shape))):  # each is written down once
        for _ in range(TRIES):
            big, most = measure(meter, case, BIG), measure(meter, case, limit)
            found = check(case, big, most) or check_apart(case, big, most)
            if found is None:
                break
        if found is not None:
            wrong.append(found)
        rows["32 MB"].append((case, most))
        if at % 100 == 0:
            print(f"{at} of {len(fields)}, {len(wrong)} wrong: {wrong[-1:]}", flush=True)
    return rows, wrong


def table(rows: Rows, wrong: list[str]) -> str:
    """Write the largest costs of each size."""
    titles = ("size", "requests", "most CPU", "longest stall", "most CPU apart", "most memory apart")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for size, found in rows.items():
        cells = [size, str(len(found))]
        for unit, column in (("s", "cpu_s"), ("s", "stall_s"), ("s", "apart_s"), ("x", "ratio")):
            case, cost = max(found, key=partial(_value, column))
            cells.append(f"{getattr(cost, column):.3f} {unit} ({case.path} {case.field}: {case.shape})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *wrong, ""])


def _value(column: str, row: tuple[Case, Cost]) -> float:
    return float(getattr(row[1], column))


def main() -> int:
    """Measure one or both."""
    wanted = sys.argv[1:] or ["grid", "largest"]
    all_wrong = []
    with tempfile.TemporaryDirectory() as folder, meter_of(write_model(Path(folder))) as meter:
        document = meter.harness.get("/openapi.json").json()
        for name in wanted:
            if name == "grid":
                rows, wrong = grid(meter, cases(fields_of(document), list(SHAPES)))
            else:
                rows, wrong = largest(meter, cases(kinds_of_fields(document), LARGE))
            print(table(rows, wrong))
            all_wrong += wrong
    return bool(all_wrong)


if __name__ == "__main__":
    sys.exit(main())
