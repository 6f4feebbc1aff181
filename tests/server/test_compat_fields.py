"""Fields of SGLang's and vLLM's requests that are implemented here under the same names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from exchanges import error_of, events
from harness import Harness

from dovetail.text.tokenizer.cuts import KnownPieces

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def chat(harness: Harness, **fields: Any) -> dict[str, Any]:
    reply = harness.post(CHAT, {"messages": USER, **fields})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def prompt_of(harness: Harness) -> str:
    return harness.tokenizer.decode(harness.engine.submits[-1].prompt_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, {"messages": USER}, "max_tokens"),
        (CHAT, {"messages": USER}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "hi"}, "max_tokens"),
    ],
)
def test_no_output_reads_the_prompt_alone(harness: Harness, path: str, body: dict[str, Any], name: str) -> None:
    """A limit of 0 answers nothing, whole and as a stream, and counts nothing."""
    found = harness.post(path, {**body, name: 0}).json()
    [choice] = found["choices"]
    assert (choice.get("text", choice.get("message", {}).get("content")) or "") == ""
    assert (choice["finish_reason"], found["usage"]["completion_tokens"]) == ("length", 0)
    assert found["usage"]["prompt_tokens"] == len(harness.engine.submits[-1].prompt_ids)
    chunks = events(harness.post(path, {**body, name: 0, "stream": True}))
    assert "".join(c.get("text", c.get("delta", {}).get("content") or "") for k in chunks for c in k["choices"]) == ""


def test_a_prompt_is_scored_by_generate(harness: Harness) -> None:
    """`max_new_tokens: 0` gives the prompt's log probabilities, as evaluators ask for them."""
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    found = harness.post("/generate", body).json()
    assert (found["text"], found["output_ids"]) == ("", [])
    assert found["meta_info"]["completion_tokens"] == 0
    assert len(found["meta_info"]["input_token_logprobs"]) == 5
    assert found["meta_info"]["output_token_logprobs"] == []


def test_a_prompt_is_cut_where_the_request_says(harness: Harness) -> None:
    """`truncate_prompt_tokens` keeps the last tokens, or with `truncation_side: right` the first."""
    for fields, kept in (
        ({"truncate_prompt_tokens": 3}, "def"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 99}, "abcdef"),
        ({"truncate_prompt_tokens": -1}, "abcdef"),
    ):
        assert harness.post("/v1/completions", {"prompt": "abcdef", **fields}).status_code == 200
        assert prompt_of(harness) == kept
    context = harness.state.text.limits.context_len
    long = {"prompt": "x" * (context + 50), "max_tokens": 10}
    assert error_of(harness.post("/v1/completions", long))["code"] == "context_length_exceeded"
    assert harness.post("/v1/completions", {**long, "truncate_prompt_tokens": -1}).status_code == 200
    assert len(harness.engine.submits[-1].prompt_ids) == context - 10
    chat(harness, truncate_prompt_tokens=4)
    assert len(harness.engine.submits[-1].prompt_ids) == 4
    echo = harness.post("/v1/completions", {"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True}).json()
    assert echo["choices"][0]["text"].startswith("ef")


def test_a_chat_prompt_may_come_as_tokens(thinking: Harness) -> None:
    """`input_ids` takes the place of the rendered messages; whether thinking has begun is read off it."""
    ids = thinking.tokenizer.encode("<|im_start|>assistant\n<think>\n", add_special_tokens=False)
    thinking.text = "hm</think>Yes"
    message = chat(thinking, input_ids=ids)["choices"][0]["message"]
    assert thinking.engine.submits[-1].prompt_ids == ids
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes")
    error = error_of(thinking.post(CHAT, {"messages": USER, "input_ids": [10**6]}))
    assert (error["param"], error["code"]) == ("input_ids", "invalid_token_id")


def test_thinking_has_the_peers_names(thinking: Harness) -> None:
    """`thinking` switches it, `thinking_token_budget` bounds it; two that disagree are refused."""
    chat(thinking, thinking={"type": "disabled"})
    assert prompt_of(thinking).endswith("</think>\n\n")
    chat(thinking, thinking={"type": "enabled"}, reasoning_effort="high")
    assert "</think>" not in prompt_of(thinking)
    error = error_of(
        thinking.post(CHAT, {"messages": USER, "thinking": {"type": "enabled"}, "reasoning_effort": "none"})
    )
    assert error["param"] == "thinking"
    chat(thinking, thinking_token_budget=5)
    assert thinking.engine.submits[-1].thinking.budget == 5  # type: ignore[union-attr]
    error = error_of(thinking.post(CHAT, {"messages": USER, "thinking_token_budget": 5, "thinking_budget": 6}))
    assert "one setting" in error["message"]


def test_log_probabilities_may_name_tokens_by_id(harness: Harness) -> None:
    """`return_tokens_as_token_ids` is for tokens that are no text of their own."""
    first = harness.tokenizer.encode("H", add_special_tokens=False)[0]
    fields = {"return_tokens_as_token_ids": True}
    content = chat(harness, logprobs=True, **fields)["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == f"token_id:{first}"
    found = harness.post("/v1/completions", {"prompt": "a", "logprobs": 1, **fields}).json()["choices"][0]["logprobs"]
    assert found["tokens"][0] == f"token_id:{first}"


def test_extra_key_is_another_name_of_cache_salt(harness: Harness) -> None:
    """SGLang's name keeps prefixes apart, too."""
    chat(harness, extra_key="a")
    assert harness.engine.submits[-1].cache_salt == "a"
    harness.post("/generate", {"text": "a", "extra_key": "b"})
    assert harness.engine.submits[-1].cache_salt == "b"
    assert (
        "one setting"
        in error_of(harness.post("/generate", {"text": "a", "extra_key": "b", "cache_salt": "c"}))["message"]
    )


@pytest.mark.parametrize("salt", ["cache_salt", "extra_key", None])
def test_a_salt_keeps_a_text_out_of_what_is_kept_of_texts(
    make_harness: Callable[..., Harness], salt: str | None
) -> None:
    """How long tokenizing takes tells nothing of other texts, nor others of this one."""
    harness = make_harness(context_len=1 << 15)
    harness.tokenizer._cuts = re.compile("s(?= )")  # this one's texts are never cut
    fields = {} if salt is None else {salt: "mine"}
    for num, (path, body) in enumerate(
        (
            ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
            ("/v1/completions", lambda text: {"prompt": text, "max_tokens": 1}),
            ("/generate", lambda text: {"text": text, "sampling_params": {"max_new_tokens": 1}}),
        )
    ):
        known = harness.tokenizer._known = KnownPieces()
        answer = harness.post(path, {**body(f"all {num} words " * 1000), **fields})
        assert answer.status_code == 200, answer.text
        assert bool(known._young) is (salt is None)


def test_a_forced_call_goes_beside_a_response_format(thinking: Harness) -> None:
    """The call is what comes, constrained by its own schema; the format would have been the content's."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": USER, "tools": [tool], "tool_choice": "required", "response_format": schema}
    reply = thinking.post(CHAT, body)
    assert "both constrain" not in reply.text


def test_verbosity_reaches_the_template(harness: Harness) -> None:
    """It is a variable of the chat template; what is none of the three words is refused."""
    assert chat(harness, verbosity="low")["choices"]
    assert (
        harness.post("/v1/responses", {"input": "a", "text": {"verbosity": "low"}}).json()["text"]["verbosity"] == "low"
    )
    assert error_of(harness.post(CHAT, {"messages": USER, "verbosity": "loud"}))["param"] == "verbosity"


def test_what_published_tests_send_is_taken(harness: Harness) -> None:
    """Limits of 0, an absent input, callers of a tool, a list of stored completions."""
    for path in ("/v1/files", "/v1/batches"):
        assert harness.get(f"{path}?limit=0").json()["data"] == []
    assert harness.post("/v1/responses", {}).json()["status"] == "completed"
    assert harness.get(CHAT).json()["object"] == "list"
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "allowed_callers": ["direct"]}
    reply = harness.post("/v1/responses", {"input": "a", "tools": [tool], "tool_choice": "none"})
    assert reply.status_code == 200, reply.text
    assert harness.post("/v1/completions", {"prompt": "a", "best_of": 0}).status_code == 200


def test_several_texts_are_tokenized_at_once(harness: Harness) -> None:
    """Lists give lists, with each token's text if asked; what is decoded comes back."""
    found = harness.post("/v1/tokenize", {"prompt": ["ab", "c"], "return_token_strs": True}).json()
    assert (found["count"], found["token_strs"]) == ([2, 1], [["a", "b"], ["c"]])
    assert harness.post("/v1/detokenize", {"tokens": found["tokens"]}).json()["text"] == ["ab", "c"]
    whole = harness.post("/tokenize", {"messages": [*USER, {"role": "assistant", "content": "So"}]}).json()["count"]
    going = {"messages": [*USER, {"role": "assistant", "content": "So"}], "continue_final_message": True}
    assert harness.post("/tokenize", {**going, "add_generation_prompt": False}).json()["count"] < whole
    info = harness.get("/tokenizer_info").json()
    assert info["vocab_size"] == harness.tokenizer.vocab_size
    assert "im_start" in info["chat_template"]


def test_the_payloads_of_sglangs_frontend(harness: Harness) -> None:
    """`sgl.select` measures the prompt, then scores every choice from just before it; `fork` fills the cache."""
    whole = {"text": "Is it ", "sampling_params": {"max_new_tokens": 0}}
    meta = harness.post("/generate", whole).json()["meta_info"]
    choices = {
        "text": ["Is it yes", "Is it no"],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "return_text_in_logprobs": True,
        "logprob_start_len": max(meta["prompt_tokens"] - 2, 0),
    }
    rows = [found["meta_info"]["input_token_logprobs"] for found in harness.post("/generate", choices).json()]
    assert [row[-1][2] for row in rows] == ["s", "o"]
    assert [len(row) for row in rows] == [5, 4]
    given = {
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "max_new_tokens": 4,
        "stop": [],
        "n": 1,
    }
    sampling = {**given, "top_k": -1, "min_p": 0.0, "ignore_eos": False, "regex": None, "json_schema": None}
    assert harness.post("/generate", {"text": "a", "sampling_params": sampling, "session_id": "s"}).json()["text"]


def test_the_payloads_of_sglangs_benchmark(harness: Harness) -> None:
    """`bench_serving` sends these to /generate and to /v1/completions."""
    native = {
        "text": "hi", "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}, "stream": True,
        "lora_path": None, "return_logprob": False, "return_routed_experts": False, "logprob_start_len": -1,
    }  # fmt: skip
    assert events(harness.post("/generate", native))[-1]["meta_info"]["completion_tokens"] > 0
    body = {"model": "tiny", "prompt": "hi", "best_of": 1, "max_tokens": 4, "stream": True, "temperature": 0.0}
    assert events(harness.post("/v1/completions", {**body, "ignore_eos": True}))


def test_how_a_stream_would_be_written_says_nothing_of_a_whole_reply(harness: Harness) -> None:
    """Clients that always send `stream_options` are answered; the options are for streams."""
    options = {"stream_options": {"include_usage": True}, "stream": False}
    assert chat(harness, **options)["usage"]["total_tokens"] > 0
    assert harness.post("/v1/completions", {"prompt": "a", **options}).status_code == 200
    include = {"stream_options": {"include_obfuscation": True}}
    assert harness.post("/v1/responses", {"input": "a", **include}).status_code == 200


def test_what_a_tool_of_a_response_says_of_itself_is_taken(harness: Harness) -> None:
    """`async: false` asks for nothing; what a tool gives back reaches the template with the rest of it."""
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "output_schema": schema}
    body = {"input": "a", "tools": [{**tool, "async": False, "defer_loading": False}], "tool_choice": "none"}
    found = harness.post("/v1/responses", {**body, "reasoning": {"mode": "standard"}}).json()
    assert found["tools"][0]["output_schema"] == schema
