"""No body costs more than in proportion to its size, whatever stands in whichever field.

Here one field in thirteen has one of the shapes, at 10 KB and 1 MB, and what renders and translates has some more;
`tests/benchmarks/body_costs.py` tries all shapes in all fields. Time is processor time, and what is too much is
measured again: other threads may have had a part in it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from cost import BIG, MIB, Case, Memory, Meter, cases, fields_of, meter_of, wrong_with
from server_tiny import write_model

SPARE_BYTES = 4 * MIB
"""What any request takes."""
SAMPLE = 13
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HEAVY = [
    Case(CHAT, "messages", "messages"),
    Case(MESSAGES, "messages", "messages"),
    Case(RESPONSES, "input", "items"),
    Case("/tokenize", "prompt", "one word"),
    Case("/detokenize", "tokens", "numbers"),
    Case("/v1/score", "items", "texts"),
    Case("/v1/completions", "prompt", "numbers"),
    Case("/v1/completions", "prompt", "texts"),
    Case("/v1/completions", "prompt", "empty objects"),
    Case("/separate_reasoning", "text", "text"),
    Case("/parse_function_call", "text", "escapes"),
    Case("/v1/messages/batches", "requests", "escapes"),
    Case(CHAT, "response_format", "schema"),
    *(Case(CHAT, field, "text") for field in ("regex", "stop")),
    Case(CHAT, "tools", "tools"),
    Case(CHAT, "logit_bias", "ids with a bias"),
]
MORE = [
    *(Case(path, "messages", "parts") for path in (CHAT, MESSAGES, "/v1/messages/count_tokens")),
    Case("/v1/messages/count_tokens", "messages", "messages"),
    *(Case(RESPONSES, "input", shape) for shape in ("text", "messages", "parts")),
    *(Case("/tokenize", "prompt", shape) for shape in ("text", "escapes")),
    *(Case("/v1/responses/input_tokens", "input", shape) for shape in ("messages", "items")),
    Case("/v1/responses/compact", "input", "messages"),
    Case("/v1/score", "query", "text"),
    Case("/v1/completions", "prompt", "text"),
    Case("/generate", "text", "text"),
    *(Case(CHAT, field, "schema") for field in ("json_schema", "chat_template_kwargs")),
    *(Case(CHAT, field, "text") for field in ("ebnf", "stop_regex")),
]


@pytest.fixture(scope="module")
def meter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meter]:
    """A server that looks at prompts of any size, with the parsers of a Qwen3 model."""
    with meter_of(write_model(tmp_path_factory.mktemp("tiny"))) as found:
        yield found
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as `tests/conftest.py` has it, for the files that come after


@pytest.fixture(scope="module")
def document(meter: Meter) -> dict[str, Any]:
    found: dict[str, Any] = meter.harness.get("/openapi.json").json()
    return found


def check_memory(case: Case, found: Memory) -> str | None:
    """Say what is wrong with the memory that a case takes."""
    if found.peak_bytes <= 10 * found.num_bytes + SPARE_BYTES:
        return None
    return f"{case}: {found.ratio:.1f} times {found.num_bytes} bytes in memory"


def test_fields_cost_in_proportion_to_their_size(meter: Meter, document: dict[str, Any]) -> None:
    """Some fields of the bodies, with one of the shapes each."""
    assert not [
        found for case in cases(fields_of(document))[::SAMPLE] if (found := wrong_with(meter, case)) is not None
    ]


@pytest.mark.first(8)
@pytest.mark.parametrize("case", [*HEAVY, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)], ids=str)
def test_what_is_rendered_and_translated_costs_in_proportion(meter: Meter, case: Case) -> None:
    """Conversations, tools, schemas and texts that get as far as they can."""
    assert not wrong_with(meter, case)
    assert not check_memory(case, meter.memory(case.path, case.body(MIB // 2)))


def test_the_server_itself_holds_little_of_a_body(meter: Meter) -> None:
    """It passes it on."""
    case = Case("/v1/completions", "prompt", "numbers")
    body = case.body(BIG)
    assert meter.server_memory(case.path, body) < 3 * len(body)
