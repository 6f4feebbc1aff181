"""An engine whose cache has latent rows: tokens are right in any schedule, hits equal misses, the rows are small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from example_models import Example, prompt, run

from dovetail.contracts.errors import PluginError

EXAMPLE = Example("latent", "LatentForCausalLM")
LONG = prompt(150, 3)
SCHEDULES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "short chunks": {"chunked_prefill_size": 7},
    "one token a page": {"page_size": 1},
    "overlapped, large pages": {"overlap_on_cpu": True, "page_size": 16},
    "hardly any room": {"max_total_tokens": 160, "chunked_prefill_size": 16},
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    made: Path = EXAMPLE.reference().write_checkpoint(tmp_path_factory.mktemp("latent"))
    return made


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tokens_equal_the_reference(schedule: str, folder: Path) -> None:
    """With prefixes that are shared, chunks over cached rows, and retractions."""
    core = EXAMPLE.make_engine(folder, **SCHEDULES[schedule])
    prompts = [prompt(n, n) for n in (1, 9, 60)] + [LONG[:40] + prompt(5, 1), LONG[:40] + prompt(9, 2)]
    for given, tokens in zip(prompts, run(core, prompts, 20), strict=True):
        assert tokens == EXAMPLE.right(folder, given, tokens)
    assert core.pages.num_used == 0


@pytest.mark.parametrize("length", [64, 65, *(pytest.param(length, marks=pytest.mark.full) for length in (63, 128))])
def test_a_hit_equals_a_miss(length: int, folder: Path) -> None:
    """What is found in the cache is gone on from."""
    core = EXAMPLE.make_engine(folder)
    run(core, [LONG], 1)
    asked = [LONG[:length] + prompt(6, length)]
    found = run(core, asked, 12)
    assert found == run(EXAMPLE.make_engine(folder, disable_radix_cache=True), asked, 12)
    assert core.pages.tree.count(LONG[:length]) == length // 4


def test_a_token_takes_one_row(folder: Path) -> None:
    """Rank and rotary width, in each layer, and nothing for each head."""
    core = EXAMPLE.make_engine(folder, max_total_tokens=400)
    assert core.executor.info.kv_bytes == (400 + 4) * 2 * (24 + 8) * 4


def test_a_backend_without_latent_rows_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In one line that names both, before a weight is read."""
    monkeypatch.setattr("dovetail.runtime.checkpoint.weights.load_weights", lambda *_: pytest.fail("weights are read"))
    file = tmp_path / "plain_attention.py"
    file.write_text(
        "from dataclasses import replace\n\nfrom dovetail_backends.torch_native import TorchNativeBackend\n\n\n"
        'class Plain(TorchNativeBackend):\n    plugin_name = "plain"\n'
        '    caps = replace(TorchNativeBackend.caps, mixers=frozenset({"kv"}))\n'
    )
    with pytest.raises(PluginError, match=r"plain.*: LatentForCausalLM needs latent rows \(MLA\), which it does not"):
        EXAMPLE.make_engine(folder, [file], attention_backend="plain")
