"""Models through transformers: which are taken, what is refused, how strict loading is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import config_of as tiny_config
from families import make_checkpoint
from parity import check_logits, prompt, recorded, reference, run
from safetensors.torch import load_file, save_file
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

from dovetail.contracts.errors import ModelError, PluginError
from dovetail.plugins import Registry, make_plan
from dovetail_models.transformers import TransformersModel
from dovetail_models.transformers.decoder import experts_implementation
from dovetail_models.transformers.mixers import EmptyCache, cache_parameter, fold_requests
from dovetail_models.transformers.probe import KNOWN, make
from dovetail_testing.conformance.model_runtime import decode_syncs
from dovetail_testing.engine import make_core

WEIGHTS = "model.safetensors"


def served_by(architecture: str, impl: str) -> str:
    """The plugin's name."""
    return make_plan(Registry.scan(), model=architecture, model_impl=impl).of_kind("model")[0].name


def test_the_implementation_is_chosen() -> None:
    """`auto` takes the architecture's own plugin, and transformers where there is none."""
    assert served_by("Qwen3ForCausalLM", "auto") == "Qwen3ForCausalLM"
    assert served_by("Qwen3ForCausalLM", "dovetail") == "Qwen3ForCausalLM"
    assert served_by("Qwen3ForCausalLM", "transformers") == "transformers"
    assert served_by("NobodyForCausalLM", "auto") == "transformers"
    with pytest.raises(PluginError, match="NobodyForCausalLM"):
        served_by("NobodyForCausalLM", "dovetail")
    with pytest.raises(PluginError, match="'sglang': not installed"):
        served_by("Qwen3ForCausalLM", "sglang")


def test_the_start_says_who_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In one line, with architecture and plugin."""
    make_checkpoint(tmp_path, "gpt2")
    with caplog.at_level("INFO", logger="dovetail"):
        make_core(tmp_path)
    assert "GPT2LMHeadModel is served by model 'transformers' of dovetail" in caplog.text


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose experts transformers converts when it reads them."""
    folder = tmp_path_factory.mktemp("mixtral")
    make_checkpoint(folder, "mixtral")
    return folder


@pytest.mark.parametrize("change", ["deleted", "renamed", "truncated", "misshapen", "nan"])
def test_a_faulty_tensor_is_named(change: str, mixtral: Path, tmp_path: Path) -> None:
    """With its file, or that it is missing."""
    name = "model.layers.1.self_attn.k_proj.weight"
    shutil.copytree(mixtral, tmp_path, dirs_exist_ok=True)
    file = tmp_path / WEIGHTS
    tensors = load_file(file)
    if change == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        tensor = tensors.pop(name)
        if change == "nan":
            tensor[3, 5] = float("nan")
        if change == "misshapen":
            tensor = tensor[:-1].contiguous()
        if change != "deleted":
            tensors[name + "s" if change == "renamed" else name] = tensor
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        make_core(tmp_path, model_impl="transformers")
    said = str(caught.value)
    expected = {"deleted": [f"missing: {name}"], "renamed": [f"missing: {name}", f"{name}s ({WEIGHTS})"]}
    expected |= {
        "truncated": [WEIGHTS],
        "misshapen": [f"{name} ({WEIGHTS})"],
        "nan": ["not finite", f"{name} ({WEIGHTS})"],
    }
    assert all(part in said for part in expected[change]), said


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    """A type that transformers does not know is refused, whatever stands beside it."""
    config = {"architectures": ["OddForCausalLM"], "model_type": "odd", "auto_map": {"AutoModelForCausalLM": "odd.Odd"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "odd.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match=r"OddForCausalLM .*: .* no model of the type 'odd', and code .* never run"):
        TransformersModel.config_from_hf(config)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["BertModel"], "model_type": "bert", "is_decoder": False}, "attend to later ones|cannot be"),
        ({"architectures": ["CLIPModel"], "model_type": "clip"}, "no causal language model of the type 'clip'"),
        ({"architectures": ["BloomForCausalLM"], "model_type": "bloom", "hidden_size": 64, "n_layer": 2}, "."),
    ],
)
def test_other_kinds_are_refused(config: dict[str, Any], reason: str) -> None:
    """By name and reason."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99, "n_head": 4}
    with pytest.raises(ModelError, match=reason):
        TransformersModel.config_from_hf({**sizes, **config})


INTERNAL = re.compile(r"Error\b|Mask|dovetail-probe|object has no attribute|torch\.|_mm")
"""Of Python, transformers and this plugin: nothing of it helps a user."""
MASKS = "it applies attention masks in code of its own"
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neo": (
        "it chooses its attention from a list of its own",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    "mpt": (MASKS, {"n_layers": 2, "n_heads": 4, "d_model": 64, "max_seq_len": 256}),
    "bloom": (MASKS, {"n_layer": 2, "n_head": 4}),
    "xglm": (
        MASKS,
        {"num_layers": 2, "attention_heads": 4, "d_model": 64, "ffn_dim": 96},
    ),
    "doge": (MASKS, {}),
    "jetmoe": ("it reads on the host what it has computed", {"kv_channels": 16, "num_local_experts": 4}),
    "codegen": (
        "transformers itself cannot compute a prompt with this config.json",
        {"rotary_dim": 64, "n_head": 4, "n_embd": 64},
    ),
    "rwkv": ("only 0 of its 2 layers attend through transformers' attention interface", {}),
}
"""Models that are not served, with what each lacks."""


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_says_what_is_missing(kind: str) -> None:
    """In one line for a user: no word of Python's."""
    reason, changes = REFUSED[kind]
    config = tiny_config(kind, **changes)
    values = {**config.to_dict(), "architectures": [f"{kind.title()}ForCausalLM"]}
    with pytest.raises(ModelError, match=f"^{kind.title()}ForCausalLM cannot be served .*: {reason}") as caught:
        TransformersModel.config_from_hf(values)
    said = str(caught.value)
    assert "\n" not in said
    assert not INTERNAL.search(said.replace("ForCausalLM", "")), said


def test_layers_that_are_plain_mlps_are_served(tmp_path: Path) -> None:
    """Nemotron-H has them beside experts, or in their place; they look at one token at a time."""
    blocks = ["mamba", "mlp", "attention", "moe"]
    model = make_checkpoint(tmp_path, "nemotron_h", layers_block_type=blocks, intermediate_size=48)
    check_logits(tmp_path, model, chunk=13, num_new=4, model_impl="transformers")


def test_every_type_of_layer_is_served_or_refused_by_name() -> None:
    """A type that transformers adds is neither, until somebody has looked at it."""
    refused = {"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention", "hybrid_sliding"}
    refused |= {"window_attention", "reference_sliding_attention"}
    assert set(ALLOWED_LAYER_TYPES) - refused <= KNOWN | {"minimax_m3_sparse"}


ODD = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "phimoe"]


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == "qwen3_moe" else pytest.mark.full) for k in ODD])
def test_experts_of_any_width_are_served(kind: str, tmp_path: Path) -> None:
    """Not multiples of 8 alone, which a product of all experts at once asks for."""
    inner = {"intermediate_size": 92, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 44}
    model = make_checkpoint(tmp_path, kind, **inner)
    check_logits(tmp_path, model, chunk=13, num_new=4, model_impl="transformers")


@pytest.mark.parametrize(("width", "device", "way"), [(40, "cpu", "eager"), (36, "cpu", "eager"), (40, "cuda", None)])
def test_how_experts_are_computed(width: int, device: str, way: str | None) -> None:
    """On a GPU all at once, but where their rows are no whole 16 bytes."""
    model = make(tiny_config("mixtral", intermediate_size=width), "eager")
    assert experts_implementation(model, device) == way
    odd = make(tiny_config("mixtral", intermediate_size=36), "eager")
    assert experts_implementation(odd, "cuda") == "batched_mm"


FACTORS = {"short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [2.0 + i / 3 for i in range(8)]}


@pytest.mark.parametrize("length", [64, 200])
def test_the_context_chooses_among_rope_factors(length: int, tmp_path: Path) -> None:
    """Transformers chooses by each call's length; with a cache one choice holds, that of the longest request."""
    rope = {"rope_type": "longrope", "rope_theta": 5000.0, **FACTORS, "original_max_position_embeddings": 128}
    model = make_checkpoint(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=128)
    core = make_core(tmp_path, context_length=length, model_impl="transformers")
    logits, ids = recorded(core), prompt(50, seed=1)
    run(core, [ids], 1, prompt_logprobs=0)
    padded = [*ids, *prompt(length - len(ids), seed=2)]  # so that transformers sees a request of that length
    want, got = reference(model, padded)[:50], torch.cat(logits)
    assert float(((got - want).norm(dim=1) / want.norm(dim=1)).max()) < 1e-4


def test_a_head_that_is_tied_stays_so_in_bfloat16(tmp_path: Path) -> None:
    """Matrices are repacked on CPU, and what the model's own code looks at is still there."""
    model = make_checkpoint(tmp_path, "gemma2", tie_word_embeddings=True)
    core = make_core(tmp_path, dtype="bfloat16", model_impl="transformers")
    logits, ids = recorded(core), prompt(50, seed=1)
    run(core, [ids], 8, prompt_logprobs=0)
    want, got = reference(model, ids), torch.cat(logits)[: len(ids)].float()
    assert float(((got - want).norm(dim=1) / want.norm(dim=1)).median()) < 0.05


def test_a_model_without_a_checkpoint_is_served_with_random_weights(mixtral: Path, tmp_path: Path) -> None:
    """`--load-format dummy` for benchmarks."""
    shutil.copy(mixtral / "config.json", tmp_path)
    core = make_core(tmp_path, load_format="dummy", model_impl="transformers")
    assert len(run(core, [prompt(20, seed=1)], 5).tokens[0]) == 5


def test_windows_and_widths_are_found(tmp_path: Path) -> None:
    """As the layers have them, for a model whose own plugin does not exist."""
    make_checkpoint(tmp_path, "gemma3_text")
    config = TransformersModel.config_from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert [str(spec.reach) for spec in config.layers] == ["window-24"] * 5 + ["full"]
    assert {spec.scale for spec in config.layers} == {24**-0.5}
    assert config.num_params == sum(tensor.numel() for tensor in load_file(tmp_path / WEIGHTS).values())


def test_its_own_llama_and_transformers_agree(tmp_path: Path) -> None:
    """Both are the same to a client."""
    model = make_checkpoint(tmp_path, "llama")
    for impl in ("dovetail", "transformers"):
        check_logits(tmp_path, model, chunk=64, num_new=8, model_impl=impl)


@pytest.mark.parametrize("kind", ["llama", "phi", "gemma", "gpt_neox", "nemotron"])
def test_a_decode_step_of_dense_modules_can_be_captured(kind: str, tmp_path: Path) -> None:
    """It reads nothing back to the host; whether a GPU captures it, `tests/gpu/test_cuda.py` asks."""
    make_checkpoint(tmp_path, kind)
    assert decode_syncs(TransformersModel, tmp_path) == []


def test_mamba_2_folds_alike_however_a_prompt_is_cut() -> None:
    """A copy of a state has the bytes of any other prefill; with time steps as trained models have them."""
    mixer = GraniteMoeHybridMambaLayer(tiny_config("granitemoehybrid"), 0).eval()
    rates = torch.linspace(0.001, 0.1, mixer.num_heads)
    parameter = str(cache_parameter(mixer))
    inputs = torch.randn(1, 512, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        mixer.dt_bias.copy_(rates + torch.log(-torch.expm1(-rates)))
        empty = EmptyCache()
        mixer(inputs, **{parameter: empty})
        fold_requests(mixer, parameter, 0, lambda: batch)
        states = []
        for cuts in ([512], [128, 512], [128, 384, 512], [256, 384, 512]):
            rows = {name: torch.zeros(1, *tensor.shape) for name, tensor in empty.found.items()}
            for begin, end in zip([0, *cuts], cuts, strict=False):
                batch: Any = one_chunk(end, end - begin, rows)
                mixer(inputs[:, begin:end])
            states.append(rows)
    for other in states[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in states[0].items())


def test_mamba_2_is_called_for_128_tokens_at_least() -> None:
    """Fewer made prompts slower than 1.10 of their time at once; a last piece is filled up to its own chunk alone."""
    sizes: list[tuple[int, int]] = []
    for own, want in ((64, [(128, 128), (128, 128), (44, 64)]), (256, [(256, 256), (44, 256)])):
        mixer = GraniteMoeHybridMambaLayer(tiny_config("granitemoehybrid", mamba_chunk_size=own), 0).eval()
        parameter, inner = str(cache_parameter(mixer)), mixer.forward
        empty = EmptyCache()
        mixer(torch.zeros(1, 8, 64), **{parameter: empty})
        rows = {name: torch.zeros(1, *tensor.shape) for name, tensor in empty.found.items()}

        def noted(piece: torch.Tensor, *, mixer: Any = mixer, inner: Any = inner, **given: Any) -> Any:
            sizes.append((piece.shape[1], mixer.chunk_size))
            return inner(piece, **given)

        mixer.forward = noted  # type: ignore[method-assign]
        batch = one_chunk(300, 300, rows)
        fold_requests(mixer, parameter, 0, lambda batch=batch: batch)  # type: ignore[misc]
        sizes.clear()
        with torch.inference_mode():
            mixer(torch.randn(1, 300, 64))
        assert sizes == want


def test_states_are_summed_in_float32() -> None:
    """Also those of a model of bfloat16; what a convolution keeps has the model's dtype."""
    given = {**tiny_config("qwen3_5_text").to_dict(), "architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16"}
    config = TransformersModel.config_from_hf(given)
    assert config.dtype == "bfloat16"
    assert {(one.name, one.dtype) for spec in config.layers for one in spec.state} == {
        ("conv0", None),
        ("state0", "float32"),
    }


def one_chunk(length: int, num_new: int, rows: dict[str, torch.Tensor]) -> Any:
    """A step of one request's chunk, with its states."""
    store = SimpleNamespace(rows=lambda index: rows, wants=lambda index, save: False)
    return SimpleNamespace(
        states=store, num_decode=0, num_requests=1, rows=torch.zeros(1, dtype=torch.int64), q_lens_cpu=[num_new],
        seq_lens_cpu=[length], saves=(), save_table=None,
    )  # fmt: skip


CODE = """
import sys
from dovetail_models.transformers import TransformersModel
from families import config_of
config = config_of("qwen3_5_text")
TransformersModel.config_from_hf({**config.to_dict(), "architectures": ["Qwen3_5ForCausalLM"]})
print("probed")
import fla
"""


def test_packages_that_happen_to_be_installed_change_nothing(tmp_path: Path) -> None:
    """Transformers would call kernels of `fla`; whoever imports it for something else still can."""
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("print('imported')\n")
    code = CODE
    folders = os.pathsep.join([str(tmp_path), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": folders}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["probed", "imported"]


@pytest.mark.parametrize("kind", ["roberta", "nemotron_h", "zamba2"])
def test_positions_and_time_steps_are_those_of_a_prompt(kind: str, tmp_path: Path) -> None:
    """RoBERTa counts from behind its padding; Mamba 2 bounds its steps in prompts, and so does a decode step here."""
    model = make_checkpoint(tmp_path, kind)
    check_logits(tmp_path, model, chunk=7, num_new=16, model_impl="transformers")
    config = TransformersModel.config_from_hf(json.loads((tmp_path / "config.json").read_text("utf-8")))
    assert config.max_position_embeddings == (298 if kind == "roberta" else 256)
