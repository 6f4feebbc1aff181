"""`--quantization fp8|int8|int4` of a plain checkpoint: what is computed, what stays plain, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from quantised_models import loaded, matrices, plugin_of
from safetensors.torch import load_file, save_file
from test_quantised import tokens

from dovetail.contracts.errors import ConfigError
from dovetail.runtime.hf_config import architecture, read_config
from dovetail.sdk.layers.packed import PackedLinear
from dovetail.sdk.quantization.forms import Form, Int4, Mxfp4, Scaled
from dovetail_testing.conformance.model_runtime import TinyEngine
from dovetail_testing.models import make_model

PROMPTS = [[5, 7, 11, 13, 17, 19, 23, 29], [3, 4]]
FORMS: dict[str, Any] = {
    "int8": lambda num_in: Scaled(),
    "fp8": lambda num_in: Scaled(torch.float8_e4m3fn),
    "int4": lambda num_in: next((Int4(size) for size in (64, 32) if num_in % size == 0), None),
}


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "phi3"])
@pytest.mark.parametrize("name", FORMS)
def test_what_is_quantised_while_it_loads(name: str, family: str, tmp_path: Path) -> None:
    """Logits are those of a checkpoint whose matrices are written out from quantised numbers; the rest is as it was."""
    make_checkpoint(
        tmp_path / "plain", family, **({"moe_intermediate_size": 64} if family in ("qwen3_moe", "deepseek_v3") else {})
    )
    model, read = loaded(tmp_path / "plain", name)
    file = tmp_path / "plain/model.safetensors"
    tensors = load_file(file)
    for matrix in matrices(tmp_path / "plain"):
        form = FORMS[name](tensors[matrix].shape[1])
        if form is not None:
            tensors[matrix] = form.dequantise(form.quantise(tensors[matrix]), torch.float32)
    save_file(tensors, file)
    engine = TinyEngine(plugin_of("model", architecture(read_config(tmp_path / "plain"), tmp_path)), tmp_path / "plain")
    want = engine.prefill_logits(PROMPTS)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    assert read.notes == ("matrices quantised while they are read",)
    engine.model = model
    for mine, right in zip(engine.prefill_logits(PROMPTS), want, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3 * float(right.abs().max()))


def test_an_engine_takes_the_flag(tmp_path: Path) -> None:
    """By name only: `auto` never changes a model's precision; with dummy weights too."""
    folder = make_model(tmp_path, "LlamaForCausalLM")
    plain = tokens(folder)
    for name in FORMS:
        assert tokens(folder, quantization=name) != plain or name == "int8"
        assert all(len(row) == 12 for row in tokens(folder, quantization=name, load_format="dummy"))
        assert all(len(row) == 12 for row in tokens(folder, quantization=name, dtype="bfloat16"))


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    """A checkpoint that is quantised already, one without a fitting matrix, and one that another library reads."""
    folder = make_model(tmp_path / "awq", "LlamaForCausalLM", quantization_config={"quant_method": "awq", "bits": 4})
    for name in ("int8", "int4"):
        with pytest.raises(
            ConfigError, match=r"it reads plain ones.* and this checkpoint has quant_method 'awq'; leave --quantization"
        ):
            tokens(folder, quantization=name)
    folder = make_model(tmp_path / "odd", "LlamaForCausalLM", hidden_size=40, intermediate_size=72, head_dim=10)
    with pytest.raises(ConfigError, match="no matrix that can be quantised while it loads"):
        tokens(folder, quantization="int4")
    folder = make_model(tmp_path / "other", "LlamaForCausalLM")
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM is read by another library, which does not quantise"):
        tokens(folder, quantization="int8", model_impl="transformers")


@pytest.mark.parametrize(
    ("form", "most"),
    [(Scaled(), 0.009), (Scaled(torch.float8_e4m3fn), 0.03), (Int4(32), 0.1), (Int4(None), 0.16), (Mxfp4(), 0.15)],
    ids=str,
)
def test_forms_keep_what_their_bits_allow(form: Form, most: float) -> None:
    """The error of normal numbers is within the form's step; zeros, huge and tiny rows stay themselves."""
    torch.manual_seed(0)
    weight = torch.randn(12, 128) * torch.logspace(-6, 6, 12)[:, None]
    weight[3] = 0
    got = form.dequantise(form.quantise(weight), torch.float32)
    assert torch.equal(got[3], weight[3])
    error = (got - weight).norm(dim=1) / weight.norm(dim=1).clamp_min(1e-30)
    assert float(error.max()) < most
