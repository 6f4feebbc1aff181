"""`LLM.score`, `LLM.rerank` and `LLM.classify` give what the routes give, for every way to compare texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from encoder_server import EncoderServer, write_encoder, write_reranker

from dovetail import LLM
from dovetail.contracts.errors import RequestError

QUERY, DOCUMENTS = "a cat", ["hello there", "abc", "abc", "", "what is a cat 12"]
CLOSE = {"abs": 1e-6}
QUIET: dict[str, Any] = {"use_tqdm": False}
Both = tuple[EncoderServer, LLM]


@pytest.fixture(scope="module", params=["labels", "cosine", "yes_no"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EncoderServer, LLM]]:
    """A server and an `LLM` over one folder."""
    folder = tmp_path_factory.mktemp(request.param)
    settings: dict[str, Any] = {}
    if request.param == "labels":
        write_encoder(folder, "bert", "SequenceClassification", num_labels=1)
    elif request.param == "cosine":
        write_encoder(folder, "bert")
    else:
        write_reranker(folder)
        settings = {"task": "score"}
    with (
        EncoderServer(folder, **settings) as server,
        LLM(str(folder), dtype="float32", device="cpu", **settings) as llm,
    ):
        yield server, llm


@pytest.mark.parametrize(
    ("first", "second"), [(QUERY, "abc"), (QUERY, DOCUMENTS), ([QUERY], DOCUMENTS), (DOCUMENTS, DOCUMENTS[::-1])]
)
def test_scores_are_those_of_the_route(both: Both, first: Any, second: Any) -> None:
    """One with one, one with many, each with its own; with vLLM's names, and the tokens that the route counts."""
    server, llm = both
    want = server.ok("/v1/score", text_1=first, text_2=second)
    got = llm.score(first, second, **QUIET)
    assert [one.outputs.score for one in got] == pytest.approx([one["score"] for one in want["data"]], **CLOSE)
    if len(got) == 1 or (isinstance(first, list) and len(first) > 1):
        assert sum(len(one.prompt_token_ids) for one in got) == want["usage"]["prompt_tokens"]
    asked: dict[str, Any] = {"use_activation": False, "truncate_prompt_tokens": -1 if llm.info.generates else 9}
    plain = server.ok("/v1/score", text_1=first, text_2=second, **asked)
    found = llm.score(first, second, **asked, **QUIET)
    assert [one.score for one in found] == pytest.approx([one["score"] for one in plain["data"]], **CLOSE)


def test_documents_stand_in_the_order_of_the_route(both: Both) -> None:
    """The best first, equal ones as they were given, as many as wanted."""
    server, llm = both
    want = server.ok("/v1/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    got = llm.rerank(QUERY, DOCUMENTS, **QUIET)
    assert [(one.index, one.document) for one in got] == [(one["index"], one["document"]["text"]) for one in want]
    assert [one.relevance_score for one in got] == pytest.approx([one["relevance_score"] for one in want], **CLOSE)
    assert llm.rerank(QUERY, DOCUMENTS, top_n=2, **QUIET) == got[:2]


def test_what_cannot_be_compared_is_refused(both: Both) -> None:
    """Lists that do not match, and a text that is too long, by its name; the next call is served."""
    llm = both[1]
    with pytest.raises(RequestError, match="data_1 has 2 texts and data_2 3"):
        llm.score(["a", "b"], ["a", "b", "c"], **QUIET)
    with pytest.raises(RequestError, match=r"context length"):
        llm.rerank(QUERY, ["a", "x y z " * 20_000], **QUIET)
    assert len(llm.score("a", ["b"] * 100, **QUIET)) == 100


def test_labels_are_those_of_the_route(tmp_path: Path) -> None:
    """Texts and token ids; a model of several labels compares nothing, and one that embeds classifies nothing."""
    names = {"id2label": {0: "sad", 1: "glad", 2: "bad"}, "label2id": {"sad": 0, "glad": 1, "bad": 2}}
    write_encoder(tmp_path, "bert", "SequenceClassification", **names)
    with EncoderServer(tmp_path) as server, LLM(str(tmp_path), dtype="float32", device="cpu") as llm:
        for scaled in (True, False):
            want = server.ok("/v1/classify", input=DOCUMENTS, use_activation=scaled)["data"]
            got = llm.classify(DOCUMENTS, use_activation=scaled, **QUIET)
            assert [one.label for one in got] == [one["label"] for one in want]
            for one, other in zip(got, want, strict=True):
                assert one.outputs.probs == pytest.approx(other["probs"], **CLOSE)
                assert one.num_classes == 3
        [again] = llm.classify(list(got[0].prompt_token_ids), use_activation=False, **QUIET)
        assert again.probs == pytest.approx(got[0].probs, **CLOSE)
        with pytest.raises(RequestError, match="does not compare two texts"):
            llm.score("a", "b", **QUIET)


def test_a_model_without_labels_classifies_nothing(both: Both) -> None:
    """It says what it does instead."""
    llm = both[1]
    if llm.info.num_labels:
        pytest.skip("it has labels")
    with pytest.raises(RequestError, match="does not score labels"):
        llm.classify("a", **QUIET)
