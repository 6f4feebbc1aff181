"""With `--batch-invariant`, a request's tokens and the bits of its logits do not depend on what is beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.base.settings import EngineSettings
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import ModelPlugin
from dovetail.demo import MODEL_DIR
from dovetail.messages import SamplerParams, Submit, TokenDelta
from dovetail.plugins import Registry, load, make_plan
from dovetail.runtime.batch_invariance import check_model, claims
from dovetail.sdk.layers.linear import PlainLinear
from dovetail.sdk.layers.ops import invariant
from dovetail.sdk.layers.plain import PLAIN
from dovetail_models.olmo2 import Olmo2
from dovetail_models.qwen3 import Qwen3
from dovetail_testing import check_class, conformance_class
from dovetail_testing.engine import generate, make_core, serve, tokens
from dovetail_testing.models import make_model

LENGTHS = (3, 150, 150, 40)
ON = {"batch_invariant": True}


def prompts_of(vocab: int) -> list[list[int]]:
    """Prompts of which two have a prefix in common."""
    rng = random.Random(4)
    found = [[rng.randrange(5, vocab) for _ in range(n)] for n in LENGTHS]
    found[2][:140] = found[1][:140]
    return found


def asked(num: int) -> list[SamplerParams]:
    """Greedy and sampled requests, which tell their log probabilities."""
    greedy = SamplerParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    sampled = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "max_tokens": 8, "ignore_eos": True, "logprobs": 3}
    return [greedy if i % 2 == 0 else SamplerParams(seed=11 + i, **sampled) for i in range(num)]


def seen(deltas: Sequence[TokenDelta]) -> tuple[list[int], list[Any]]:
    """Tokens, and log probabilities to the last bit."""
    return tokens(deltas), [logprob for delta in deltas for logprob in delta.logprobs or ()]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with experts."""
    return make_model(
        tmp_path_factory.mktemp("experts"), "Qwen3MoeForCausalLM", num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=40, decoder_sparse_step=1, norm_topk_prob=True, mlp_only_layers=[],
    )  # fmt: skip


@pytest.mark.first(1)
@pytest.mark.sampled
@pytest.mark.parametrize("which", ["demo", "experts"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_reply_has_the_same_bits_in_any_company(which: str, dtype: str, experts: Path) -> None:
    """Neighbours, chunks, pages and hits in the prefix cache change nothing, greedy and sampled."""
    says_the_same(MODEL_DIR if which == "demo" else experts, dtype=dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("which", ["demo", "experts"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_packed_integers_change_nothing(which: str, quantization: str, dtype: str, experts: Path) -> None:
    """PyTorch's products with them compute each row by itself, and so do activations of experts between."""
    says_the_same(MODEL_DIR if which == "demo" else experts, dtype=dtype, quantization=quantization)


def says_the_same(folder: Path, **settings: Any) -> None:
    """Compare replies to requests alone, together, and in small chunks."""
    prompts = prompts_of(190)
    params = asked(len(prompts))
    one_by_one = {"disable_radix_cache": True, "max_running_requests": 1}
    alone = [seen(deltas) for deltas in generate(folder, prompts, params, **settings, **one_by_one, **ON)]
    together = generate(folder, prompts, params, **settings, **ON)
    assert [seen(deltas) for deltas in together] == alone
    small: dict[str, Any] = {"chunked_prefill_size": 23, "page_size": 3, "max_running_requests": 5}
    assert [seen(deltas) for deltas in generate(folder, prompts, params, **settings, **small, **ON)] == alone


@pytest.mark.full
def test_a_retracted_request_goes_on_with_the_same_bits() -> None:
    """A request that gave way and was computed again says what it would have said."""
    prompts, long = [[7 * i + j for j in range(10)] for i in range(6)], {"max_tokens": 24, "ignore_eos": True}
    params = [SamplerParams(temperature=0.8 * (i % 2), seed=i, logprobs=1, **long) for i in range(6)]
    tight = generate(MODEL_DIR, prompts, params, dtype="bfloat16", page_size=4, max_total_tokens=96, **ON)
    assert max(deltas[-1].num_retractions for deltas in tight) > 0
    roomy = generate(MODEL_DIR, prompts, params, dtype="bfloat16", **ON)
    assert [seen(deltas) for deltas in tight] == [seen(deltas) for deltas in roomy]


def test_a_hit_has_the_bits_of_what_was_computed() -> None:
    """A prompt whose beginning is cached is answered as one that is computed whole."""
    prompts = prompts_of(190)
    params = asked(2)[1]
    [want] = generate(MODEL_DIR, [prompts[2]], params, dtype="bfloat16", **ON)
    first, second = Submit(rid="a", prompt_ids=prompts[1], params=params), prompts[2]
    found = serve(MODEL_DIR, [first, Submit(rid="b", prompt_ids=second, params=params)], dtype="bfloat16", **ON)
    assert found[1][-1].cached_tokens > 100
    assert seen(found[1]) == seen(want)


@pytest.mark.parametrize(
    "more",
    [
        {"kv_cache_dtype": "fp8"},
        *(pytest.param(more, marks=pytest.mark.full) for more in ({"kv_cache_dtype": "int8"}, {"speculator": "ngram"})),
    ],
    ids=str,
)
def test_it_holds_with_other_features(more: dict[str, Any]) -> None:
    """A cache in 8 bits, and drafts that are verified several tokens a step."""
    prompts, params = prompts_of(190), asked(len(LENGTHS))
    together = [seen(deltas) for deltas in generate(MODEL_DIR, prompts, params, dtype="bfloat16", **more, **ON)]
    for number in (2, 3):
        [alone] = generate(
            MODEL_DIR, prompts[number : number + 1], params[number], dtype="bfloat16", chunked_prefill_size=37,
            **more, **ON,
        )  # fmt: skip
        assert seen(alone) == together[number]


def claiming(name: str) -> bool:
    return claims(load(make_plan(Registry.scan(), model=name, device="cpu"), "engine").get("model", name))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_model_claims_it(name: str) -> None:
    """So the kit's check, which `tests/testing/test_builtins.py` runs for them, is not skipped."""
    assert claiming(name)


FEW_EXPERTS = {"num_experts": 8, "moe_intermediate_size": 32}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
ROPES = {"full_attention": ROPE, "sliding_attention": ROPE}
OTHERS = {"MistralForCausalLM": {}, "MixtralForCausalLM": {}, "Qwen3MoeForCausalLM": FEW_EXPERTS}
OTHERS |= {"GptOssForCausalLM": {}}
OTHERS |= {"Gemma2ForCausalLM": {}, "Gemma3ForCausalLM": {}, "Gemma4ForCausalLM": {"rope_parameters": ROPES}}
"""Models that claim it and do not take the kit at every run, with changes of their configurations."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "MixtralForCausalLM" else pytest.mark.full) for name in OTHERS]
)
def test_a_model_that_claims_it_passes_the_kit(name: str) -> None:
    """The kit's check of the layers between attention runs for each of them, and is not skipped."""
    assert claiming(name)
    report = check_class(conformance_class("model", name, configs=[OTHERS[name]]), "test_batch_invariance")
    assert report.passed, report.text()
    assert "1 passed" in report.text()


def test_a_subclass_says_it_itself() -> None:
    """What a model claims does not pass to what is made of it."""
    assert claims(Qwen3)
    assert not claims(Olmo2)
    assert not claims(type("Changed", (Qwen3,), {}))


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_takes_blocks_of_rows(rows: int, dtype: torch.dtype) -> None:
    """Any number of rows, none included, gives what a plain product does, and each row the bits that it has alone."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 72).to(dtype), torch.randn(50, 72).to(dtype), torch.randn(50).to(dtype)
    got = invariant.linear(x, weight, bias)
    torch.testing.assert_close(got, torch.nn.functional.linear(x, weight, bias), rtol=2e-2, atol=2e-2)
    assert all(torch.equal(invariant.linear(x[i : i + 1], weight, bias)[0], got[i]) for i in range(rows))


@pytest.mark.usefixtures("cuda_taken")
def test_what_cannot_is_refused_by_name(tmp_path: Path) -> None:
    """A model, a device and an attention backend that do not say that they can, before weights."""
    folder = make_model(tmp_path / "olmo", "Olmo2ForCausalLM")
    with pytest.raises(ConfigError, match=r"--batch-invariant: the model Olmo2ForCausalLM .Olmo2. does not say"):
        make_core(folder, **ON)
    settings = EngineSettings(batch_invariant=True)
    config: Any = type("Config", (), {"architecture": "Qwen3MoeForCausalLM", "experts": 8})
    cuda, ranks = torch.device("cuda"), EngineSettings(batch_invariant=True, tensor_parallel_size=2)
    check_model(Qwen3, config, torch.device("cpu"), ranks)
    with pytest.raises(ConfigError, match=r"--batch-invariant: sums of ranks on cuda"):
        check_model(Qwen3, config, cuda, ranks)
    check_model(Qwen3, config, cuda, settings)
    check_model(Qwen3, config, cuda, EngineSettings())


def test_packed_weights_that_depend_on_rows_are_refused() -> None:
    """Plain torch multiplies by them in another way for each number of rows; the message says which, before weights."""
    refused = r"--batch-invariant: packed_linear N=\d+ K=\d+ form=Scaled.*: no kernel set computes each row by itself"
    with pytest.raises(ConfigError, match=rf"{refused} .cpu: torch has no product for .*; use a plain checkpoint"):
        make_core(MODEL_DIR, quantization="fp8", **ON)
    assert make_core(MODEL_DIR, quantization="fp8")


def test_a_backend_that_does_not_claim_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name it is refused with the reason, before weights are read."""
    from dovetail_backends.torch_native import TorchNativeBackend

    monkeypatch.setattr(TorchNativeBackend, "caps", replace(TorchNativeBackend.caps, batch_invariant=False))
    with pytest.raises(PluginError, match=r"torch_native.*: it is not batch-invariant, and --batch-invariant is given"):
        make_core(MODEL_DIR, attention_backend="torch_native", **ON)


def test_two_backends_for_one_request_are_refused() -> None:
    """Each by itself can; but what one decoded the other may have to compute again."""
    from dovetail.runtime.attention.hybrid import hybrid
    from dovetail_backends.torch_native import TorchNativeBackend
    from dovetail_backends.triton import TritonBackend

    assert TorchNativeBackend.caps.batch_invariant
    assert TritonBackend.caps.batch_invariant
    assert not hybrid(TritonBackend, TorchNativeBackend).caps.batch_invariant


def test_without_it_nothing_changes() -> None:
    """Layers are built as before where it is not asked for."""
    ctx = BuildContext(device=torch.device("cpu"), dtype=torch.float32, factory=PLAIN)
    made = ctx.linear("x", 8, 8)
    assert isinstance(made, PlainLinear)
    assert not made._is_invariant
    assert ModelPlugin.batch_invariant is False
