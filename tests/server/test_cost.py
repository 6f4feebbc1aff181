"""No body costs more than in proportion to its size, whatever stands in whichever field.

Here a third of the fields has one of the shapes, at 10 KB and 1 MB, and what renders and translates has some more. All
shapes in all fields, and those of `LARGE` at the limit of a body, with `DOVETAIL_FULL=1`; `-s` shows a table.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from cost import KIB, LARGE, MIB, SHAPES, Case, Cost, Meter, cases
from server_tiny import write_model

from conftest import Harness
from dovetail_server.examples import BODIES

IS_FULL = bool(os.environ.get("DOVETAIL_FULL"))
SMALL, BIG = 10 * KIB, MIB
FLOOR_S = 0.01
"""Below this, processor time is noise."""
MORE_THAN_LINEAR = 5
SPARE_BYTES = 48 * MIB
"""For bodies of many small objects, of which there may be 65,536."""
REFUSED = (400, 404, 413, 422, 501)
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HEAVY = [
    *(Case(CHAT, "messages", shape) for shape in ("messages", "parts")),
    *(Case(MESSAGES, "messages", shape) for shape in ("messages", "parts")),
    *(Case("/v1/messages/count_tokens", "messages", shape) for shape in ("messages", "parts")),
    *(Case(RESPONSES, "input", shape) for shape in ("text", "messages", "parts", "items")),
    *(Case("/tokenize", "prompt", shape) for shape in ("text", "one word", "escapes")),
    Case("/detokenize", "tokens", "numbers"),
    Case("/v1/completions", "prompt", "numbers"),
    Case("/v1/completions", "prompt", "text"),
    Case("/generate", "text", "text"),
    Case("/separate_reasoning", "text", "text"),
    Case("/parse_function_call", "text", "escapes"),
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
    yield found
    harness.close()


@pytest.fixture(scope="module")
def document(meter: Meter) -> dict[str, Any]:
    found: dict[str, Any] = meter.harness.get("/openapi.json").json()
    return found


def check(case: Case, small: Cost, big: Cost, most_stall_s: float) -> str | None:
    """Say what is wrong with what a case costs."""
    times = big.num_bytes / max(small.num_bytes, SMALL // 2)
    if big.cpu_s > MORE_THAN_LINEAR * times * max(small.cpu_s, FLOOR_S):
        return f"{case}: {small.cpu_s:.3f} s for {small.num_bytes} bytes, {big.cpu_s:.3f} s for {big.num_bytes}"
    if big.stall_s > most_stall_s:
        return f"{case}: the event loop stood still for {big.stall_s:.3f} s of processor time"
    if big.memory_bytes > 10 * big.num_bytes + SPARE_BYTES:
        return f"{case}: {big.memory_ratio:.1f} times the body of {big.num_bytes} bytes in memory"
    if big.status != 200 and big.status not in REFUSED:
        return f"{case}: status {big.status}"
    return None


def measure(meter: Meter, case: Case, size: int, *, is_traced: bool) -> Cost:
    body = case.body(size)
    cost = meter.send(case.path, body)
    if not is_traced:
        return cost
    traced = meter.send_traced(case.path, body)
    return Cost(cost.num_bytes, cost.status, cost.cpu_s, cost.stall_s, traced.memory_bytes)


def test_fields_cost_in_proportion_to_their_size(meter: Meter, document: dict[str, Any]) -> None:
    """Every third field of the bodies, with one of the shapes."""
    wrong = []
    for case in cases(document)[::3]:
        small = measure(meter, case, SMALL, is_traced=False)
        wrong.append(check(case, small, measure(meter, case, BIG, is_traced=False), 1.0))
    assert not [each for each in wrong if each]


@pytest.mark.parametrize("case", HEAVY, ids=lambda case: f"{case.path}-{case.field}-{case.shape}")
def test_what_is_rendered_and_translated_costs_in_proportion(meter: Meter, case: Case) -> None:
    """Conversations, tools, schemas and texts that get as far as they can."""
    small = measure(meter, case, SMALL, is_traced=False)
    is_traced = case.path == "/v1/completions"
    assert not check(case, small, measure(meter, case, BIG, is_traced=is_traced), 1.0)


@pytest.mark.skipif(not IS_FULL, reason="takes an hour; set DOVETAIL_FULL")
@pytest.mark.timeout(7200)
def test_the_whole_grid(meter: Meter, document: dict[str, Any]) -> None:
    """All shapes in all fields, at the limit too. Stalls are bounded as measured on two busy cores, where the limit is
    reached by texts of escapes and by prompts that only this server looks at."""
    limit = meter.harness.settings.max_body_bytes - 64 * KIB
    rows: dict[str, list[tuple[Case, Cost]]] = defaultdict(list)
    wrong = []
    for case in cases(document, list(SHAPES)):
        small = measure(meter, case, SMALL, is_traced=False)
        big = measure(meter, case, BIG, is_traced=case.shape in LARGE)
        wrong.append(check(case, small, big, 0.15))
        rows["10 KB"].append((case, small))
        rows["1 MB"].append((case, big))
        if case.shape in LARGE:
            most = measure(meter, case, limit, is_traced=False)
            wrong.append(check(case, big, most, 0.5))
            rows["32 MB"].append((case, most))
    print(table(rows, [each for each in wrong if each]))
    assert not [each for each in wrong if each]


def table(rows: dict[str, list[tuple[Case, Cost]]], wrong: list[str]) -> str:
    """Write the largest costs of each size."""
    lines = ["| size | requests | most CPU | longest stall | most memory |", "|---|---|---|---|---|"]
    for size, found in rows.items():
        cells = [size, str(len(found))]
        for unit, key in (("s", "cpu_s"), ("s", "stall_s"), ("x", "memory_ratio")):
            case, cost = max(found, key=lambda pair, key=key: getattr(pair[1], key))  # type: ignore[misc]
            cells.append(f"{getattr(cost, key):.3f} {unit} ({case.path} {case.field}: {case.shape})")
        lines.append(f"| {' | '.join(cells)} |")
    for size, found in rows.items():
        for case, cost in sorted(found, key=lambda pair: -pair[1].stall_s)[:15]:
            lines.append(f"- {size}: {case} stall {cost.stall_s:.3f} cpu {cost.cpu_s:.3f} {cost.memory_ratio:.1f}x")
    return "\n".join([*lines, "", *wrong, ""])
