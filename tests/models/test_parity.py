"""Every family gives transformers' logits and tokens in every schedule, by its own plugin and through transformers.

In CI a sample, of one plugin each; `DOVETAIL_FULL=1` takes them all, for ten minutes.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from families import DECODERS, make_checkpoint
from parity import check, check_logits, check_schedules

from dovetail.errors import ConfigError
from dovetail.plugins import Registry

FULL = bool(os.environ.get("DOVETAIL_FULL"))
only_full = pytest.mark.skipif(not FULL, reason="DOVETAIL_FULL=1 runs it")

REFUSED = {
    "mamba2": "recurrent states alone",
    "llama4_text": "attention within chunks",
    "deepseek_v32": "layers of type indexed_attention",
    "glm_moe_dsa": "layers of type indexed_attention",
    "deepseek_v4": "layers of type heavily_compressed_attention",
}
"""What transformers builds and is not served through it, and a part of the reason."""
SERVED = [kind for kind in DECODERS if kind not in REFUSED]
SAMPLE = {"gpt_oss", "nemotron_h"}
"""Experts, windows, sinks; states, and layers that look at one token."""


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in SAMPLE else only_full) for k in SERVED])
def test_through_transformers(kind: str, tmp_path: Path) -> None:
    """Transformers' own modules over the paged cache."""
    model = make_checkpoint(tmp_path, kind)
    if FULL:
        check(tmp_path, model, model_impl="transformers")
    else:
        check_schedules(tmp_path, model, model_impl="transformers")


OWN = {
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
"""Families with a plugin of their own, besides those of the other tests."""


@pytest.mark.parametrize("kind", OWN)
def test_by_its_own_plugin(kind: str, tmp_path: Path) -> None:
    """Dovetail's layers over the paged cache."""
    model = make_checkpoint(tmp_path, kind)
    assert type(model).__name__ == OWN[kind]
    if FULL:
        check(tmp_path, model, model_impl="dovetail")
    else:
        check_logits(tmp_path, model, chunk=7, num_new=8, model_impl="dovetail")


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="without a GPU, Triton runs in its interpreter")
@only_full
@pytest.mark.parametrize("kind", ["qwen3_moe", "mistral"])
def test_on_triton(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the other built-in backend, in its interpreter."""
    from dovetail_backends.triton import TritonBackend

    monkeypatch.setattr(TritonBackend, "caps", replace(TritonBackend.caps, devices=frozenset({"cpu", "cuda"})))
    monkeypatch.setattr("dovetail.plugins.plan._why_not", lambda record, device: None)  # its manifest says CUDA
    model = make_checkpoint(tmp_path, kind, head_dim=32)
    check_logits(tmp_path, model, chunk=64, num_new=2, attention_backend="triton")


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_served_is_refused(kind: str, tmp_path: Path) -> None:
    """With its name and a reason."""
    model = make_checkpoint(tmp_path, kind)
    with pytest.raises(ConfigError, match=REFUSED[kind]) as caught:
        check_schedules(tmp_path, model, model_impl="transformers")
    assert type(model).__name__ in str(caught.value)


def test_the_page_names_every_plugin() -> None:
    """`docs/models.md` lists the built-in architectures."""
    page = (Path(__file__).parents[2] / "docs/models.md").read_text("utf-8")
    builtin = {record.name for record in Registry.scan().of_kind("model") if record.builtin}
    assert [name for name in builtin if f"`{name}`" not in page and name != "transformers"] == []


def test_most_are_served() -> None:
    """Of the decoders that can be built."""
    assert len(SERVED) >= 55
