"""`dovetail bench grammar` at the smallest sizes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dovetail.demo import MODEL_DIR
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_server.bench.grammar_folder import make_folder, synthetic
from dovetail_server.cli import bench


def test_it_measures_what_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parts asked for are printed and written, on as many cores as allowed, which are given back."""
    before = os.sched_getaffinity(0)
    file = tmp_path / "out.json"
    sizes = ["--num-schemas", "3", "--num-rows", "2", "--rounds", "1"]
    argv = ["grammar", "--tokenizer-path", str(MODEL_DIR), *sizes, "--parts", "compile,masks,batch,step"]
    assert bench.main([*argv, "--model-path", str(MODEL_DIR), "--json", str(file)]) == 0
    assert os.sched_getaffinity(0) == before
    found = json.loads(file.read_text())
    assert found["compile"]["accepted"] == 3
    assert found["compile"]["as a multiple of it, schema by schema"]["p50"] > 0
    assert found["masks"]["later visits, µs"]["p50"] > 0
    assert found["step"]["step with grammars, CPU ms"] > 0
    assert "hostile" not in found
    assert "first visits" in capsys.readouterr().out


def test_wrong_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown part, and a folder without a tokenizer, are errors in one line."""
    assert bench.main(["grammar", "--parts", "compile,speed"]) == 2
    assert "'speed' is no part; possible: compile, masks" in capsys.readouterr().err
    assert bench.main(["grammar", "--tokenizer-path", str(tmp_path), "--parts", "masks"]) == 2
    assert "holds no tokenizer.json" in capsys.readouterr().err


def test_made_up_tokens_are_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tokenizer one is made: as many tokens as asked for, with every byte and an end."""
    monkeypatch.setattr("dovetail_server.bench.grammar_folder.synthetic", lambda: synthetic(3000))
    tokenizer = Tokenizer.load(make_folder(tmp_path, None))
    assert tokenizer.vocab_size == 3000
    assert tokenizer.eos_token_ids
    assert {bytes([i]) for i in range(256)} <= {tokenizer.token_bytes(i) for i in range(3000)}
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 3000
