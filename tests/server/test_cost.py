"""No body costs more than in proportion to its size, whatever stands in whichever field.

Here one field in thirteen has one of the shapes, at 10 KB and 1 MB, and what renders and translates has some more. With
`DOVETAIL_FULL=1` all shapes in all fields of all routes, and those of `LARGE` at the limit of a body in each kind of
field; `-s` shows a table. Time is processor time, and what is too much is measured again: other threads may have had a
part in it.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from cost import KIB, LARGE, MIB, SHAPES, Case, Cost, Memory, Meter, cases, fields_of, kinds_of_fields
from harness import Harness
from server_tiny import write_model

from dovetail import imports
from dovetail_server.examples import BODIES

IS_FULL = bool(os.environ.get("DOVETAIL_FULL"))
SMALL, BIG = 10 * KIB, MIB
FLOOR_S = 0.01
"""Below this, processor time is noise."""
MORE_THAN_LINEAR = 5
TRACED = MIB if IS_FULL else 1 << 19
"""Memory is measured at this size: telling it takes long."""
SPARE_BYTES = 4 * MIB
"""What any request takes."""
SAMPLE = 1 if IS_FULL else 13
TRIES = 3
MOST_STALL_S = float(os.environ.get("DOVETAIL_MOST_STALL_S", "0.05"))
REFUSED = (400, 404, 413, 422, 501)
Row = tuple[Case, Cost]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HEAVY = [
    *(Case(CHAT, "messages", shape) for shape in ("messages", "parts")),
    *(Case(MESSAGES, "messages", shape) for shape in ("messages", "parts")),
    *(Case("/v1/messages/count_tokens", "messages", shape) for shape in ("messages", "parts")),
    *(Case(RESPONSES, "input", shape) for shape in ("text", "messages", "parts", "items")),
    *(Case("/tokenize", "prompt", shape) for shape in ("text", "one word", "escapes")),
    Case("/detokenize", "tokens", "numbers"),
    *(Case("/v1/responses/input_tokens", "input", shape) for shape in ("messages", "items")),
    Case("/v1/responses/compact", "input", "messages"),
    Case("/v1/score", "query", "text"),
    Case("/v1/score", "items", "texts"),
    Case("/v1/completions", "prompt", "numbers"),
    Case("/v1/completions", "prompt", "texts"),
    Case("/v1/completions", "prompt", "text"),
    Case("/generate", "text", "text"),
    Case("/separate_reasoning", "text", "text"),
    Case("/parse_function_call", "text", "escapes"),
    Case("/v1/messages/batches", "requests", "escapes"),
    *(Case(CHAT, field, "schema") for field in ("response_format", "json_schema", "chat_template_kwargs")),
    *(Case(CHAT, field, "text") for field in ("regex", "ebnf", "stop", "stop_regex")),
    Case(CHAT, "tools", "tools"),
    Case(CHAT, "logit_bias", "ids with a bias"),
    Case("/v1/completions", "prompt", "empty objects"),
]


@pytest.fixture(scope="module")
def meter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meter]:
    """A server that looks at prompts of any size, with the parsers of a Qwen3 model."""
    from dovetail_parsers.reasoning.qwen3 import Qwen3
    from dovetail_parsers.tools.hermes import Hermes

    folder = write_model(tmp_path_factory.mktemp("tiny"))
    harness = Harness(folder, reasoning=Qwen3(), tools=Hermes(), max_prompt_bytes=1 << 30)
    found = Meter(harness)
    for path in BODIES:  # what is imported and made at the first request
        found.send(path, Case(path, "user", "text").body(10))
    thresholds = gc.get_threshold()
    imports.started()  # as a server does when it has started
    yield found
    gc.set_threshold(*thresholds)
    harness.close()
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as `tests/conftest.py` has it, for the files that come after


@pytest.fixture(scope="module")
def document(meter: Meter) -> dict[str, Any]:
    found: dict[str, Any] = meter.harness.get("/openapi.json").json()
    return found


def check(case: Case, small: Cost, big: Cost) -> str | None:
    """Say what is wrong with what a case costs."""
    times = big.num_bytes / max(small.num_bytes, SMALL // 2)
    if big.cpu_s > MORE_THAN_LINEAR * times * max(small.cpu_s, FLOOR_S):
        return f"{case}: {small.cpu_s:.3f} s for {small.num_bytes} bytes, {big.cpu_s:.3f} s for {big.num_bytes}"
    if big.stall_s > MOST_STALL_S:
        return f"{case}: the event loop stood still for {big.stall_s:.3f} s of processor time"
    if big.status != 200 and big.status not in REFUSED:
        return f"{case}: status {big.status}"
    return None


def check_memory(case: Case, found: Memory) -> str | None:
    """Say what is wrong with the memory that a case takes."""
    if found.peak_bytes <= 10 * found.num_bytes + SPARE_BYTES:
        return None
    return f"{case}: {found.ratio:.1f} times {found.num_bytes} bytes in memory"


def check_apart(case: Case, small: Cost, big: Cost) -> str | None:
    """Say what is wrong with what the process that reads a body takes for the largest."""
    times = big.num_bytes / small.num_bytes
    if big.apart_s > MORE_THAN_LINEAR * times * max(small.apart_s, FLOOR_S):
        return f"{case}: {small.apart_s:.3f} s for {small.num_bytes} bytes, {big.apart_s:.3f} s for {big.num_bytes}"
    if big.grown_bytes > 10 * big.num_bytes:
        return f"{case}: {big.ratio:.1f} times {big.num_bytes} bytes in memory"
    return None


def measure(meter: Meter, case: Case, size: int) -> Cost:
    return meter.send(case.path, case.body(size))


def wrong_with(meter: Meter, case: Case) -> str | None:
    """Say what a case costs too much, each time that it is measured."""
    found = None
    for _ in range(TRIES):
        found = check(case, measure(meter, case, SMALL), measure(meter, case, BIG))
        if found is None:
            break
    return found


def test_fields_cost_in_proportion_to_their_size(meter: Meter, document: dict[str, Any]) -> None:
    """Some fields of the bodies, with one of the shapes each."""
    assert not [
        found for case in cases(fields_of(document))[::SAMPLE] if (found := wrong_with(meter, case)) is not None
    ]


@pytest.mark.parametrize("case", HEAVY, ids=lambda case: f"{case.path}-{case.field}-{case.shape}")
def test_what_is_rendered_and_translated_costs_in_proportion(meter: Meter, case: Case) -> None:
    """Conversations, tools, schemas and texts that get as far as they can."""
    assert not wrong_with(meter, case)
    assert not check_memory(case, meter.memory(case.path, case.body(TRACED)))


@pytest.mark.parametrize("case", [HEAVY[0], Case("/v1/completions", "prompt", "numbers")], ids=str)
def test_the_server_itself_holds_little_of_a_body(meter: Meter, case: Case) -> None:
    """It passes it on."""
    body = case.body(BIG)
    assert meter.server_memory(case.path, body) < 3 * len(body)


@pytest.mark.skipif(not IS_FULL, reason="takes an hour; set DOVETAIL_FULL")
@pytest.mark.timeout(14400)
def test_the_whole_grid(meter: Meter, document: dict[str, Any]) -> None:
    """All shapes in all fields."""
    rows: dict[str, list[Row]] = defaultdict(list)
    wrong = []
    for case in cases(fields_of(document), list(SHAPES)):
        small, big = measure(meter, case, SMALL), measure(meter, case, BIG)
        wrong.append(check(case, small, big) and wrong_with(meter, case))
        rows["10 KB"].append((case, small))
        rows["1 MB"].append((case, big))
    print(table(rows, [each for each in wrong if each]))
    assert not [each for each in wrong if each]


@pytest.mark.skipif(not IS_FULL, reason="takes half an hour; set DOVETAIL_FULL")
@pytest.mark.timeout(14400)
def test_the_largest_bodies(meter: Meter, document: dict[str, Any]) -> None:
    """Each kind of field at the limit of a body, with each shape that may be large: time and memory."""
    limit = meter.harness.settings.max_body_bytes - 64 * KIB
    rows: dict[str, list[Row]] = defaultdict(list)
    wrong = []
    # By shape: each is written down once.
    tried = sorted(cases(kinds_of_fields(document), LARGE), key=lambda case: LARGE.index(case.shape))
    for at, case in enumerate(tried):
        for _ in range(TRIES):
            big, most = measure(meter, case, BIG), measure(meter, case, limit)
            found = check(case, big, most) or check_apart(case, big, most)
            if found is None:
                break
        if found is not None:
            wrong.append(found)
        rows["32 MB"].append((case, most))
        if at % 100 == 0:
            print(f"{at} of {len(tried)}, {len(wrong)} wrong: {wrong[-1:]}", flush=True)
    print(table(rows, wrong))
    assert not wrong


def table(rows: dict[str, list[Row]], wrong: list[str]) -> str:
    """Write the largest costs of each size."""
    titles = ("size", "requests", "most CPU", "longest stall", "most CPU apart", "most memory apart")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for size, found in rows.items():
        cells = [size, str(len(found))]
        for unit, column in (("s", "cpu_s"), ("s", "stall_s"), ("s", "apart_s"), ("x", "ratio")):
            case, cost = max(found, key=partial(_value, column))
            cells.append(f"{getattr(cost, column):.3f} {unit} ({name(case)})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *wrong, ""])


def _value(column: str, row: Row) -> float:
    return float(getattr(row[1], column))


def name(case: Case) -> str:
    """Write a case in short."""
    return f"{case.path} {case.field}: {case.shape}"
