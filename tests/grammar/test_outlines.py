"""Outlines, the package: `LLM` is one of its models, and its clients of OpenAI, vLLM and SGLang talk to the server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Literal

import openai
import outlines
import pytest
from outlines.inputs import Chat
from outlines.types import CFG, JsonSchema, Regex
from pydantic import BaseModel
from served import Served

from dovetail import LLM
from dovetail.contracts.errors import RequestError

SHORT = {"max_tokens": 60, "seed": 1}
ANNA = Chat([{"role": "user", "content": "Anna is 36 years old. Give the name and age as JSON."}])


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[1, 2]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_total_tokens=16384, device="cpu") as made:
        yield made


def test_a_generator_over_an_llm_is_constrained(llm: LLM) -> None:
    """Types of Outlines and of Python, by `Generator`, by a call, and in batches; texts come back, as Outlines' do."""
    assert outlines.Generator(llm, Literal["left", "right"])("x", **SHORT) in ("left", "right")
    assert re.fullmatch("[0-9]{3}", outlines.Generator(llm, Regex("[0-9]{3}"))("x"))
    assert Person.model_validate_json(outlines.Generator(llm, Person)(ANNA, **SHORT))
    assert json.loads(llm("x", JsonSchema('{"enum": [7]}'), **SHORT)) == 7
    assert llm("x", CFG('start: "a" "b"')) == "ab"
    texts = outlines.Generator(llm, Regex("[ab]{4}")).batch(["x", "y"], **SHORT)
    assert [re.fullmatch("[ab]{4}", text) is not None for text in texts] == [True, True]
    assert len(llm("x", Regex("a|b"), n=3, **SHORT)) == 3


def test_a_generator_streams_and_takes_chats(llm: LLM) -> None:
    """The pieces together are the text; a chat goes through the template."""
    generator = outlines.Generator(llm, Regex("[a-c]{20}"))
    pieces = list(generator.stream("x", **SHORT))
    assert len(pieces) > 1
    assert "".join(pieces) == generator("x", **SHORT)
    chat = Chat([{"role": "user", "content": "What is the capital of France?"}])
    assert outlines.Generator(llm, Literal["Paris", "Rome"])(chat, temperature=0.0) in ("Paris", "Rome")
    for piece in generator.stream("x", **SHORT):
        assert piece
        break  # the request is aborted
    assert "".join(llm.stream(chat, Literal["Paris"])) == "Paris"


def test_what_is_wrong_is_said(llm: LLM) -> None:
    """A parameter that does not exist, a backend for one call, and two sorts of prompts."""
    with pytest.raises(RequestError, match="temprature"):
        llm("x", Person, temprature=1)
    with pytest.raises(RequestError, match="grammar_backend"):
        llm("x", Person, "xgrammar")
    with pytest.raises(RequestError, match="not both"):
        llm.batch(["x", Chat([{"role": "user", "content": "x"}])], Person)


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.base}/v1", api_key="none") as made:
        yield made


@pytest.mark.first(1)
@pytest.mark.parametrize("make", ["from_openai", "from_vllm", "from_sglang"])
def test_outlines_clients_are_served(client: openai.OpenAI, make: str) -> None:
    """Each in its own spelling: a pydantic model everywhere, expressions and grammars where it has words for."""
    model = getattr(outlines, make)(client, "dovetail-demo")
    options = {"max_tokens": 200, "seed": 1, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    assert Person.model_validate_json(model("Who?", Person, **options))
    assert "".join(model.stream("Who?", Person, **options))
    if make != "from_openai":
        assert re.fullmatch("[0-9]{3}", model("A number?", Regex("[0-9]{3}"), **options))
        assert model("Left?", Literal["left", "right"], **options) in ("left", "right")
    if make == "from_vllm":
        assert model("x", CFG('start: "a" "b"'), **options) == "ab"
    if make == "from_sglang":
        with pytest.warns(UserWarning, match="EBNF"):
            assert model("x", CFG('root ::= "a" "b"'), **options) == "ab"
