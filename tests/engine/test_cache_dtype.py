"""A cache in 8 bits: the same tokens in any schedule, hits equal misses, and about half of the bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from example_models import Example, prompt, run

from dovetail.base.settings import EngineSettings
from dovetail.contracts.config import dense_layers
from dovetail.contracts.errors import ConfigError, ModelError, PluginError
from dovetail.messages import SamplerParams
from dovetail.runtime.cache_dtype import with_cache_dtype
from dovetail.runtime.hf_config import read_config
from dovetail.sdk.cache import DTYPES, MOST, dequantise, quantise, rounded
from dovetail.sdk.config import dense_config
from dovetail_testing.engine import generate, make_core, tokens

LATENT = Example("latent", "LatentForCausalLM")
GREEDY = SamplerParams(max_tokens=20, temperature=0)
LONG = prompt(150, 3)
SCHEDULES: list[dict[str, Any]] = [
    {"chunked_prefill_size": 7},
    {"page_size": 1},
    {"page_size": 3, "chunked_prefill_size": 64},
    {"disable_radix_cache": True},
    {"max_running_requests": 2},
    {"overlap_on_cpu": True, "max_total_tokens": 256, "page_size": 4},
]
PROMPTS = [prompt(n, n) for n in (1, 9, 60)] + [LONG[:40] + prompt(5, 1), LONG[:40] + prompt(9, 2)]
NAMES = ("int8", "fp8")


@pytest.fixture(scope="session")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with latent rows."""
    made: Path = LATENT.reference().write_checkpoint(tmp_path_factory.mktemp("latent"))
    return made


@pytest.mark.parametrize("name", NAMES)
def test_tokens_do_not_depend_on_the_schedule(name: str, qwen3: Path) -> None:
    """Chunks, pages, hits and retractions: a prompt's own tokens see rounded keys and values from the start."""
    want = [tokens(each) for each in generate(qwen3, PROMPTS, GREEDY, kv_cache_dtype=name)]
    assert want != [tokens(each) for each in generate(qwen3, PROMPTS, GREEDY)], "nothing is rounded"
    for changes in SCHEDULES[NAMES.index(name) :: len(NAMES)]:
        got = [tokens(each) for each in generate(qwen3, PROMPTS, GREEDY, kv_cache_dtype=name, **changes)]
        assert got == want, changes


@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.full)])
def test_latent_rows_are_kept_in_8_bits_too(name: str, latent: Path) -> None:
    """With prefixes that are shared, short chunks, and hardly any room."""
    whole = run(LATENT.make_engine(latent, kv_cache_dtype=name), PROMPTS, 20)
    for changes in ({"chunked_prefill_size": 7}, {"max_total_tokens": 160, "chunked_prefill_size": 16}):
        assert run(LATENT.make_engine(latent, kv_cache_dtype=name, **changes), PROMPTS, 20) == whole
    core = LATENT.make_engine(latent, kv_cache_dtype=name, max_total_tokens=400)
    assert core.executor.info.kv_bytes == (400 + 4) * 2 * (24 + 8 + 2)  # a byte a number, two of the scale


@pytest.mark.parametrize("length", [31, 32])
def test_a_hit_equals_a_miss(length: int, qwen3: Path) -> None:
    """What is found in the cache is what would be written."""
    core = make_core(qwen3, kv_cache_dtype="int8")
    run(core, [LONG], 1)
    asked = [LONG[:length] + prompt(6, length)]
    found = run(core, asked, 12)
    assert found == run(make_core(qwen3, kv_cache_dtype="int8", disable_radix_cache=True), asked, 12)
    assert core.pages.tree.count(LONG[:length]) == length // 16


def test_a_token_takes_half_of_the_bytes(qwen3: Path) -> None:
    """And two for the scale of each head."""
    sizes = [
        make_core(qwen3, max_total_tokens=1600, dtype="bfloat16", kv_cache_dtype=name).executor.info.kv_bytes
        for name in ("auto", *NAMES)
    ]
    assert sizes[1] == sizes[2]
    assert 0.5 < sizes[1] / sizes[0] < 0.57


@pytest.mark.parametrize("name", NAMES)
def test_numbers_stay_within_what_a_scale_says(name: str) -> None:
    """Half a step of int8, a sixteenth of the number in e4m3; zeros stay, what is not finite stays visible."""
    dtype = DTYPES["int8" if name == "int8" else "float8_e4m3fn"]
    torch.manual_seed(0)
    x = torch.randn(50, 3, 63) * torch.logspace(-20, 20, 50)[:, None, None]
    x[7] = 0
    numbers, scale = quantise(x, dtype)
    back = dequantise(numbers, scale)
    largest = x.abs().amax(-1, keepdim=True)
    bound = largest / MOST[dtype] * 0.51 if name == "int8" else torch.maximum(x.abs() / 15.9, largest / 448 / 256)
    assert bool(((back - x).abs() <= bound + largest * 2**-8 * (back.abs() >= largest * 0.99)).all())
    assert bool((back[7] == 0).all())
    assert torch.equal(rounded(x, dtype), back)
    for bad in (float("nan"), float("inf")):
        x[3, 1, 5] = bad
        assert not bool(dequantise(*quantise(x, dtype))[3, 1].isfinite().all())


def test_who_cannot_is_refused_by_name(qwen3: Path, latent: Path, tmp_path: Path) -> None:
    """A backend without such a cache, and a model that keeps nothing; before a weight is read."""
    file = tmp_path / "plain_attention.py"
    file.write_text(
        "from dataclasses import replace\n\nfrom dovetail_backends.torch_native import TorchNativeBackend\n\n\n"
        'class Plain(TorchNativeBackend):\n    plugin_name = "plain"\n'
        "    caps = replace(TorchNativeBackend.caps, cache_dtypes=frozenset())\n"
    )
    with pytest.raises(PluginError, match=r"plain.* needs a cache in int8 with scales, which it does not provide"):
        LATENT.make_engine(latent, [file], kv_cache_dtype="int8", attention_backend="plain")
    config = dense_config(read_config(qwen3))
    blind = replace(config, layers=tuple(replace(spec, causal=False) for spec in config.layers))
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype int8: Qwen3ForCausalLM caches no keys and values"):
        with_cache_dtype(blind, EngineSettings(kv_cache_dtype="int8"))
    spec = dense_layers(1, num_qo_heads=2, num_kv_heads=2, head_dim=8)[0]
    with pytest.raises(ModelError, match=r"cache_dtype 'int4': possible: int8, float8_e4m3fn"):
        replace(spec, cache_dtype="int4")  # type: ignore[arg-type]
