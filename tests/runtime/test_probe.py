"""Every start computes a made-up request: what fails or differs ends it in a line, and nothing of it stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.kernels import Ask, Claim, KernelSet
from dovetail.runtime.kernels.attempts import ROWS
from dovetail.runtime.kernels.binding import LoadedSet
from dovetail.runtime.runner import ModelRunner
from dovetail.runtime.start import probe
from dovetail.sdk.layers.embedding import LMHead
from dovetail.sdk.layers.ops.reference import rms_norm
from dovetail_models.llama import DenseDecoder, Llama
from dovetail_models.transformers import TransformersModel
from dovetail_testing.engine import make_core
from dovetail_testing.models import make_model

HYBRID: dict[str, Any] = {
    **{"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8},
    "mamba_dt_rank": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model of Dovetail's own."""
    return make_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


def runner_of(folder: Path, **changes: Any) -> ModelRunner:
    core = make_core(folder, **changes)
    found: ModelRunner = core.executor.runner  # type: ignore[attr-defined]
    return found


def calls(monkeypatch: pytest.MonkeyPatch, cls: Any) -> list[tuple[int, int]]:
    """Return a list of the forward passes of a model: decode rows and tokens."""
    found: list[tuple[int, int]] = []
    inner: Callable[..., Tensor] = cls.forward

    def forward(self: Any, ids: Tensor, batch: ForwardBatch) -> Tensor:
        found.append((batch.num_decode, batch.num_tokens))
        return inner(self, ids, batch)

    monkeypatch.setattr(cls, "forward", forward)
    return found


def test_a_model_computes_a_chunk_and_a_decode_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more than these two: a start of a large model waits for each."""
    found = calls(monkeypatch, DenseDecoder)
    runner_of(folder)
    assert found == [(0, probe.LENGTH - 1), (1, 1)]


def test_one_of_foreign_code_is_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in two pieces, and decoding."""
    from dovetail_models.transformers.decoder import TransformersDecoder

    found = calls(monkeypatch, TransformersDecoder)
    runner_of(folder, model_impl="transformers")
    assert found == [(0, 12), (0, 5), (0, 5), (1, 1), (1, 1)]


@pytest.mark.parametrize("pages", [{"page_size": 1, "max_total_tokens": 3}, {"context_length": 1}])
def test_a_cache_of_few_tokens_is_room_enough(
    pages: dict[str, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The made-up request is as long as one that could be served."""
    found = calls(monkeypatch, DenseDecoder)
    runner_of(folder, **pages)
    assert sum(tokens for _, tokens in found) == (3 if "page_size" in pages else 1)


@pytest.mark.parametrize("way", ["chunk", "decode", "head"])
def test_a_model_that_fails_ends_its_start(way: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, with who it is, by whom it is served, and what it said."""
    inner: Callable[..., Tensor] = DenseDecoder.forward

    def forward(self: Any, ids: Tensor, batch: ForwardBatch) -> Tensor:
        if way == ("decode" if batch.num_decode else "chunk"):
            raise AttributeError("no such\nlayer")
        return inner(self, ids, batch)

    def head(self: Any, hidden: Tensor) -> Tensor:
        raise AttributeError("no such\nlayer")

    monkeypatch.setattr(DenseDecoder, "forward", forward)
    if way == "head":
        monkeypatch.setattr(LMHead, "forward", head)
    with pytest.raises(PluginError) as caught:
        make_core(folder)
    said = str(caught.value)
    assert said.startswith("LlamaForCausalLM cannot be served by model 'LlamaForCausalLM' of dovetail")
    assert "its first tokens fail: AttributeError: no such layer;" in said
    assert "\n" not in said


def test_a_kernel_that_fails_ends_the_start_with_its_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets that do not come with Dovetail are named, and what leaves them out."""

    class Raises(KernelSet):
        def serves(self, ask: Ask) -> Claim | str:
            return Claim(ask.rows) if ask.op == "rms_norm" else "no"

        def make(self, ask: Ask) -> Any:
            return fails_late

    def fails_late(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if len(x) != ROWS:  # each kernel of a package is tried with so many
            raise AttributeError("no_such_thing")
        return rms_norm(x, weight, eps)

    swift = LoadedSet("swift", "kernels 'swift' of dovetail-swift 1", Raises(), True)
    monkeypatch.setattr("dovetail.runtime.start.check.load_sets", lambda plugins: [swift])
    with pytest.raises(PluginError) as caught:
        make_core(folder)
    said = str(caught.value)
    assert " with kernels 'swift' of dovetail-swift 1: its first tokens fail: AttributeError: " in said
    assert "choose another --model-impl or --attention-backend, or --kernels plain, or report it" in said


def test_memory_that_runs_out_is_no_fault_of_a_plugin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as before."""

    def forward(self: Any, ids: Tensor, batch: ForwardBatch) -> Tensor:
        raise torch.OutOfMemoryError("17 GiB")

    monkeypatch.setattr(DenseDecoder, "forward", forward)
    with pytest.raises(torch.OutOfMemoryError, match="17 GiB"):
        make_core(folder)


def forgets(self: Any, ids: Tensor, batch: ForwardBatch) -> Tensor:
    """A chunk is computed as though its request began with it: what Jamba's mixers do."""
    hidden: Tensor = DenseDecoder.forward(self, ids, batch)
    return hidden + ((1.0 + batch.positions[:1, None]) * (batch.num_decode == 0)).to(hidden.dtype)


def drifts(self: Any, ids: Tensor, batch: ForwardBatch) -> Tensor:
    """A decode step computes something else."""
    hidden: Tensor = DenseDecoder.forward(self, ids, batch)
    return hidden * (1.0 + batch.num_decode)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("fault", "what"), [(forgets, "a prompt in two pieces"), (drifts, "tokens that are decoded")])
def test_schedules_that_differ_end_a_start(
    fault: Callable[..., Tensor], what: str, dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the plugin asks for it: a class that wraps another's code; one of its own is left alone."""
    wrong = type("Wrong", (DenseDecoder,), {"forward": fault})
    monkeypatch.setattr(Llama, "build", classmethod(lambda cls, config, ctx: wrong(config, ctx)))
    make_core(folder, dtype=dtype)
    monkeypatch.setattr(Llama, "compares_schedules", True)
    with pytest.raises(PluginError, match=f"LlamaForCausalLM cannot be served by .* other values for {what} than"):
        make_core(folder, dtype=dtype)


@pytest.mark.parametrize("kind", ["JambaForCausalLM", "ZambaForCausalLM"])
def test_mixers_that_take_a_state_up_for_one_token_are_refused(kind: str, tmp_path: Path) -> None:
    """They have the interface of others, and forget a prompt's first chunk in the second."""
    changes = HYBRID if kind.startswith("J") else ZAMBA
    make_model(tmp_path, kind, **changes)
    with pytest.raises(ConfigError, match=f"^{kind} cannot be served by model 'transformers' of .*in two pieces"):
        make_core(tmp_path, model_impl="transformers")


ZAMBA: dict[str, Any] = {
    **{"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 8},
    **{"mamba_dt_rank": 4, "n_mamba_heads": 2, "num_key_value_heads": 4, "attention_head_dim": 32},
}


def test_nothing_of_it_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are zeros, no row is taken, and the engine's memory is as that of one that never computed it."""
    for impl in ("dovetail", "transformers"):
        runner = runner_of(folder, model_impl=impl)
        state: Any = runner.state
        assert not any(memory.any() for pool in runner.pool.pools for memory in pool._memory.values())
        assert not state.pages.any()
        assert not state.lens.any()
        assert not any(tensor.any() for tensor in (*state.page_tables, state.next_ids, state.seq_lens))
        assert "forward" not in vars(runner.model)


def test_a_rehearsal_computes_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled ahead is what the probe launches: nothing is compiled twice, or late."""
    found = calls(monkeypatch, DenseDecoder)
    seen: list[list[tuple[int, int]]] = []
    inner = probe.Probe.run

    def run(self: probe.Probe) -> None:
        self.rehearse()
        seen.append(list(found))
        found.clear()
        inner(self)

    monkeypatch.setattr(probe.Probe, "run", run)
    runner_of(folder)
    assert seen == [found]


def test_transformers_asks_for_it() -> None:
    """Whatever it serves."""
    assert TransformersModel.compares_schedules
    assert not Llama.compares_schedules
