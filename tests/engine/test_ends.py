"""What ends a reply is one fact, which the engine and the text half both ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from script_executor import VOCAB, ScriptExecutor, next_token

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.client import launch
from dovetail.messages import SamplerParams, Submit
from dovetail.plugins import load
from dovetail.text.tokenizer.ends import end_ids
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_testing.engine import make_plans

OWN, ADDED = 41, VOCAB - 2


def write_folder(folder: Path, files: dict[str, Any]) -> Path:
    """Write a tokenizer of `t0`, `t1`, …, of which one was added, and other files."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(ADDED)}, unk_token="t0"))
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    for name, value in {"config.json": {"architectures": ["Qwen3ForCausalLM"]}, **files}.items():
        (folder / name).write_text(json.dumps(value))
    return folder


CASES: list[tuple[dict[str, Any], set[int]]] = [
    ({}, set()),
    ({"config.json": {"eos_token_id": 3}}, {3}),
    ({"config.json": {"text_config": {"eos_token_id": [3, 4]}, "eos_token_id": None}}, {3, 4}),
    ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": [5, 6, 5]}}, {5, 6}),
    ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": None}}, {3}),
    ({"config.json": {"eos_token_id": -1}, "tokenizer_config.json": {"eos_token": "<end>"}}, {ADDED}),
    ({"config.json": {"eos_token_id": 3}, "tokenizer_config.json": {"eos_token": {"content": "<end>"}}}, {3, ADDED}),
    ({"generation_config.json": {"eos_token_id": 5}, "special_tokens_map.json": {"eos_token": "<end>"}}, {5, ADDED}),
    ({"tokenizer_config.json": {"eos_token": f"t{OWN}"}}, {OWN}),
    ({"tokenizer_config.json": {"eos_token": "<none>"}}, set()),
    (
        {"tokenizer_config.json": {"eos_token": "<more>", "added_tokens_decoder": {ADDED + 1: {"content": "<more>"}}}},
        {ADDED + 1},
    ),
]


@pytest.mark.parametrize(("files", "ends"), CASES, ids=lambda each: json.dumps(each) if isinstance(each, dict) else "")
def test_both_halves_find_the_same_ends(files: dict[str, Any], ends: set[int], tmp_path: Path) -> None:
    """Configured ids, wherever they stand, and the tokenizer's own, whether it was added or learned."""
    folder = write_folder(tmp_path, files)
    assert set(end_ids(TokenizerFiles.read(folder, folder))) == set(Tokenizer.load(folder).eos_token_ids) == ends


def test_the_models_configuration_holds_beside_another_tokenizer(tmp_path: Path) -> None:
    """`--tokenizer-path` brings a tokenizer, and no end or default of another model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "texts").mkdir()
    model = write_folder(tmp_path / "model", {"generation_config.json": {"eos_token_id": 7, "top_k": 9}})
    files = {"generation_config.json": {"eos_token_id": 5, "top_k": 2}, "tokenizer_config.json": {"eos_token": "<end>"}}
    texts = write_folder(tmp_path / "texts", files)
    tokenizer = Tokenizer.load(texts, model)
    assert end_ids(TokenizerFiles.read(texts, model)) == tokenizer.eos_token_ids == (7, ADDED)
    assert tokenizer.default_sampling == {"top_k": 9}


def test_the_tokenizers_own_end_ends_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the configuration names another end, a reply ran on to its maximum."""
    prompt, said = (1, 2, 3), [1, 2, 3]
    while len(said) < 6:
        said.append(next_token(9, tuple(said)))
    files = {"tokenizer_config.json": {"eos_token": f"t{said[-1]}"}, "generation_config.json": {"eos_token_id": ADDED}}
    folder = write_folder(tmp_path, files)
    monkeypatch.setattr(launch, "LocalExecutor", lambda *_: ScriptExecutor(num_pages=40, page_size=4))
    settings, plan = make_plans(folder, page_size=4)
    core = launch.make_engine(settings, load(plan, "engine"))
    core.handle(Submit(rid="", handle=1, prompt_ids=list(prompt), params=SamplerParams(max_tokens=50, seed=9)))
    deltas = [delta for _ in range(60) for delta in core.step().deltas]
    assert [token for delta in deltas for token in delta.ids] == said[3:]
    assert [delta.finish.matched for delta in deltas if delta.finish is not None] == [said[-1]]
