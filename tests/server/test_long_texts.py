"""A text far beyond the context that cannot be given to the tokenizer in pieces is refused by a look at parts of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Harness
from server_tiny import write_model

from dovetail.contracts.errors import RequestError
from dovetail.processing.processor import MAX_SAMPLE, MORE_TOKENS, SAMPLED, SAMPLES, Processor
from dovetail.text.tokenizer.cuts import cuts_of

CONTEXT = 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """Its tokenizer splits no words, and makes a token of each byte."""
    folder = write_model(tmp_path_factory.mktemp("tiny"))
    harness = Harness(folder, context_len=CONTEXT, max_prompt_bytes=1 << 24)
    yield harness
    harness.close()


@pytest.fixture
def lengths(server: Harness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long the texts were that the tokenizer was given."""
    tokenizer, found = server.state.text.tokenizer, []
    encode = tokenizer.encode

    def noted(text: str, **options: Any) -> list[int]:
        found.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", noted)
    return found


@pytest.mark.parametrize("text", ["a" * 1_000_000, "\u00e9" * 200_000, "some words " * 50_000], ids=["a", "é", "words"])
def test_it_is_never_tokenized_whole(text: str, server: Harness, lengths: list[int]) -> None:
    """Some parts are, a quarter of it at most; the refusal has an estimate of all its tokens."""
    tools: Processor = server.state.text
    assert cuts_of(tools.tokenizer._backend) is None
    with pytest.raises(RequestError, match=r"about \d+ tokens") as caught:
        tools.encode(text, "prompt", add_special_tokens=False)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert f"about {len(text.encode())} tokens" in caught.value.message
    assert len(lengths) == SAMPLES
    assert max(lengths) <= MAX_SAMPLE
    assert sum(lengths) <= len(text) / 4


def test_what_may_fit_is_tokenized(server: Harness, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to twice the context and some more, where parts might say too much."""
    tools: Processor = server.state.text
    monkeypatch.setattr(tools, "limits", dataclasses.replace(tools.limits, context_len=SAMPLED // 2))
    num = SAMPLED + MORE_TOKENS
    assert len(tools.encode("a" * num, "prompt", add_special_tokens=False)) == num
    assert lengths[-1] == num


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "$"}),
        ("/v1/completions", {"prompt": ["hi", "$"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "$"}]}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "$"}]}),
        ("/v1/responses", {"input": "$", "store": False}),
        ("/generate", {"text": "$"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_route_says_so(path: str, body: dict[str, Any], server: Harness) -> None:
    """In the words of a prompt that is too long, as it is."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        return "x" * (1 << 20) if value == "$" else value

    reply = server.post(path, {"model": "tiny", **filled(body)})
    assert reply.status_code == 400, reply.text[:300]
    assert "maximum context length is 4096 tokens" in reply.text
    assert not server.engine.submits
