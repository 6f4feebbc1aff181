"""`/v1/rerank`, `/v1/score` and `/v1/classify` give transformers' scores, whatever kind of model compares the texts."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from encoder_server import EncoderServer, write_encoder, write_reranker

from dovetail.contracts.errors import ConfigError, EngineDeadError
from dovetail.messages import Submit, TokenDelta
from dovetail.processing.reranker import QWEN3, Reranker

DOCUMENTS = ["hello there", "abc", "abc", "", "what is a cat 12"]
QUERY = "a cat"
CLOSE = {"abs": 1e-5}


def encoded(folder: Path, *texts: str, most: int | None = None) -> Any:
    """Transformers' reading of one or two texts."""
    cut = {} if most is None else {"truncation": True, "max_length": most}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    given = [texts] if len(texts) == 2 else list(texts)  # by itself, an empty second text would be none
    return tokenizer(given, return_tensors="pt", return_token_type_ids=True, **cut)


def raw(folder: Path, model: Any, first: str, second: str, **cut: Any) -> float:
    return float(model(**encoded(folder, first, second, **cut)).logits[0, 0])


def sigmoid(number: float) -> float:
    return float(1 / (1 + np.exp(-number)))


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EncoderServer, Path, Any]]:
    """A cross encoder of one label."""
    folder = tmp_path_factory.mktemp("cross")
    model = write_encoder(folder, "bert", "SequenceClassification", num_labels=1)
    with EncoderServer(folder) as server:
        yield server, folder, model


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EncoderServer, Path, Any]]:
    """An embedding model."""
    folder = tmp_path_factory.mktemp("vectors")
    model = write_encoder(folder, "bert")
    with EncoderServer(folder) as server:
        yield server, folder, model


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ordered_by_their_scores(cross: Any, path: str) -> None:
    """Duplicates and empty texts among them; equal ones stay as they were sent, and usage counts all tokens."""
    server, folder, model = cross
    found = server.ok(path, query=QUERY, documents=DOCUMENTS, model="tiny")
    want = [sigmoid(raw(folder, model, QUERY, text)) for text in DOCUMENTS]
    scores = {one["index"]: one["relevance_score"] for one in found["results"]}
    assert [scores[at] for at in range(5)] == pytest.approx(want, **CLOSE)
    order = [one["index"] for one in found["results"]]
    assert order == sorted(order, key=lambda at: -scores[at])
    assert order.index(1) + 1 == order.index(2)
    assert [one["document"]["text"] for one in found["results"]] == [DOCUMENTS[at] for at in order]
    num = sum(len(encoded(folder, QUERY, text)["input_ids"][0]) for text in DOCUMENTS)
    assert found["usage"] == {"prompt_tokens": num, "total_tokens": num}


@pytest.mark.parametrize("survivors", [0, 3])
def test_engine_death_while_documents_are_compared(cross: Any, survivors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one stated error, whether some of the documents had their scores or none; and nothing is left behind."""
    server = cross[0]
    inner, left = server.engine.submit, iter(range(survivors))

    async def dying(submit: Submit, **given: Any) -> AsyncGenerator[TokenDelta, None]:
        if next(left, None) is None:
            raise EngineDeadError("killed by the test")
        async for delta in inner(submit, **given):
            yield delta

    monkeypatch.setattr(server.engine, "submit", dying)
    for path, body in (
        ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}),
        ("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS}),
        ("/v1/classify", {"input": DOCUMENTS}),
    ):
        reply = server.post(path, body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead"), reply.text
    assert server.state.num_live == 0
    monkeypatch.undo()
    assert len(server.ok("/v1/rerank", query=QUERY, documents=DOCUMENTS)["results"]) == len(DOCUMENTS)


def test_what_a_request_says_of_its_reply(cross: Any) -> None:
    """`top_n`, documents as objects or left out, and scores that are not scaled."""
    server, folder, model = cross
    given = [{"text": text} for text in DOCUMENTS]
    best = server.ok("/v1/rerank", query=QUERY, documents=given, top_n=2, return_documents=False)["results"]
    assert len(best) == 2
    assert all(one.keys() == {"index", "relevance_score"} for one in best)
    plain = server.ok("/v1/rerank", query=QUERY, documents=["hello there"], use_activation=False)["results"]
    assert plain[0]["relevance_score"] == pytest.approx(raw(folder, model, QUERY, "hello there"), **CLOSE)
    few = server.ok("/v1/rerank", query=QUERY, documents=["hello there"], max_tokens_per_doc=3)["results"]
    assert few[0]["relevance_score"] == pytest.approx(sigmoid(raw(folder, model, QUERY, "hel")), **CLOSE)
    assert few[0]["document"]["text"] == "hello there"


def test_pairs_that_are_too_long(cross: Any) -> None:
    """They are refused, or cut as transformers does, whose special tokens stay."""
    server, folder, model = cross
    long = "x y z " * 30
    refused = server.post("/v1/rerank", {"query": QUERY, "documents": ["a", long]}).json()["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "documents[1]")
    for query, document, most in ((QUERY, long, 20), (long, long, 21), (long, "a", 9)):
        found = server.ok("/v1/score", text_1=query, text_2=document, truncate_prompt_tokens=most)
        want = sigmoid(raw(folder, model, query, document, most=most))
        assert found["data"][0]["score"] == pytest.approx(want, **CLOSE)


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_two_texts_or_lists_of_them(cross: Any, path: str) -> None:
    """One with one, one with many, each with its own; in the order of the request."""
    server, folder, model = cross
    for first, second in ((QUERY, "abc"), (QUERY, DOCUMENTS), ([QUERY], DOCUMENTS), (DOCUMENTS, DOCUMENTS[::-1])):
        found = server.ok(path, text_1=first, text_2=second)
        right = [second] if isinstance(second, str) else second
        left = first if isinstance(first, list) and len(first) > 1 else [QUERY] * len(right)
        want = [sigmoid(raw(folder, model, *pair)) for pair in zip(left, right, strict=True)]
        assert [one["score"] for one in found["data"]] == pytest.approx(want, **CLOSE)
        assert [one["index"] for one in found["data"]] == list(range(len(right)))


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query", "missing_required_parameter"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", None),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents", None),
        ("/v1/rerank", {"query": "a", "documents": [1]}, "documents", None),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", None),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "model": "x"}, "model", "model_not_found"),
        ("/v1/score", {}, "text_1", "missing_required_parameter"),
        ("/v1/score", {"text_1": "a"}, "text_2", "missing_required_parameter"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "invalid_value"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "query": "c"}, "text_1", "invalid_value"),
        ("/v1/score", {"query": "a", "items": ["b"]}, "label_token_ids", "missing_required_parameter"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1]}, "model", "unsupported_task"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model", "unsupported_task"),
        ("/v1/completions", {"prompt": "a"}, "model", "unsupported_task"),
        ("/v1/responses", {"input": "a"}, "model", "unsupported_task"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "model": "tiny"},
            None,
            None,
        ),
        ("/generate", {"text": "a"}, "model", "unsupported_task"),
        ("/v1/embeddings", {"input": "a"}, "model", "unsupported_task"),
    ],
)
def test_what_cannot_be_done_is_refused(cross: Any, path: str, body: Any, param: str | None, code: str | None) -> None:
    """The error names the field, or what the model is for."""
    reply = cross[0].post(path, body)
    error = reply.json()["error"]
    assert reply.status_code in (400, 404), error
    assert param is None or str(error.get("param")).startswith(param)
    assert code in (None, error.get("code"))
    if code == "unsupported_task":
        assert "it can compare two texts (/v1/rerank, /v1/score)" in error["message"]


def test_a_megabyte_and_two_thousand_items(cross: Any) -> None:
    """A large body is read beside the server, and gives the scores that a small one does."""
    server, folder, model = cross
    documents = [f"{at} " + "x" * 512 for at in range(2048)]
    found = server.ok("/v1/rerank", query=QUERY, documents=documents, truncate_prompt_tokens=9)
    assert sorted(one["index"] for one in found["results"]) == list(range(2048))
    scores = {one["index"]: one for one in found["results"]}
    for at in (0, 77, 2047):
        assert scores[at]["document"]["text"] == documents[at]
        want = sigmoid(raw(folder, model, QUERY, documents[at], most=9))
        assert scores[at]["relevance_score"] == pytest.approx(want, **CLOSE)
    pairs = server.ok("/v1/score", text_1=documents[:400], text_2=documents[:400], truncate_prompt_tokens=9)
    want = sigmoid(raw(folder, model, documents[399], documents[399], most=9))
    assert pairs["data"][399]["score"] == pytest.approx(want, **CLOSE)
    one = server.ok("/v1/score", text_1=QUERY, text_2="x y " * (1 << 18), truncate_prompt_tokens=-1)
    assert one["data"][0]["score"] == pytest.approx(sigmoid(raw(folder, model, QUERY, "x y " * 60, most=66)), **CLOSE)


def test_vectors_are_compared_by_their_angle(vectors: Any) -> None:
    """As vLLM compares embeddings: the cosine, of one text with many, or of each with its own."""
    server, folder, model = vectors

    def vector(text: str) -> Any:
        return model(**encoded(folder, text)).last_hidden_state[0, 0].double().numpy()

    def cosine(first: str, second: str) -> float:
        a, b = vector(first), vector(second)
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))

    ranked = server.ok("/v1/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    scores = {one["index"]: one["relevance_score"] for one in ranked}
    assert [scores[at] for at in range(5)] == pytest.approx([cosine(QUERY, text) for text in DOCUMENTS], **CLOSE)
    for first in (QUERY, DOCUMENTS[::-1]):
        left = [QUERY] * 5 if first == QUERY else DOCUMENTS[::-1]
        found = server.ok("/v1/score", text_1=first, text_2=DOCUMENTS)
        want = [cosine(*pair) for pair in zip(left, DOCUMENTS, strict=True)]
        assert [one["score"] for one in found["data"]] == pytest.approx(want, **CLOSE)
    large = server.ok("/v1/score", text_1=QUERY, text_2=["x" * 40] * 2048)
    assert [one["score"] for one in large["data"]] == pytest.approx([cosine(QUERY, "x" * 40)] * 2048, **CLOSE)
    refused = server.post("/v1/classify", {"input": "a"}).json()["error"]
    assert (refused["code"], refused["param"]) == ("unsupported_task", "model")


@pytest.mark.parametrize(
    ("said", "scaled"),
    [
        ({}, lambda x: torch.softmax(x, -1)),
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "regression"}, lambda x: x),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, torch.sigmoid),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, lambda x: x),
    ],
)
def test_labels_are_scaled_as_the_folder_says(said: Any, scaled: Any, tmp_path: Path) -> None:
    """A softmax where it says nothing; `use_activation: false` leaves the numbers."""
    names = {"id2label": {0: "dog", 1: "cat", 2: "owl"}, "label2id": {"dog": 0, "cat": 1, "owl": 2}}
    model = write_encoder(tmp_path, "roberta", "SequenceClassification", **names)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    with EncoderServer(tmp_path) as server:
        for text in ("hello there", "abc"):
            logits = model(input_ids=encoded(tmp_path, text)["input_ids"]).logits[0]
            for extra, want in (({}, scaled(logits)), ({"use_activation": False}, logits)):
                [found] = server.ok("/classify", input=[text], **extra)["data"]
                assert found["probs"] == pytest.approx(want.tolist(), **CLOSE)
                assert (found["label"], found["num_classes"]) == (("dog", "cat", "owl")[int(want.argmax())], 3)
        refused = server.post("/v1/rerank", {"query": "a", "documents": ["a"]}).json()["error"]
        assert refused["code"] == "unsupported_task"  # three labels are no score


def asked(query: str, document: str, instruction: str) -> str:
    return QWEN3.format(instruction=instruction, query=query, document=document)


TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'query' %}Q:{% elif m['role'] == 'document' %}D:{% endif %}"
    "{{ m['content'] }}\n{% endfor %}?"
)


@pytest.mark.parametrize(
    ("said", "settings", "template"),
    [
        ({"is_original_qwen3_reranker": True, "classifier_from_token": ["no", "yes"]}, {}, None),
        ({}, {"task": "score"}, None),
        ({}, {}, TEMPLATE),
    ],
)
def test_a_model_that_answers_yes_or_no(said: Any, settings: Any, template: str | None, tmp_path: Path) -> None:
    """Qwen3-Reranker: the score is how much likelier yes is; texts stand in its template, or in the folder's own."""
    model = write_reranker(tmp_path, **said)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    with EncoderServer(tmp_path, **settings) as server:
        tokenizer = server.state.text.tokenizer
        no, yes = (tokenizer.added_tokens[word] for word in ("no", "yes"))
        for instruct in (None, "Find animals"):
            extra = {} if instruct is None else {"instruct": instruct}
            ranked = server.ok("/v1/rerank", query=QUERY, documents=DOCUMENTS, **extra)["results"]
            for one in ranked:
                document = DOCUMENTS[one["index"]]
                usual = "Given a web search query, retrieve relevant passages that answer the query"
                text = asked(QUERY, document, instruct or usual)
                if template is not None:
                    text = f"{instruct}\n" * (instruct is not None) + f"Q:{QUERY}\nD:{document}\n?"
                ids = tokenizer.encode(text, add_special_tokens=False)
                logits = model(torch.tensor([ids])).logits[0, -1]
                want = float(torch.softmax(logits[[no, yes]], 0)[1])
                assert one["relevance_score"] == pytest.approx(want, abs=1e-5)
        cut = server.ok(
            "/v1/score", text_1=QUERY, text_2="x" * 2000, truncate_prompt_tokens=600 if template is None else 60
        )
        assert cut["usage"]["prompt_tokens"] == (600 if template is None else 60)
        generated = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
        assert generated.status_code == (400 if settings else 200)


def test_the_same_model_with_a_matrix_in_place_of_its_head(tmp_path: Path) -> None:
    """`Qwen3ForSequenceClassification`: its template where the folder says it is the reranker, else the texts alone."""
    for at, said in enumerate(({"classifier_from_token": ["no", "yes"]}, {})):
        folder = tmp_path / str(at)
        model = write_reranker(folder, "SequenceClassification", **said)
        with EncoderServer(folder) as server:
            tokenizer = server.state.text.tokenizer
            usual = "Given a web search query, retrieve relevant passages that answer the query"
            text = asked(QUERY, "abc", usual) if said else QUERY + "abc"
            ids = tokenizer.encode(text, add_special_tokens=False)
            want = sigmoid(float(model(torch.tensor([ids])).logits[0, 0]))
            [found] = server.ok("/v1/score", text_1=QUERY, text_2="abc")["data"]
            assert found["score"] == pytest.approx(want, **CLOSE)


def test_a_model_that_only_generates_says_how_it_could_compare(tmp_path: Path) -> None:
    """Nothing is guessed: the folder or `--task` says what its answers mean."""
    write_reranker(tmp_path)
    with EncoderServer(tmp_path) as server:
        error = server.post("/v1/rerank", {"query": "a", "documents": ["b"]}).json()["error"]
        assert error["code"] == "unsupported_task"
        assert "--task embed or --task score" in error["message"]
        assert server.ok("/v1/embeddings", input="a")["data"]
    with EncoderServer(tmp_path, task="embed") as server:
        assert server.ok("/v1/score", text_1="a", text_2="a")["data"][0]["score"] == pytest.approx(1.0)
        error = server.post("/v1/completions", {"prompt": "a"}).json()["error"]
        assert "the server was started with --task embed" in error["message"]


def test_a_task_that_the_model_cannot_do_ends_the_start(tmp_path: Path) -> None:
    """With what it can do."""
    write_encoder(tmp_path)
    for task, possible in (("generate", "embed, score"), ("classify", "embed, score")):
        with pytest.raises(ConfigError, match=rf"--task {task}: BertModel cannot .*; possible: {possible}"):
            EncoderServer(tmp_path, task=task)


def test_a_module_of_sentence_transformers_names_the_answers(tmp_path: Path) -> None:
    """`LogitScore` has the ids of both."""
    write_reranker(tmp_path)
    (tmp_path / "1_LogitScore").mkdir()
    (tmp_path / "1_LogitScore/config.json").write_text(json.dumps({"true_token_id": 7, "false_token_id": 5}))
    kinds = [("", "Transformer"), ("1_LogitScore", "LogitScore")]
    modules = [
        {"idx": at, "path": path, "type": f"sentence_transformers.x.{kind}"} for at, (path, kind) in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with EncoderServer(tmp_path) as server:
        text = server.state.text
        assert (text.reranker.no, text.reranker.yes, text.tasks.comparison) == (5, 7, "yes_no")
        assert server.ok("/v1/rerank", query="a", documents=["b"])["results"]


def test_scores_of_any_size_are_numbers() -> None:
    """A sigmoid of a thousand overflows nothing."""
    assert Reranker().scaled([1000.0, -1000.0, 0.0]) == [1.0, 0.0, 0.5]
    assert Reranker(scale="softmax").scaled([1000.0, 0.0]) == [1.0, 0.0]


def test_lines_of_batches(cross: Any) -> None:
    """A batch file of each of these endpoints gives what the routes give."""
    server = cross[0]
    bodies = {
        "/v1/rerank": {"query": QUERY, "documents": DOCUMENTS},
        "/v1/score": {"text_1": QUERY, "text_2": DOCUMENTS},
        "/v1/classify": {"input": "abc"},
    }
    for endpoint, body in bodies.items():
        line = {"custom_id": "1", "method": "POST", "url": endpoint, "body": {"model": "tiny", **body}}
        files = {"file": ("in.jsonl", json.dumps(line).encode()), "purpose": (None, "batch")}
        uploaded = server.http.post(server.base + "/v1/files", files=files, timeout=60).json()
        made = server.ok("/v1/batches", input_file_id=uploaded["id"], endpoint=endpoint, completion_window="24h")
        for _ in range(600):
            made = server.http.get(f"{server.base}/v1/batches/{made['id']}", timeout=60).json()
            if made["status"] in ("completed", "failed"):
                break
            time.sleep(0.05)
        assert made["status"] == "completed", made
        output = server.http.get(f"{server.base}/v1/files/{made['output_file_id']}/content", timeout=60).json()
        found, want = output["response"]["body"], server.ok(endpoint, **body)
        for key in ("results", "data", "usage"):
            assert found.get(key) == want.get(key)
