"""Requests of every sort are answered by several ranks as by one: the same tokens, probabilities and ends."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from example_models import prompt
from rank_engines import beside, make_core
from restarting import mixed

from dovetail.base.settings import EngineSettings
from dovetail.client import launch
from dovetail.demo import MODEL_DIR
from dovetail.engine.core import EngineCore
from dovetail.messages import SamplerParams, Submit, TokenDelta
from dovetail.plugins import Registry, load, make_plan

FULL = pytest.mark.full
NUM = pytest.mark.parametrize("num", [2, pytest.param(4, marks=FULL)])
"""Of ranks."""
FAMILIES = beside("families", "models/families.py")
sys.modules["families"] = FAMILIES  # as the next one imports it
ENCODERS = beside("encoders", "models/encoders.py")
QUANTISED = beside("quantised_checkpoints", "models/test_quantised.py")
PARAMS = SamplerParams(max_tokens=1, temperature=0.0)
TIGHT: dict[str, Any] = {"max_total_tokens": 120, "chunked_prefill_size": 16, "max_running_requests": 6}
pytestmark = pytest.mark.usefixtures("in_threads")


def answer(core: EngineCore, submits: Sequence[Submit]) -> list[list[TokenDelta]]:
    """What each of some requests gets; the book is checked in every step."""
    found: dict[int, list[TokenDelta]] = {}
    try:
        for number, submit in enumerate(submits, 1):
            core.handle(msgspec.structs.replace(submit, handle=number))
            found[number] = []
        for _ in range(100_000):
            if not core.has_work:
                break
            for delta in core.step().deltas:
                found[delta.handle].append(delta)
            assert core.pages.check_counts(core.scheduler.running)
            assert core.pages.check_ownership(core.scheduler.running)
        assert not core.has_work
    finally:
        core.close()
    return list(found.values())


def same(found: list[list[TokenDelta]], expected: list[list[TokenDelta]]) -> None:
    """Tokens and ends are equal, log probabilities within rounding."""
    for mine, right in zip(found, expected, strict=True):
        assert [i for delta in mine for i in delta.ids] == [i for delta in right for i in delta.ids]
        assert mine[-1].finish == right[-1].finish
        for kind in ("logprobs", "prompt_logprobs"):
            rows, wanted = ([row for delta in deltas for row in getattr(delta, kind) or ()] for deltas in (mine, right))
            assert [row.token_id for row in rows] == [row.token_id for row in wanted]
            for row, other in zip(rows, wanted, strict=True):
                assert math.isclose(row.logprob or 0.0, other.logprob or 0.0, abs_tol=1e-3)
                assert len(row.top) == len(other.top)


def again(submits: list[Submit]) -> list[Submit]:
    """The same requests twice, behind the same beginning: the second ones find it cached."""
    start = prompt(22, 7)
    return [msgspec.structs.replace(one, prompt_ids=[*start, *one.prompt_ids[:30]]) for one in submits * 2]


@NUM
def test_every_sort_of_request(num: int) -> None:
    """The demo model, whose table is tied and whose two key heads four ranks share: greedy and seeded draws, filters,
    penalties, biases, log probabilities, prompts' own, and grammars; retracted, in chunks, with prefixes cached."""
    plan = make_plan(
        Registry.scan(), model="Qwen3ForCausalLM", attention_backend="auto", grammar_backend="llguidance", device="cpu"
    )

    def serve(num: int) -> list[list[TokenDelta]]:
        settings = EngineSettings(
            model_path=str(MODEL_DIR), dtype="float32", device="cpu", page_size=4, max_total_tokens=120,
            max_running_requests=6, chunked_prefill_size=24, num_threads=1, tensor_parallel_size=num,
        )  # fmt: skip
        return answer(launch.make_engine(settings, load(plan, "engine")), again(mixed(7, 12)))

    expected = serve(1)
    assert any(delta.num_retractions for deltas in expected for delta in deltas)
    assert any(delta.cached_tokens for deltas in expected for delta in deltas)
    same(serve(num), expected)


KINDS = ("gemma2", "deepseek_v3", "llama4_text", "gpt_oss", "llama", "cohere2", "olmo3", "qwen3_moe", "mistral")


@pytest.mark.first(1)
@NUM
@pytest.mark.parametrize("kind", [*KINDS[:2], *(pytest.param(kind, marks=FULL) for kind in KINDS[2:])])
def test_every_cache_group(kind: str, num: int, tmp_path: Path) -> None:
    """Windows, latent rows, chunks of attention: requests of every sort, retracted, in chunks, with prefixes cached."""
    architecture = type(FAMILIES.make_checkpoint(tmp_path, kind, vocab_size=199)).__name__
    asked = []
    for one in mixed(5, 24):
        ids = [token % 190 for token in one.prompt_ids]
        bias = {token: value for token, value in one.params.logit_bias.items() if token < 190}
        params = msgspec.structs.replace(one.params, logit_bias=bias, min_tokens=0, ignore_eos=True)
        asked.append(msgspec.structs.replace(one, prompt_ids=ids, params=params))
    expected = answer(make_core(tmp_path, architecture, **TIGHT), again(asked))
    assert any(delta.num_retractions for deltas in expected for delta in deltas)
    assert any(delta.cached_tokens for deltas in expected for delta in deltas)
    same(answer(make_core(tmp_path, architecture, tensor_parallel_size=num, **TIGHT), again(asked)), expected)


@pytest.mark.first(2)
@pytest.mark.sampled
@pytest.mark.parametrize("kind", ENCODERS.ENCODERS)
@pytest.mark.parametrize("task", ["", "SequenceClassification"])
def test_encoders(kind: str, task: str, tmp_path: Path) -> None:
    """What sees both ways gives the same vectors and scores: heads of a bias by distance, places, types of text."""
    changes = {"num_labels": 3} if task else {}
    architecture = type(ENCODERS.make_encoder(tmp_path, kind, task, **changes)).__name__

    def pooled(num: int) -> list[Any]:
        asked = [
            Submit(
                rid="", prompt_ids=[token % 120 + 3 for token in prompt(length, length)], params=PARAMS, pool="first"
            )
            for length in (1, 9, 40, 60)
        ]
        core = make_core(tmp_path, architecture, tensor_parallel_size=num)
        deltas = [one for [one] in answer(core, asked)]
        return [np.frombuffer(one.pooled or b"", dtype=np.float32) for one in deltas]

    expected = pooled(1)
    assert all(len(vector) == (3 if task else 64) for vector in expected)
    for num in (2, 4):
        for mine, right in zip(pooled(num), expected, strict=True):
            np.testing.assert_allclose(mine, right, atol=1e-4)


@pytest.mark.first(1)
@pytest.mark.parametrize(("num", "group"), [(2, None), (4, 8)])
def test_an_int8_checkpoint(num: int, group: int | None, tmp_path: Path) -> None:
    """Scales are cut with the rows and inputs that they stand for; shared key heads have theirs, too."""
    _, folder = QUANTISED.make_checkpoints(tmp_path, group)
    asked = [msgspec.structs.replace(one, prompt_ids=[i % 190 for i in one.prompt_ids]) for one in mixed(4, 16)]
    expected = answer(make_core(folder, "LlamaForCausalLM", "int8"), asked)
    same(answer(make_core(folder, "LlamaForCausalLM", "int8", tensor_parallel_size=num), asked), expected)
    assert json.loads((folder / "config.json").read_text())["quantization_config"]
