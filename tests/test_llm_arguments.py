"""Arguments of another form: every call of `LLM` refuses them by name, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import RequestError

ONE = SamplingParams(temperature=0, max_tokens=1)
QUIET: dict[str, Any] = {"use_tqdm": False}
HELLO = {"role": "user", "content": "Hello"}
FORMS = "text, token ids, or a mapping with 'prompt' or 'prompt_token_ids'"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The demo model."""
    with LLM(max_total_tokens=16384) as model:
        yield model


@pytest.fixture(scope="module")
def comparing() -> Iterator[LLM]:
    """The demo model as one whose vectors are compared."""
    with LLM(max_total_tokens=16384, task="embed") as model:
        yield model


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (None, "prompts is of type NoneType"),
        (5, "prompts is of type int"),
        (b"text", "prompts is of type bytes"),
        (iter(["text"]), "prompts is of type list_iterator"),
        ({"text"}, "prompts is of type set"),
        (np.array(5), "prompts is of type ndarray"),
        (["fine", None], "prompt 1 is of type NoneType"),
        (["fine", b"text"], "prompt 1 is of type bytes"),
        ([1, None], "prompt 0 is of type list and has None at 1"),
        ([[1], [2, True]], "prompt 1 is of type list and has True at 1"),
        ({"prompt_token_ids": b"text"}, "prompt 0 is of type bytes"),
    ],
)
def test_a_prompt_of_another_form_is_refused(llm: LLM, prompts: Any, said: str) -> None:
    """By its place, with the forms that there are; these ended in Python's own errors, or bytes were taken for ids."""
    for call in (lambda: llm.generate(prompts, ONE, **QUIET), lambda: llm.embed(prompts, **QUIET)):
        with pytest.raises(RequestError) as error:
            call()
        assert said in str(error.value)
        assert f"; give {FORMS}" in str(error.value)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([[]], "prompt 0: it is empty; give at least one token"),
        ([-1], "prompt 0: prompt holds token id -1, but this model's ids go from 0 to 4095"),
        ([1 << 70], "but this model's ids go from 0 to 4095"),
        ({"prompt_token_ids": "text"}, "prompt 0 has text as 'prompt_token_ids'; give token ids, or 'prompt'"),
    ],
)
def test_ids_that_are_none_of_the_model_are_refused(llm: LLM, prompts: Any, said: str) -> None:
    """By the prompt's place, with the ids that there are."""
    with pytest.raises(RequestError) as error:
        llm.generate(prompts, ONE, **QUIET)
    assert said in str(error.value)


def test_no_prompts_give_no_replies(llm: LLM) -> None:
    """An empty list is a batch of none; a list of NumPy's numbers is one prompt."""
    assert llm.generate([], ONE, **QUIET) == []
    assert llm.chat([], ONE, **QUIET) == []
    [reply] = llm.generate([np.int64(3), np.int64(4)], ONE, **QUIET)
    assert reply.prompt_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("conversations", "said"),
    [
        (None, "conversations is of type NoneType; give a list of messages, such as"),
        ("Hello", "conversations is of type str; give a list of messages, such as"),
        (HELLO, "conversations is of type dict; give a list of messages, such as"),
        ([None], "prompt 0: messages is of type NoneType; give a list of messages, such as"),
        ([[HELLO], HELLO], "prompt 1: messages is of type dict; give a list of messages, such as"),
        ([[HELLO], []], "prompt 1: messages is empty; give at least one message"),
        ([HELLO, "Hello"], "prompt 0: messages[1] is of type str; give a mapping with 'role' and 'content'"),
        ([{"content": "Hello"}], "prompt 0: messages[0]: object missing required field `role`"),
        ([{"role": "user", "content": 5}], "prompt 0: messages[0].content: expected `str | object | array | null`"),
        ([{"role": "user", "content": [5]}], "prompt 0: messages[0].content[0]: expected `str | object`, got `int`"),
        ([{"role": "user", "content": [{"text": 5}]}], "prompt 0: a text part needs a string in `text`"),
        ([{"role": "assistant", "tool_calls": 5}], "prompt 0: messages[0].tool_calls: expected `array | null`"),
        ([{"role": "assistant", "tool_calls": [{"function": 5}]}], "function of a tool call must be an object"),
    ],
)
def test_a_conversation_of_another_form_is_refused(llm: LLM, conversations: Any, said: str) -> None:
    """By the place of the conversation, the message and the part."""
    with pytest.raises(RequestError) as error:
        llm.chat(conversations, ONE, **QUIET)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("tools", value) for value in (5, "get_weather", {})),
        *(("documents", value) for value in (5, "text", [None])),
        *(("chat_template_kwargs", value) for value in (5, "text", [1], {1: 2})),
        *((name, "no") for name in ("parallel_tool_calls", "add_generation_prompt", "separate_reasoning")),
        ("continue_final_message", 0),
        ("tool_choice", []),
        ("params", 5),
        ("params", [{"max_tokens": 3}]),
    ],
)
def test_an_argument_of_another_type_is_refused(llm: LLM, name: str, value: Any) -> None:
    """Naming it: they were Python's own errors, or were taken for true."""
    with pytest.raises(RequestError, match=f"^{name}"):
        llm.chat([HELLO], **{"params": ONE, **QUIET, name: value})


def test_messages_of_clients_are_read(llm: LLM) -> None:
    """A reply that a client's library gave goes back as it is."""

    class ClientMessage(BaseModel):
        role: str = "assistant"
        content: str = "Hi"
        tool_calls: list[int] | None = None

    given: list[Any] = [{"role": "assistant", "content": "Hi"}, ClientMessage()]
    plain, same = (llm.chat([HELLO, reply, HELLO], ONE, **QUIET)[0] for reply in given)
    assert plain.prompt_token_ids == same.prompt_token_ids


def test_parameters_may_be_the_models_own_for_some(llm: LLM) -> None:
    """None among the parameters is what None for all is."""
    first, second = llm.generate(["a", "b"], [None, ONE], **QUIET)
    assert len(first.token_ids) > len(second.token_ids) == 1


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("logit_bias", {1: math.nan}, "logit_bias must hold numbers from -1e+09 to 1e+09, not nan"),
        ("logit_bias", {1: math.inf}, "logit_bias must hold numbers from -1e+09 to 1e+09, not inf"),
        ("bad_words", [""], "bad_words must hold texts of 1 to 4096 characters"),
        ("stop_token_ids", [1] * 257, "stop_token_ids has 257 values; possible are up to 256"),
        ("stop_token_ids", "\ud800", "stop_token_ids has text with half of a surrogate pair"),
        ("stop", ["\ud800"], "stop has text with half of a surrogate pair"),
    ],
)
def test_parameters_have_the_bounds_of_a_body(field: str, value: Any, said: str) -> None:
    """A bias that was no number counted as 100, and an empty word was passed over."""
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    assert said in str(error.value)


@pytest.mark.parametrize("output_type", [{}, {"max_tokens": 3}, 5, [b"text"], [math.nan]])
def test_what_is_no_output_type_is_refused(llm: LLM, output_type: Any) -> None:
    """With what it may be: pydantic took mappings for schemas of its core."""
    with pytest.raises(RequestError, match=r"^prompt 0: output_type"):
        llm.generate("a", SamplingParams(output_type=output_type), **QUIET)
    with pytest.raises(RequestError, match=r"^prompt 0: grammar_backend: expected `str \| null`"):
        llm.generate("a", SamplingParams(regex="a", grammar_backend=np.array([1, 2])), **QUIET)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "given", "said"),
    [
        ("score", {"data_1": None}, "data_1 is of type NoneType; give a text, or a list of texts"),
        ("score", {"data_2": ["b", 5]}, "data_2[1] is of type int; give a text"),
        ("score", {"data_2": {"x", "y"}}, "data_2 is of type set; give a text, or a list of texts"),
        ("score", {"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens must be a whole number, not 1.5"),
        ("score", {"truncate_prompt_tokens": -5}, "truncate_prompt_tokens must be from -1 to"),
        ("score", {"use_activation": "no"}, "use_activation: expected `bool`"),
        ("rerank", {"query": None}, "query: expected `str`, got `null`"),
        ("rerank", {"documents": b"text"}, "documents is of type bytes; give a text, or a list of texts"),
        ("rerank", {"top_n": -1}, "top_n must be from 0 to"),
        ("rerank", {"top_n": "2"}, "top_n must be a whole number, not '2'"),
        ("rerank", {"instruct": 5}, "instruct: expected `str | null`"),
        ("embed", {"dimensions": 1.5}, "dimensions: expected `int | null`"),
        ("embed", {"normalize": "no"}, "normalize: expected `bool | null`"),
    ],
)
def test_what_cannot_be_compared_is_refused(comparing: LLM, call: str, given: Any, said: str) -> None:
    """By its name and place."""
    fine = {
        "score": {"data_1": "a", "data_2": "b"},
        "rerank": {"query": "a", "documents": ["b", "c"]},
        "embed": {"prompts": "a"},
    }
    with pytest.raises(RequestError) as error:
        getattr(comparing, call)(**{**fine[call], **given, **QUIET})
    assert said in str(error.value)


def test_a_document_alone_comes_back_whole(comparing: LLM) -> None:
    """A text that is no list is one document: its first letter came back."""
    [found] = comparing.rerank("a", "a document", **QUIET)
    assert found.document == "a document"
