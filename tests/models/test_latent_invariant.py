"""DeepSeek, Kimi-Linear and Ling with `--batch-invariant`: the same bits however a reply came."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from delta_models import make_delta
from recurrent_replies import check_reply, check_retracted

from dovetail.contracts.model import ModelPlugin
from dovetail.runtime.batch_invariance import claims
from dovetail_models.deepseek import DeepseekV2, DeepseekV3, DeepseekV32, Glm4MoeLite
from dovetail_models.kimi_linear import KimiLinear
from dovetail_models.latent import by_heads
from dovetail_models.ling import Ling

full = pytest.mark.full
FOLDS = frozenset({"kimi_linear", "bailing_hybrid"})
"""Their states are cached at multiples of 64 tokens, the rows of the others at every page."""
KINDS = ["deepseek_v3", "kimi_linear", "bailing_hybrid", pytest.param("deepseek_v2", marks=full)]
KINDS += [pytest.param(kind, marks=full) for kind in ("deepseek_v32", "glm4_moe_lite")]
LENGTHS = [63, 64, 65, 127, 128, 129, pytest.param(1000, marks=full)]


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A checkpoint and its kind."""
    folder = tmp_path_factory.mktemp(request.param)
    indexed = {"index_topk": 8192} if request.param == "deepseek_v32" else {}
    make_delta(folder, request.param, max_position_embeddings=8192, **indexed)
    return request.param, folder


@pytest.mark.sampled("dtype", "made")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reply_has_the_same_bits_however_it_came(length: int, dtype: str, made: tuple[str, Path]) -> None:
    """Cold, behind a cached prefix, in other chunks, and beside others."""
    kind, folder = made
    check_reply(folder, length, grid=64 if kind in FOLDS else 4, sizes=(64, 23), dtype=dtype)


@full
def test_a_reply_has_the_same_bits_beside_40_others(made: tuple[str, Path]) -> None:
    """In steps of decode rows and chunks of several prompts."""
    kind, folder = made
    check_reply(folder, 129, grid=64 if kind in FOLDS else 4, sizes=(), num_others=40)


@pytest.mark.first(1)
def test_a_retracted_reply_goes_on_with_the_same_bits(made: tuple[str, Path]) -> None:
    """What was decoded is computed again as a prompt, and behind it nothing differs."""
    check_retracted(made[1])


@full
@pytest.mark.parametrize("cache_dtype", ["fp8", "int8"])
def test_it_holds_with_a_cache_in_8_bits(cache_dtype: str, made: tuple[str, Path]) -> None:
    """Rows are rounded when they are written, and read rounded by every chunk."""
    kind, folder = made
    check_reply(folder, 129, grid=64 if kind in FOLDS else 4, sizes=(50,), kv_cache_dtype=cache_dtype)


@pytest.mark.parametrize("plugin", [DeepseekV2, DeepseekV3, DeepseekV32, Glm4MoeLite, KimiLinear, Ling])
def test_a_model_claims_it(plugin: type[ModelPlugin]) -> None:
    """Each says it itself: it is not inherited."""
    assert claims(plugin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(3, 16, 32), (4, 20, 100), (1, 8, 24), pytest.param((16, 128, 512), marks=full)], ids=str
)
def test_a_product_of_heads_takes_blocks_of_rows(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Any number of rows, none included, gives what a plain product does, and each row the bits that it has alone."""
    torch.manual_seed(0)
    heads, num_in, num_out = shape
    # Neither is contiguous, as in a layer.
    x = torch.randn(70, heads, num_in + 8).to(dtype)[..., :num_in]
    for weight in (torch.randn(shape), torch.randn(heads, num_out, num_in).transpose(1, 2)):
        weight = weight.to(dtype)
        whole = by_heads(x, weight)
        want = torch.einsum("tni,nio->tno", x.double(), weight.double())
        torch.testing.assert_close(whole.double(), want, rtol=2e-2, atol=2e-1)
        for num in (1, 2, 3, 15, 16, 17, 33):
            for at in range(0, len(x) - num, 5):
                assert torch.equal(by_heads(x[at : at + num], weight), whole[at : at + num]), (num, at)
        assert by_heads(x[:0], weight).shape == (0, heads, num_out)
