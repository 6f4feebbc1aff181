"""Every family says on two and on four ranks what it says on one; what cannot be divided is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rank_engines import beside, make_core, said

from dovetail.base.settings import EngineSettings
from dovetail.contracts.errors import ConfigError
from dovetail.demo import MODEL_DIR
from dovetail.runtime.memory.checks import check_settings
from dovetail_server.cli import plan

FAMILIES = beside("families", "models/families.py")
QUANTISED = beside("quantised_checkpoints", "models/test_quantised.py")
SAMPLE = ("deepseek_v3", "gpt_oss", "gemma3_text")
OWN = ["llama", "qwen2", "qwen3", *FAMILIES.OWN]
SPARSE = sorted(
    {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "minimax_m2", "glm4_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"}
    | {
        "ernie4_5_moe",
        "glm4_moe_lite",
        "granitemoe",
        "jamba",
        "kimi_linear",
        "bailing_hybrid",
        "granitemoehybrid",
        "lfm2_moe",
        "llama4_text",
    }
)
VOCAB = 199
"""Neither two ranks nor four divide it evenly."""
EIGHT = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 8)
pytestmark = pytest.mark.usefixtures("in_threads")


def some_of(kinds: list[str], *some: str) -> list[Any]:
    """Mark all but some as `full`."""
    return [kind if kind in some else pytest.param(kind, marks=pytest.mark.full) for kind in kinds]


def tokens(folder: Path, num: int, **settings: Any) -> list[list[int]]:
    """What some greedy requests say: chunks of prompts, rows that decode beside them, a prefix that is shared."""
    [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
    return said(lambda **more: make_core(folder, architecture, **settings, **more), num)


@pytest.mark.first(2)
@pytest.mark.parametrize("kind", some_of(OWN, *SAMPLE))
def test_built_in_families(kind: str, tmp_path: Path) -> None:
    """Latent attention, windows, chunks, sinks, caps, experts, shared key heads, tied and untied tables."""
    FAMILIES.make_checkpoint(tmp_path, kind, vocab_size=VOCAB)
    expected = tokens(tmp_path, 1)
    for num in (2, 4):
        assert tokens(tmp_path, num) == expected, num


@pytest.mark.first(1)
@pytest.mark.parametrize("has_experts", [False, True])
def test_gemma4_as_published(has_experts: bool, tmp_path: Path) -> None:
    """Layers that read another's cache; keys that are values, one head of them for all ranks, and experts."""
    shared = {"num_kv_shared_layers": 2, "layer_types": FAMILIES.TURNS, "use_double_wide_mlp": True}
    sparse = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40}
    sparse |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
    FAMILIES.make_checkpoint(tmp_path, "gemma4_text", vocab_size=VOCAB, **(sparse if has_experts else shared))
    expected = tokens(tmp_path, 1)
    for num in (2, 4):
        assert tokens(tmp_path, num) == expected, num


@pytest.mark.parametrize("kind", some_of(SPARSE, "gpt_oss"))
def test_whole_experts(kind: str, tmp_path: Path) -> None:
    """Ranks have whole experts each, of biases too, beside shared ones that they divide."""
    known = FAMILIES.config_of(kind).to_dict()
    FAMILIES.make_checkpoint(
        tmp_path, kind, vocab_size=VOCAB, **{name: num for name, num in EIGHT.items() if name in known}
    )
    expected = tokens(tmp_path, 1)
    for num in (2, 4):
        assert tokens(tmp_path, num, expert_parallel=True) == expected, num


@pytest.mark.sampled
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "granitemoehybrid", "lfm2_moe"])
def test_a_rank_holds_what_is_planned(
    kind: str, is_whole: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dovetail plan` counts a rank's weights to the byte: what is divided, and what every rank has."""
    names = {name: num for name, num in EIGHT.items() if name in FAMILIES.config_of(kind).to_dict()}
    FAMILIES.make_checkpoint(tmp_path, kind, vocab_size=VOCAB, **names)
    [architecture] = json.loads((tmp_path / "config.json").read_text())["architectures"]
    core = make_core(tmp_path, architecture, tensor_parallel_size=4, expert_parallel=is_whole)
    group: Any = core.executor
    held = group.runner.weight_bytes
    core.close()
    flags = [
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--tp",
        "4",
        "--tokenizer-path",
        str(MODEL_DIR),
        *(["--expert-parallel"] if is_whole else []),
    ]
    assert plan.main([str(tmp_path), "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["weight_bytes"] == held


def refused(folder: Path, architecture: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> str:
    """What an engine says instead of reading weights: one line."""
    monkeypatch.setattr("dovetail.runtime.checkpoint.weights.load_weights", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ConfigError) as caught:
        make_core(folder, architecture, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_experts_that_ranks_cannot_have_whole_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An odd number of them, none at all, and ranks of which there are not as many."""
    FAMILIES.make_checkpoint(tmp_path / "sparse", "gpt_oss")
    FAMILIES.make_checkpoint(tmp_path / "dense", "llama")
    sparse, dense = (tmp_path / "sparse", "GptOssForCausalLM"), (tmp_path / "dense", "LlamaForCausalLM")
    both: dict[str, Any] = {"tensor_parallel_size": 2, "expert_parallel": True}
    said = refused(*sparse, monkeypatch, **both)
    assert said.startswith("layers.0.mlp.experts.gate_up: 5 experts cannot be divided among 2 ranks; give a")
    assert said.endswith("or leave out --expert-parallel")
    said = refused(*dense, monkeypatch, **both)
    assert said == "--expert-parallel: LlamaForCausalLM has no experts; leave it out"
    for settings, start in (
        ({"expert_parallel": True}, "--expert-parallel: one rank has all experts"),
        (
            {"expert_parallel_size": 4, "tensor_parallel_size": 2},
            "4 with --tensor-parallel-size 2: .*; give 2 for that, or 1",
        ),
        ({**both, "expert_parallel_size": 1}, "1 with --expert-parallel: .* whole experts; leave one of them out"),
        ({"expert_parallel_size": 1, "expert_parallel": True}, "1 with --expert-parallel: .*; leave one of them out"),
        ({"expert_parallel_size": 2}, "2 with one rank: .*; give --tensor-parallel-size 2, too, or leave --expert-par"),
    ):
        with pytest.raises(ConfigError, match=start):
            check_settings(EngineSettings(**settings))


def test_the_modules_of_transformers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no shares; the model is named."""
    FAMILIES.make_checkpoint(tmp_path, "gpt_neox")
    target = "dovetail_models.transformers.plugin:TransformersModel"
    said = refused(tmp_path, "GPTNeoXForCausalLM", monkeypatch, target=target, tensor_parallel_size=2)
    assert said.startswith("GPTNeoXForCausalLM cannot be served through transformers: it cannot be divided among")
