"""`--int8.head int8` and `--int4.head int8`: an output head that is packed once it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_quantised import tokens
from torch import Tensor

from dovetail.contracts.device import DeviceView
from dovetail.contracts.layers import BuildContext, Parallel
from dovetail.contracts.quantization import Stored
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.weight_size import head_row_bytes, weight_size
from dovetail.runtime.kernels.binding import KernelBinder, LoadedSet
from dovetail.sdk.layers.embedding import Embedding, LMHead
from dovetail.sdk.layers.packed import PackedFactory
from dovetail.sdk.layers.plain import PLAIN
from dovetail.sdk.quantization.forms import Scaled
from dovetail_backends.kernels.cpu import CpuKernels
from dovetail_models.llama import Llama
from dovetail_testing.conformance.model_runtime import TinyEngine
from dovetail_testing.models import make_model

FORM = Scaled()
TOKENS, HIDDEN = 21, 32


def context(dtype: torch.dtype, *, cpu: bool = True, parallel: Parallel | None = None) -> BuildContext:
    """Return what packs heads, with the kernel set or in plain torch."""
    sets = [LoadedSet("cpu", "cpu", CpuKernels(), False)] if cpu else []
    return BuildContext(
        device=torch.device("cpu"),
        dtype=dtype,
        factory=PackedFactory(Stored({}), PLAIN, head=FORM),
        parallel=parallel or Parallel(),
        kernels=KernelBinder(sets, DeviceView("cpu")),
    )


def filled(layer: Any, weight: Tensor) -> Any:
    """Load a layer as the loader does."""
    with torch.inference_mode():
        for slot in layer.slots():
            layer.place(slot, weight)
        layer.finalize()
    return layer


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_head_written_out(dtype: torch.dtype, cpu: bool) -> None:
    """Of one's own and of a tied one, whose embedding keeps its numbers; ranks have the same rows between them."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    hidden = torch.randn(5, HIDDEN, generator=generator).to(dtype)
    want = hidden.float() @ FORM.dequantise(FORM.quantise(weight), torch.float32).T
    close = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    ctx = context(dtype, cpu=cpu)
    own = filled(LMHead(TOKENS, HIDDEN, ctx), weight)
    embedding = filled(Embedding(TOKENS, HIDDEN, ctx), weight)
    tied = filled(LMHead(TOKENS, HIDDEN, ctx, embedding), weight)
    torch.testing.assert_close(own(hidden).float(), want, **close)
    assert torch.equal(own(hidden), tied(hidden))
    assert torch.equal(embedding(torch.arange(TOKENS)), weight)
    assert not hasattr(own, "weight")

    parts = []
    for rank in range(2):
        ranks = Parallel(rank=rank, size=2, all_reduce=lambda share: share)
        part = filled(LMHead(TOKENS, HIDDEN, context(dtype, cpu=cpu, parallel=ranks)), weight)
        parts.append(part._product(hidden))
    torch.testing.assert_close(torch.cat(parts, -1)[:, :TOKENS], own(hidden))


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_an_engine_packs_the_head_where_it_is_asked_to(method: str, tmp_path: Path) -> None:
    """Tokens are those of a checkpoint whose head is written out from int8; else the head is as it was read."""
    folder, sizes = make_model(tmp_path, "LlamaForCausalLM"), {"quantization": method}
    asked = tokens(folder, options={method: {"head": "int8"}}, **sizes)
    kept = tokens(folder, **sizes)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = FORM.dequantise(FORM.quantise(tensors["lm_head.weight"]), torch.float32)
    save_file(tensors, file)
    assert tokens(folder, **sizes) == asked
    assert tokens(folder, options={method: {"head": "model"}}, **sizes) == asked
    assert kept == tokens(make_model(tmp_path / "again", "LlamaForCausalLM"), **sizes)


def test_the_copy_of_a_tied_head_is_counted(tmp_path: Path) -> None:
    """By what a row of it takes: numbers and a scale in int8."""
    folder = make_model(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
    config = TinyEngine(Llama, folder).config
    rows = [
        head_row_bytes(form, config, "bfloat16", is_repacked=is_repacked)
        for form, is_repacked in ((None, False), (None, True), (FORM, True), (FORM, False))
    ]
    assert rows == [0, 2 * config.hidden_size, config.hidden_size + 4, config.hidden_size + 4]
    found = [weight_size(ModelFolder(folder).headers, config, "bfloat16", head_row_bytes=row) for row in rows]
    assert [each.repacked_bytes for each in found] == [config.vocab_size * row for row in rows]
    assert [each.num_bytes - each.repacked_bytes for each in found] == [found[0].num_bytes] * 4


def test_a_packed_head_of_its_own_is_counted_by_what_stays(tmp_path: Path) -> None:
    """Its numbers and scales, by headers, by the config and as built; a repacked one takes what it took."""
    folder = make_model(tmp_path, "LlamaForCausalLM")
    config = TinyEngine(Llama, folder).config
    headers, numbers = ModelFolder(folder).headers, config.vocab_size * config.hidden_size
    less = config.vocab_size * (config.hidden_size - 4)  # than two bytes a number
    for known in ({"headers": headers}, {"headers": None}, {"headers": headers, "built": 2 * numbers}):
        sizes = [
            weight_size(config=config, dtype="bfloat16", head_row_bytes=row, **known)  # type: ignore[arg-type]
            for row in (0, 2 * config.hidden_size, config.hidden_size + 4)
        ]
        assert [each.repacked_bytes for each in sizes] == [0, 0, 0]
        assert [sizes[0].num_bytes - each.num_bytes for each in sizes] == [0, 0, less]
