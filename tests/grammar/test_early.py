"""A tokenizer that is read while the model loads gives the vocabulary that it gives anyway."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts.errors import DovetailError
from dovetail.demo import MODEL_DIR
from dovetail.grammar.compile import early
from dovetail.grammar.compile.early import EarlyTokenizer
from dovetail.grammar.compile.vocabulary import make_vocabulary
from dovetail.text.tokenizer.tokenizer import Tokenizer


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Any tokenizer is large; returns which processes were started."""
    started: list[list[str]] = []
    popen = subprocess.Popen

    def noted(command: list[str], **options: Any) -> Any:
        started.append(command)
        return popen(command, **options)

    monkeypatch.setattr(early, "LARGE", 0)
    monkeypatch.setattr(early.subprocess, "Popen", noted)
    return started


def test_a_process_of_its_own_lists_the_same_tokens(commands: list[list[str]]) -> None:
    """All facts are equal, the fingerprint among them, and text is encoded alike."""
    tokenizer = Tokenizer.load(MODEL_DIR)
    size = tokenizer.vocab_size + 3
    want = make_vocabulary(tokenizer, size, tokenizer.eos_token_ids)
    found = EarlyTokenizer(MODEL_DIR).vocabulary(size, ())
    assert len(commands) == 1
    assert (found.tokens, found.fingerprint, found.special_ids) == (want.tokens, want.fingerprint, want.special_ids)
    assert (found.added, found.eos_ids, found.size) == (want.added, want.eos_ids, size)
    assert found.encode is not None
    assert found.encode("two words") == tokenizer.encode("two words", add_special_tokens=False)


@pytest.mark.parametrize("code", ["raise SystemExit(1)", "print('no tokens')", "import sys; sys.stdout.write('\\x90')"])
def test_a_process_that_fails_is_done_without(
    code: str, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are listed here then."""
    popen = early.subprocess.Popen
    monkeypatch.setattr(
        early.subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", code], **options)
    )
    tokenizer = Tokenizer.load(MODEL_DIR)
    found = EarlyTokenizer(MODEL_DIR).vocabulary(tokenizer.vocab_size, ())
    assert len(commands) == 1
    assert found.tokens == make_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids).tokens


def test_a_small_tokenizer_starts_no_process(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read sooner than a process starts."""
    monkeypatch.setattr(early, "LARGE", 1 << 30)
    assert EarlyTokenizer(MODEL_DIR).vocabulary(100, (1,)).size == 100
    assert not commands


def test_a_folder_without_a_tokenizer_is_told_to_whoever_asks(tmp_path: Path) -> None:
    """Reading fails in a thread; the error is that of the tokenizer."""
    with pytest.raises(DovetailError):
        EarlyTokenizer(tmp_path).vocabulary(100, (1,))
