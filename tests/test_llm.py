"""The offline `LLM`, on the demo model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError, RequestError
from dovetail.processing.bounds import MAX_TOOL_NAME
from dovetail.processing.sampling import check_token_ids

GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The demo model with its parsers."""
    with LLM(max_total_tokens=16384) as model:  # the parsers are found out
        yield model


def ask(question: str) -> list[dict[str, str]]:
    """A conversation of one question."""
    return [{"role": "user", "content": question}]


def test_chat_answers_in_the_order_of_the_conversations(llm: LLM) -> None:
    """A batch of conversations comes back in order, each with its own answer."""
    cities = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome"}
    replies = llm.chat([ask(f"What is the capital of {country}?") for country in cities], GREEDY, use_tqdm=False)
    assert [r.prompt_index for r in replies] == [0, 1, 2]
    for city, reply in zip(cities.values(), replies, strict=True):
        assert city in reply.text
        assert reply.finish_reason == "stop"


def test_reasoning_is_split_off(llm: LLM) -> None:
    """With thinking enabled the reasoning is apart from the answer; without it there is none."""
    [on] = llm.chat(
        ask("What is 2^8?"),
        SamplingParams(temperature=0, max_tokens=300),
        chat_template_kwargs={"enable_thinking": True},
    )
    assert on.reasoning
    assert "256" in on.text
    [off] = llm.chat(ask("What is 2^8?"), GREEDY)
    assert off.reasoning is None
    assert "256" in off.text


def test_generate_takes_text_and_ids(llm: LLM) -> None:
    """A string and its token ids give the same continuation; a list of strings is a batch."""
    text = "The capital of France is"
    [by_text] = llm.generate(text, GREEDY)
    [by_ids] = llm.generate(llm.tokenizer.encode(text, add_special_tokens=True), GREEDY)
    assert by_text.token_ids == by_ids.token_ids
    assert "Paris" in by_text.text
    assert len(llm.generate([text, text], GREEDY)) == 2


def test_prompts_may_be_mappings(llm: LLM) -> None:
    """Text and ids as vLLM's clients give them, one or many; what is neither is named with its place."""
    params = SamplingParams(max_tokens=4, temperature=0)
    ids = llm.tokenizer.encode("Paris is", add_special_tokens=True)
    want = llm.generate("Paris is", params)[0].text
    given: list[Any] = [
        {"prompt": "Paris is"},
        {"prompt_token_ids": ids},
        {"prompt": "x", "prompt_token_ids": tuple(ids)},
    ]
    assert [reply.text for reply in llm.generate([*given, np.array(ids)], params)] == [want] * 4
    assert llm.generate(given[0], params)[0].text == want
    for wrong, part in (({}, "is empty"), ({"prompt": "a", "multi_modal_data": 1}, "multi_modal_data"), (1.5, "float"),
                        (["a"], "list"), ([1.0], "list"), (None, "NoneType")):  # fmt: skip
        with pytest.raises(RequestError, match=part) as error:
            llm.generate(["fine", wrong], params)
        assert "prompt 1" in str(error.value)


def test_a_stop_expression_ends_the_reply_and_is_cut(llm: LLM) -> None:
    """The text ends before the first match, which is reported; what is no expression is refused at once."""
    [reply] = llm.generate("The capital of France is", SamplingParams(temperature=0, stop_regex="Par.s"))
    assert reply.text.strip() == ""
    assert (reply.finish_reason, reply.matched_stop) == ("stop", "Paris")
    with pytest.raises(RequestError, match="stop_regex"):
        SamplingParams(stop_regex=["fine", "(not"])


def test_a_stop_expression_that_takes_too_long_ends_one_reply(llm: LLM) -> None:
    """The reply says why; the others are as they would be without it."""
    endless = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, stop_regex=r"(?s)(?:.|.|..)+(?:.|..)+\Z.")
    [alone] = llm.generate(["The capital of France is"], GREEDY)
    failed, other = llm.generate(["Once upon a time", "The capital of France is"], [endless, GREEDY])
    assert failed.finish_reason == "abort"
    assert failed.message is not None
    assert "stop_regex" in failed.message
    assert (other.text, other.finish_reason) == (alone.text, alone.finish_reason)


def test_a_stop_string_ends_the_reply_and_is_cut(llm: LLM) -> None:
    """The text ends before the stop string, which is reported."""
    [reply] = llm.generate("The capital of France is", SamplingParams(temperature=0, stop=["Paris"]))
    assert "Paris" not in reply.text
    assert (reply.finish_reason, reply.matched_stop) == ("stop", "Paris")


def test_n_replies_differ_and_repeat_with_a_seed(llm: LLM) -> None:
    """`n` seeded replies are distinct and the same in the next call."""
    params = SamplingParams(temperature=8.0, seed=3, n=4, max_tokens=20)
    first, second = (llm.generate("Once upon a time", params) for _ in range(2))
    assert [r.token_ids for r in first] == [r.token_ids for r in second]
    assert len({tuple(r.token_ids) for r in first}) > 1


def test_a_hundred_prompts_run_at_once(llm: LLM) -> None:
    """More prompts than running requests are served in one call."""
    replies = llm.generate([f"{i} plus" for i in range(100)], SamplingParams(temperature=0, max_tokens=4))
    assert [r.prompt_index for r in replies] == list(range(100))


def test_it_works_inside_a_running_event_loop(llm: LLM) -> None:
    """A caller with an event loop of its own, such as a notebook, can use it."""

    async def main() -> str:
        return llm.chat(ask("What is the capital of France?"), GREEDY)[0].text

    assert "Paris" in asyncio.run(main())


def test_mistakes_are_named(llm: LLM) -> None:
    """Bad parameters, ids and lengths raise errors that say what is possible."""
    with pytest.raises(RequestError, match="temperature must be from 0"):
        SamplingParams(temperature=-1)
    with pytest.raises(RequestError, match="token id 999999"):
        llm.generate([[1, 999999]], GREEDY)
    with pytest.raises(RequestError, match="prompt 0: the prompt has 5000 tokens, which is longer"):
        llm.generate([[1] * 5000], GREEDY)
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate("a", [GREEDY, GREEDY])
    with pytest.raises(ConfigError, match="no such folder"):
        LLM("does/not/exist")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("allowed_token_ids", [1.5], r"allowed_token_ids\[0\]: expected `int`, got `float`"),
        ("stop_token_ids", ["a"], r"stop_token_ids\[0\]: expected `int`, got `str`"),
        ("stop", 5, "stop: expected `str | array | null`, got `int`"),
        ("bad_words", "Paris", "bad_words: expected `array | null`, got `str`"),
        ("logit_bias", {1: "x"}, "logit_bias.*: expected `float`, got `str`"),
        ("logits_processors", [1], "logits_processors: expected `object | null`, got `array`"),
        ("include_stop_str_in_output", "x", "include_stop_str_in_output: expected `bool | null`, got `str`"),
    ],
)
def test_a_field_of_another_type_is_named(field: str, value: Any, said: str) -> None:
    """Such an id reached the engine, which ended of it."""
    with pytest.raises(RequestError, match=said):
        SamplingParams(**{field: value})


def test_numbers_of_numpy_and_sets_are_read(llm: LLM) -> None:
    """As Python's own numbers and lists."""
    given: Any = {"temperature": np.float32(0), "max_tokens": np.int64(3), "logprobs": 0}
    allowed: Any = {"allowed_token_ids": {100, 200}, "logprob_token_ids": np.array([100])}
    [reply] = llm.generate("a", SamplingParams(**given, **allowed))
    [same] = llm.generate("a", SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=[100, 200]))
    assert reply.token_ids == same.token_ids
    with pytest.raises(RequestError, match=r"prompt 0: logprob_token_ids\[0\]: expected `int`"):
        llm.generate("a", SamplingParams(logprobs=1, logprob_token_ids=[1.5]))  # type: ignore[list-item]


def test_an_id_that_is_no_whole_number_is_none_of_the_model() -> None:
    """Whoever has read the request: a plugin's API does that itself."""
    for ids in ([1, 1.5], ["a"], [None]):
        with pytest.raises(RequestError, match=r"token id (1\.5|'a'|None), but this model's ids go from 0 to 9"):
            check_token_ids(ids, 10, "ids")  # type: ignore[arg-type]
    check_token_ids([np.int64(1), 9], 10, "ids")


def test_a_closed_llm_says_so() -> None:
    """After `close`, calls raise; closing again is harmless."""
    llm = LLM(max_total_tokens=1024)
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="was closed"):
        llm.generate("a", GREEDY)


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_tool_choice_is_kept(llm: LLM) -> None:
    """Required and named calls are made in the model's own format; with `none` the model sees no tools."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        [reply] = llm.chat(ask("hello"), GREEDY, tools=[TOOL], tool_choice=choice, use_tqdm=False)
        assert [call.name for call in reply.tool_calls][:1] == ["get_weather"]
        assert set(json.loads(reply.tool_calls[0].arguments)) == {"city"}
    [reply] = llm.chat(ask("hello"), GREEDY, tools=[TOOL], tool_choice="none", use_tqdm=False)
    assert reply.tool_calls == ()
    with pytest.raises(RequestError, match="tool_choice needs tools"):
        llm.chat(ask("hello"), GREEDY, tool_choice="required")
    with pytest.raises(RequestError, match="tool_choice must be"):
        llm.chat(ask("hello"), GREEDY, tools=[TOOL], tool_choice="maybe")


def test_thinking_is_switched_counted_and_shown(llm: LLM) -> None:
    """`reasoning_effort` sets the template's switch; not separated, the thought stands in the text as written."""
    params = SamplingParams(temperature=0, max_tokens=300)
    [on] = llm.chat(ask("What is 2^8?"), params, reasoning_effort="high", use_tqdm=False)
    assert on.reasoning
    assert 0 < on.reasoning_tokens < len(on.token_ids)
    [whole] = llm.chat(ask("What is 2^8?"), params, reasoning_effort="high", separate_reasoning=False, use_tqdm=False)
    assert whole.reasoning is None
    assert whole.text.startswith("<think>")
    assert on.text in whole.text
    [off] = llm.chat(ask("What is 2^8?"), params, reasoning_effort="none", use_tqdm=False)
    assert (off.reasoning, off.reasoning_tokens) == (None, 0)


def test_a_reply_is_continued(llm: LLM) -> None:
    """With `continue_final_message` the reply goes on where the last message ends."""
    messages = [*ask("What is the capital of France?"), {"role": "assistant", "content": "The capital of France is"}]
    [reply] = llm.chat(messages, GREEDY, continue_final_message=True, use_tqdm=False)
    assert "Paris" in reply.text
    assert not reply.text.startswith("The capital")


def test_embeddings_are_those_of_transformers(llm: LLM) -> None:
    """The last token's final hidden state at length 1, one a prompt, in order; texts and ids alike."""
    import torch
    from transformers import AutoModel

    from dovetail.demo import MODEL_DIR

    texts = ["What is the capital of France?", "Paris", "x" * 300]
    found = llm.embed(texts, use_tqdm=False)
    model = AutoModel.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    for text, one in zip(texts, found, strict=True):
        assert list(one.prompt_token_ids) == llm.tokenizer.encode(text, add_special_tokens=True)
        with torch.inference_mode():
            state = model(torch.tensor([one.prompt_token_ids])).last_hidden_state[0, -1]
        assert one.embedding == pytest.approx((state / state.norm()).tolist(), abs=1e-2)  # bfloat16
    [again] = llm.embed(list(found[1].prompt_token_ids), normalize=False, use_tqdm=False)
    assert sum(x * x for x in again.embedding) != pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("wrong", ["", [], [10**6], [1] * 10**5])
def test_a_prompt_that_cannot_be_embedded_is_refused(llm: LLM, wrong: str | list[int]) -> None:
    """By its place among the prompts; nothing of the call is computed."""
    with pytest.raises(RequestError, match="prompt 1"):
        llm.embed(["a", wrong], use_tqdm=False)


def test_limits_are_the_last_values_that_are_taken(llm: LLM) -> None:
    """A prompt may fill the context, and a tool's name all of its characters; one more is rejected."""
    most = llm.info.context_len
    assert len(llm.embed([5] * most, use_tqdm=False)[0].prompt_token_ids) == most
    with pytest.raises(RequestError, match=f"possible are 1 to {most}"):
        llm.embed([5] * (most + 1), use_tqdm=False)
    one = SamplingParams(max_tokens=1)
    tool = {"type": "function", "function": {"name": "f" * MAX_TOOL_NAME}}
    llm.chat(ask("hello"), one, tools=[tool], use_tqdm=False)
    tool["function"] = {"name": "f" * (MAX_TOOL_NAME + 1)}
    with pytest.raises(RequestError, match=f"up to {MAX_TOOL_NAME} letters"):
        llm.chat(ask("hello"), one, tools=[tool], use_tqdm=False)
