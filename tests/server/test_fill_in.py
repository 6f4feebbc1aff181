"""`suffix` of `/v1/completions`: filling in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from exchanges import error_of, events
from harness import Harness
from server_tiny import write_model

from dovetail.text.tokenizer.fill_in import FORMS, Infill

URL = "/v1/completions"
QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>"]


@pytest.fixture(scope="module")
def coder_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    running = Harness(write_model(tmp_path_factory.mktemp("coder"), more=QWEN))
    yield running
    running.close()


@pytest.fixture
def coder(coder_server: Harness) -> Harness:
    """A server whose tokenizer has Qwen-Coder's tokens."""
    coder_server.reset()
    return coder_server


def asked(harness: Harness) -> list[str]:
    return [harness.tokenizer.decode(s.prompt_ids, skip_special_tokens=False) for s in harness.engine.submits]


@pytest.mark.parametrize("prompt", ["def f(", ["def f(", "x ="], [64, 65], [[64], [65, 66]]])
def test_the_model_is_asked_for_what_stands_between(coder: Harness, prompt: Any) -> None:
    """Whatever form the prompt has; the reply is the middle alone, and its tokens count as they were sent."""
    reply = coder.post(URL, {"prompt": prompt, "suffix": "\n    return x"})
    assert reply.status_code == 200, reply.text
    items = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    texts = [i if isinstance(i, str) else coder.tokenizer.decode(i, skip_special_tokens=False) for i in items]
    assert asked(coder) == [f"<|fim_prefix|>{t}<|fim_suffix|>\n    return x<|fim_middle|>" for t in texts]
    assert [choice["text"] for choice in reply.json()["choices"]] == ["Hello, world"] * len(items)
    assert reply.json()["usage"]["prompt_tokens"] == sum(len(s.prompt_ids) for s in coder.engine.submits)
    for submit in coder.engine.submits:
        assert submit.prompt_ids.count(coder.tokenizer.added_tokens["<|fim_middle|>"]) == 1


def test_the_middle_ends_where_another_file_begins(coder: Harness) -> None:
    """Such a token ends it as a stop token does; the request's own stay."""
    coder.text = "a + b<|file_sep|>import os"
    body = {"prompt": "x = ", "suffix": "\n", "stop_token_ids": [1], "max_tokens": 40}
    assert coder.post(URL, body).json()["choices"][0]["text"] == "a + b"
    streamed = events(coder.post(URL, {**body, "stream": True}))
    assert "".join(choice["text"] for chunk in streamed for choice in chunk["choices"]) == "a + b"
    stops = coder.engine.submits[0].params.stop_token_ids
    assert set(stops) == {1, *(coder.tokenizer.added_tokens[name] for name in QWEN)}


def test_echo_shows_what_stood_before(coder: Harness) -> None:
    """Not the markers, nor what stands behind."""
    for prompt in ("x = ", coder.tokenizer.encode("x = ", add_special_tokens=False)):
        found = coder.post(URL, {"prompt": prompt, "suffix": "y", "echo": True}).json()
        assert found["choices"][0]["text"] == "x = Hello, world"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"prompt": [10**6]}, "prompt"),
        ({"suffix": "x" * 600}, "prompt"),
        ({"prompt": [1], "suffix": "x" * 10**6}, "suffix"),
    ],
)
def test_what_does_not_go_with_it_is_refused(coder: Harness, fields: dict[str, Any], param: str) -> None:
    """The error names the field; nothing reaches the engine."""
    reply = coder.post(URL, {"prompt": "a", "suffix": "b", **fields})
    assert (reply.status_code, error_of(reply)["param"]) == (400, param)
    assert coder.engine.submits == []


def test_a_model_without_such_tokens_says_so(harness: Harness) -> None:
    """An empty suffix asks for nothing."""
    error = error_of(harness.post(URL, {"prompt": "a", "suffix": "b"}))
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    assert "<|fim_prefix|>" in error["message"]
    assert harness.post(URL, {"prompt": "a", "suffix": ""}).status_code == 200


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[0])
def test_each_family_has_its_own_markers(form: tuple[str, str, str, bool]) -> None:
    """All are needed; what stands behind goes first where the family has it so."""
    markers = [marker for marker in form[:3] if marker]
    found = Infill.of_tokens({marker: at for at, marker in enumerate(markers)})
    assert found is not None
    assert found.stop_ids == tuple(range(len(markers)))
    text, parts = found.text("BEFORE", "AFTER"), (form[0] + "BEFORE", form[1] + "AFTER")
    assert text == "".join(reversed(parts) if form[3] else parts) + form[2]
    encode = lambda part: [ord(c) for c in part]  # noqa: E731
    assert found.ids(encode("BEFORE"), "AFTER", encode) == encode(text)
    assert Infill.of_tokens({marker: at for at, marker in enumerate(markers[1:])}) is None
