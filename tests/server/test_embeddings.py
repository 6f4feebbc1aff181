"""`/v1/embeddings`: what is asked of the engine, what is written of its answer, and what is refused."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchanges import error_of
from harness import Harness

from dovetail.contracts.errors import RequestError
from dovetail.messages import Finish
from dovetail.processing.embeddings import Embedder
from dovetail.runtime.checkpoint.folder import ModelFolder

URL = "/v1/embeddings"


def embed(harness: Harness, given: Any, **fields: Any) -> dict[str, Any]:
    reply = harness.post(URL, {"input": given, **fields})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def wanted(ids: list[int]) -> list[float]:
    """The scripted engine's numbers for a prompt, scaled to length 1."""
    numbers = ([float(len(ids)), *map(float, ids)] + [0.0] * 8)[:8]
    length = math.sqrt(sum(x * x for x in numbers))
    return [x / length for x in numbers]


@pytest.mark.parametrize("given", ["a", ["a", "bc"], [1, 2], [[1], [2, 3]]])
def test_every_form_of_input_gets_its_vectors(harness: Harness, given: Any) -> None:
    """One vector an input, in order, of length 1; usage counts the tokens of all."""
    found = embed(harness, given)
    prompts = [submit.prompt_ids for submit in harness.engine.submits]
    items = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    assert [p for p in prompts if p in items] == [p for p in items if isinstance(p, list)]
    assert [item["index"] for item in found["data"]] == list(range(len(items)))
    for item, prompt in zip(found["data"], prompts, strict=True):
        np.testing.assert_allclose(item["embedding"], wanted(prompt), rtol=1e-6)
    total = sum(map(len, prompts))
    assert found["usage"] == {"prompt_tokens": total, "total_tokens": total}
    assert (found["object"], found["model"], found["data"][0]["object"]) == ("list", "tiny", "embedding")
    assert {submit.pool for submit in harness.engine.submits} == {"last"}


def test_base64_holds_the_same_numbers(harness: Harness) -> None:
    """Float32 in little-endian order, as OpenAI's client reads it."""
    [plain], [packed] = (embed(harness, "abc", encoding_format=form)["data"] for form in ("float", "base64"))
    numbers = np.frombuffer(base64.b64decode(packed["embedding"]), dtype="<f4")
    assert numbers.tolist() == plain["embedding"]


def test_a_vector_is_left_as_it_is_where_the_request_says(harness: Harness) -> None:
    """`use_activation: false`, as vLLM calls it."""
    found = embed(harness, [3, 4], use_activation=False)["data"][0]["embedding"]
    assert found == [2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_an_input_may_fill_the_context_and_is_cut_where_the_request_says(harness: Harness) -> None:
    """Nothing follows it. One token more is refused, unless it may be cut."""
    context = harness.state.text.limits.context_len
    embed(harness, [1] * context)
    error = error_of(harness.post(URL, {"input": [[1], [1] * (context + 1)]}))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    assert "maximum context length is" in error["message"]
    for fields, kept in (
        ({"truncate_prompt_tokens": -1}, list(range(2, context + 2))),
        ({"truncate_prompt_tokens": 2}, [context, context + 1]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [1, 2]),
    ):
        ids = [i % harness.tokenizer.vocab_size for i in range(1, context + 2)]
        embed(harness, ids, **fields)
        assert harness.engine.submits[-1].prompt_ids == [i % harness.tokenizer.vocab_size for i in kept]


def test_names_priority_and_salt_reach_the_engine(harness: Harness) -> None:
    """As for requests that generate."""
    embed(harness, ["a", "b"], rid="mine", priority=3, cache_salt="s")
    assert [(s.rid, s.priority, s.cache_salt) for s in harness.engine.submits] == [
        ("mine#0", 3, "s"),
        ("mine#1", 3, "s"),
    ]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", None),
        ({"input": ["a", ""]}, "input[1]", "invalid_value"),
        ({"input": [[1], []]}, "input", None),
        ({"input": [10**6]}, "input", "invalid_token_id"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", None),
        ({"input": "a", "dimensions": 4}, "dimensions", "unsupported_parameter"),
        ({"input": "a", "dimensions": 0}, "dimensions", None),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "unsupported_parameter"),
        ({"input": "a", "model": "x"}, "model", "model_not_found"),
    ],
)
def test_what_cannot_be_done_is_refused(harness: Harness, fields: Any, param: str, code: str | None) -> None:
    """The error names the field; nothing reaches the engine."""
    error = error_of(harness.post(URL, fields))
    assert (error["param"] or "").startswith(param)
    assert code in (None, error["code"])
    assert harness.engine.submits == []


def test_an_engine_that_gives_up_is_an_error(harness: Harness) -> None:
    """Numbers that are not finite are not sent."""
    harness.engine.give_up = Finish("abort", None, "the model's output is not finite (NaN or infinity)")
    reply = harness.post(URL, {"input": ["a", "b"]})
    assert reply.status_code == 500
    assert "not finite" in error_of(reply)["message"]
    assert harness.state.num_live == 0


def test_more_inputs_than_ever_fit_are_refused(make_harness: Callable[..., Harness]) -> None:
    """By a 400 that says how many do; nothing is left behind."""
    small = make_harness(max_running_requests=2, max_queued_requests=1)
    error = error_of(small.post(URL, {"input": ["a"] * 4}))
    assert (error["param"], error["code"]) == ("input", "invalid_value")
    assert "at most 3" in error["message"]
    assert small.post(URL, {"input": ["a"] * 3}).status_code == 200
    assert small.state.num_live == 0


def test_a_megabyte_of_inputs_is_read_beside_the_server(harness: Harness) -> None:
    """A large body goes the way of large prompts, and gives the same vectors."""
    texts = [f"{at} " + "x" * 1024 for at in range(1024)]
    assert error_of(harness.post(URL, {"input": texts}))["param"] == "input[0]"
    found = embed(harness, texts, truncate_prompt_tokens=3, truncation_side="right")
    assert [item["index"] for item in found["data"]] == list(range(1024))
    for item, text in list(zip(found["data"], texts, strict=True))[::100]:
        ids = harness.tokenizer.encode(text, add_special_tokens=True)[:3]
        np.testing.assert_allclose(item["embedding"], wanted(ids), rtol=1e-6)


def write(folder: Path, config: dict[str, Any], modules: Any = None, pooling: Any = None) -> Path:
    """A model folder as sentence-transformers writes it."""
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if modules is not None:
        kinds = [
            {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (path, kind) in modules
        ]
        (folder / "modules.json").write_text(json.dumps(kinds))
    if pooling is not None:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


PLAIN = (("", "Transformer"), ("1_Pooling", "Pooling"))
UNIT = (*PLAIN, ("2_Normalize", "Normalize"))


@pytest.mark.parametrize(
    ("modules", "pooling", "pool", "normalize"),
    [
        (None, None, "last", True),
        (UNIT, {"word_embedding_dimension": 8, "pooling_mode_lasttoken": True}, "last", True),
        (UNIT, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean", True),
        (PLAIN, {"pooling_mode_mean_tokens": True}, "mean", False),
        (PLAIN, {"embedding_dimension": 8, "pooling_mode": "lasttoken"}, "last", False),
        (PLAIN, {"embedding_dimension": 8, "pooling_mode": "mean"}, "mean", False),
        (PLAIN, {"pooling_mode_cls_token": True}, "first", False),
        (UNIT, {"embedding_dimension": 8, "pooling_mode": "cls"}, "first", True),
    ],
)
def test_pooling_is_what_the_checkpoint_says(
    tmp_path: Path, modules: Any, pooling: Any, pool: str, normalize: bool
) -> None:
    """Files of sentence-transformers decide; without them it is the last token's state at length 1."""
    found = Embedder.of_folder(ModelFolder(write(tmp_path, {}, modules and list(enumerate(modules)), pooling)))
    assert (found.pool, found.normalize, found.obstacle) == (pool, normalize, "")


@pytest.mark.parametrize(
    ("modules", "pooling", "part"),
    [
        (UNIT, {"pooling_mode_max_tokens": True}, "max_tokens is not served"),
        (UNIT, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "mean_tokens, max_tokens is not"),
        (UNIT, {}, "none is not served"),
        (UNIT, [], "1_Pooling/config.json: a JSON object is expected"),
        (UNIT, None, "cannot be read"),
        ((*UNIT, ("3_Dense", "Dense")), {"pooling_mode_mean_tokens": True}, "a Dense module behind Normalize is not"),
        ((*PLAIN, ("2_CNN", "CNN")), {"pooling_mode_mean_tokens": True}, "a CNN module is not served"),
        ((*PLAIN, ("2_Dense", "Dense")), {"pooling_mode_mean_tokens": True}, "2_Dense/config.json: cannot be read"),
    ],
)
def test_a_checkpoint_whose_embeddings_cannot_be_made_says_why(
    tmp_path: Path, modules: Any, pooling: Any, part: str
) -> None:
    """It may still generate: only requests for embeddings are refused."""
    found = Embedder.of_folder(ModelFolder(write(tmp_path, {}, list(enumerate(modules)), pooling)))
    with pytest.raises(RequestError) as caught:
        found.check(None, 8)
    assert caught.value.code == "unsupported_model"
    assert part in caught.value.message


def test_shorter_vectors_are_for_models_that_were_trained_for_them(tmp_path: Path) -> None:
    """Cut first, then scaled; only to the lengths that the checkpoint names, where it names any."""
    pooled = np.array([3, 4, 12, 84], dtype=np.float32).tobytes()
    nested = Embedder.of_folder(ModelFolder(write(tmp_path, {"matryoshka_dimensions": [2, 3]})))
    nested.check(2, 4)
    assert nested.finish(pooled, 2).tolist() == pytest.approx([0.6, 0.8])
    free = Embedder.of_folder(ModelFolder(write(tmp_path, {"is_matryoshka": True})))
    free.check(1, 4)
    for embedder, wrong in ((nested, 1), (nested, 5), (free, 5), (Embedder(), 2)):
        with pytest.raises(RequestError, match="dimensions"):
            embedder.check(wrong, 4)
    Embedder().check(4, 4)
    assert Embedder().finish(np.zeros(3, np.float32).tobytes()).tolist() == [0, 0, 0]
