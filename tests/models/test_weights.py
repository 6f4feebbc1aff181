"""The loader: tensors of every layout find their place by name and shape, and what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.layers import BuildContext, Parallel, Part
from dovetail.contracts.model import WeightRule
from dovetail.runtime.checkpoint.files import Checkpoint
from dovetail.runtime.checkpoint.weights import load_weights
from dovetail.sdk.checkpoint import is_finite
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.plain import PLAIN
from dovetail_models.llama import Llama
from dovetail_testing.conformance.model_runtime import TinyEngine
from dovetail_testing.models import make_model

CPU = torch.device("cpu")
E, H, INNER = 4, 6, 10
PROMPT = [[5, 7, 11, 13]]


def context(parallel: Parallel | None = None, dtype: torch.dtype = torch.float32) -> BuildContext:
    return BuildContext(device=CPU, dtype=dtype, factory=PLAIN, parallel=parallel or Parallel())


def rank_of(rank: int, size: int) -> Parallel:
    return Parallel(rank=rank, size=size, all_reduce=lambda x: x)


def write(folder: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
    return folder


class MoE(nn.Module):
    """Experts under the name that rules find them by."""

    def __init__(self, ctx: BuildContext, bias: bool, shard: Any) -> None:
        super().__init__()
        self.experts: Any = ctx.experts("experts", E, 2, H, INNER, act="silu_and_mul", bias=bias, shard=shard)


RULES = (
    WeightRule(r"mlp\.experts\.(\d+)\.(gate|up)_proj", "experts.gate_up", r"\2", r"\1"),
    WeightRule(r"mlp\.experts\.(\d+)\.w1", "experts.gate_up", "gate", r"\1"),
    WeightRule(r"mlp\.experts\.(\d+)\.w3", "experts.gate_up", "up", r"\1"),
    WeightRule(r"mlp\.experts\.(\d+)\.(?:down_proj|w2)", "experts.down", expert=r"\1"),
    WeightRule(r"mlp\.experts\.gate_up_proj", "experts.gate_up"),
    WeightRule(r"mlp\.experts\.down_proj", "experts.down"),
    WeightRule(r"mlp\.mixed\.gate_up_proj", "experts.gate_up", steps=("transpose", "deinterleave")),
    WeightRule(r"mlp\.mixed\.down_proj", "experts.down", steps=("transpose",)),
    WeightRule(r"mlp\.swapped\.up_gate_proj", "experts.gate_up", ("up", "gate")),
    WeightRule(r"mlp\.swapped\.down_proj", "experts.down"),
)

Tensors = dict[str, Tensor]


def each(gate: str, up: str, down: str) -> Callable[[Tensors], Tensors]:
    """One tensor for each expert and part."""

    def layout(all_of: Tensors) -> Tensors:
        names = {"gate": gate, "up": up, "down": down}
        return {f"mlp.experts.{e}.{names[part]}.weight": all_of[part][e] for part in names for e in range(E)}

    return layout


def interleaved(all_of: Tensors) -> Tensors:
    """As gpt-oss: `[E, in, out]`, gate and up in turns."""
    gate_up = torch.stack((all_of["gate"], all_of["up"]), dim=2).flatten(1, 2)
    biases = torch.stack((all_of["gate_bias"], all_of["up_bias"]), dim=2).flatten(1, 2)
    return {
        "mlp.mixed.gate_up_proj": gate_up.mT,
        "mlp.mixed.gate_up_proj_bias": biases,
        "mlp.mixed.down_proj": all_of["down"].mT,
        "mlp.mixed.down_proj_bias": all_of["down_bias"],
    }


def fused(all_of: Tensors, *parts: str) -> Tensor:
    return torch.cat([all_of[part] for part in parts or ("gate", "up")], dim=1)


LAYOUTS: dict[str, Callable[[Tensors], Tensors]] = {
    "each by itself": each("gate_proj", "up_proj", "down_proj"),
    "each as w1, w3, w2": each("w1", "w3", "w2"),
    "all in one": lambda t: {"mlp.experts.gate_up_proj": fused(t), "mlp.experts.down_proj": t["down"]},
    "all in one, with a suffix": lambda t: {
        "mlp.experts.gate_up_proj.weight": fused(t),
        "mlp.experts.down_proj.weight": t["down"],
    },
    "all in one, transposed": lambda t: {
        "mlp.experts.gate_up_proj": fused(t).mT,
        "mlp.experts.down_proj": t["down"].mT,
    },
    "fused gates, single downs": lambda t: {
        "mlp.experts.gate_up_proj": fused(t),
        **{f"mlp.experts.{e}.w2.weight": t["down"][e] for e in range(E)},
    },
    "up before gate": lambda t: {
        "mlp.swapped.up_gate_proj.weight": fused(t, "up", "gate"),
        "mlp.swapped.down_proj.weight": t["down"],
    },
    "in turns": interleaved,
}


@pytest.mark.parametrize("shard", ["inner", "expert"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_of_every_layout_are_the_same(layout: str, shard: str, tmp_path: Path) -> None:
    """However a checkpoint stores its experts, every rank gets the same numbers: its share of each part."""
    torch.manual_seed(0)
    shapes = {"gate": (E, INNER, H), "up": (E, INNER, H), "down": (E, H, INNER)}
    all_of = {name: torch.randn(shape) for name, shape in shapes.items()}
    all_of |= {f"{name}_bias": torch.randn(shape[:2]) for name, shape in shapes.items()}
    tensors = LAYOUTS[layout](all_of)
    has_bias = any(name.endswith("bias") for name in tensors)
    write(tmp_path, tensors)
    for rank in range(2):
        model = MoE(context(rank_of(rank, 2)), has_bias, shard)
        with torch.inference_mode():
            load_weights(model, RULES, tmp_path)
        half, mine = slice(5 * rank, 5 * rank + 5), slice(2 * rank, 2 * rank + 2)
        rows, experts = (half, slice(None)) if shard == "inner" else (slice(None), mine)
        want = torch.cat((all_of["gate"][experts, rows], all_of["up"][experts, rows]), dim=1)
        assert torch.equal(model.experts.gate_up.weight, want)
        assert torch.equal(model.experts.down.weight, all_of["down"][experts][:, :, rows])
        if has_bias:
            biases = torch.cat((all_of["gate_bias"][experts, rows], all_of["up_bias"][experts, rows]), dim=1)
            assert torch.equal(model.experts.gate_up.bias, biases)
            adds_bias = rank == 0 or shard == "expert"
            assert (model.experts.down.bias is not None) == adds_bias


def test_experts_of_other_ranks_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With whole experts a rank reads its own, and tensors that hold all; by width it reads every one."""
    names = [f"mlp.experts.{e}.{part}.weight" for e in range(E) for part in ("w1", "w3", "w2")]
    write(tmp_path, {name: torch.randn(*((H, INNER) if ".w2." in name else (INNER, H))) for name in names})
    read: list[str] = []
    plain = Checkpoint.read

    def noted(self: Checkpoint, name: str, *args: Any, **options: Any) -> Tensor:
        read.append(name)
        return plain(self, name, *args, **options)

    monkeypatch.setattr(Checkpoint, "read", noted)
    for shard, first in (("expert", 6), ("inner", 0)):
        read.clear()
        load_weights(MoE(context(rank_of(1, 2)), False, shard), RULES, tmp_path)
        assert sorted(read) == sorted(names[first:])


def test_a_layer_is_asked_once_what_it_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each tensor: one of hundreds of experts has as many slots as they have tensors."""
    names = [f"mlp.experts.{e}.{part}.weight" for e in range(E) for part in ("w1", "w3", "w2")]
    write(tmp_path, {name: torch.randn(*((H, INNER) if ".w2." in name else (INNER, H))) for name in names})
    asked: list[Matrix] = []
    slots = Matrix.slots

    def noted(self: Matrix) -> Any:
        asked.append(self)
        return slots(self)

    monkeypatch.setattr(Matrix, "slots", noted)
    load_weights(MoE(context(), False, "inner"), RULES, tmp_path)
    assert len(asked) == 2


def test_experts_compute_the_sum_of_those_chosen() -> None:
    """Two ranks' shares add up to the weighted sum of the experts, their weights before or behind them."""
    torch.manual_seed(1)
    x, ids = torch.randn(7, H), torch.stack([torch.randperm(E)[:2] for _ in range(7)])
    weights = torch.rand(7, 2)
    for weigh, shard in [("output", "inner"), ("output", "expert"), ("input", "inner"), ("input", "expert")]:
        shares = []
        whole: Any = context().experts("experts", E, 2, H, INNER, act="gelu_and_mul", bias=True, weigh=weigh)  # type: ignore[arg-type]
        for param in whole.parameters():
            param.data.normal_()
        for rank in range(2):
            parallel = rank_of(rank, 2)
            experts: Any = context(parallel).experts(
                "experts",
                E,
                2,
                H,
                INNER,
                act="gelu_and_mul",
                bias=True,
                weigh=weigh,
                shard=shard,  # type: ignore[arg-type]
            )
            for mine, source in ((experts.gate_up, whole.gate_up), (experts.down, whole.down)):
                for slot in mine.slots():
                    tensor = getattr(source, slot.tensor)[slot.expert]
                    rows = source.shard.rows[slot.part]
                    mine.place(slot, tensor[rows.target : rows.target + rows.num])
                mine.finalize()
            shares.append(experts(x, ids, weights))
        want = torch.zeros(7, H)
        for token in range(7):
            for k in range(2):
                expert, weight = int(ids[token, k]), weights[token, k]
                given = x[token] * weight if weigh == "input" else x[token]
                gate, up = (whole.gate_up.weight[expert] @ given + whole.gate_up.bias[expert]).chunk(2)
                y = whole.down.weight[expert] @ (torch.nn.functional.gelu(gate) * up) + whole.down.bias[expert]
                want[token] += y if weigh == "input" else y * weight
        torch.testing.assert_close(whole(x, ids, weights), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(shares[0] + shares[1], want, rtol=1e-4, atol=1e-4)


def test_another_number_of_experts_per_token_is_refused() -> None:
    """What was asked for holds."""
    experts: Any = context().experts("experts", E, 2, H, INNER, act="silu_and_mul")
    with pytest.raises(ValueError, match="3 experts for each token, 2 were asked for"):
        experts(torch.zeros(1, H), torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3))


def test_fused_matrices_of_a_checkpoint_load(tmp_path: Path) -> None:
    """`qkv_proj` and `gate_up_proj` fill the layers that other checkpoints fill part by part, on every rank."""
    plain = make_model(tmp_path / "plain", "LlamaForCausalLM", attention_bias=True)
    tensors = load_file(plain / "model.safetensors")
    for index in range(3):
        at = f"model.layers.{index}."
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{at}self_attn.{part}_proj.{kind}") for part in "qkv"]
            tensors[f"{at}self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        parts = [tensors.pop(f"{at}mlp.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"{at}mlp.gate_up_proj.weight"] = torch.cat(parts)
    folder = write(tmp_path / "fused", tensors)
    (folder / "config.json").write_text((plain / "config.json").read_text())
    want, got = (TinyEngine(Llama, path).prefill_logits(PROMPT)[0] for path in (plain, folder))
    assert torch.equal(want, got)
    engine = TinyEngine(Llama, folder)
    for rank in range(2):
        models = []
        for path in (plain, folder):
            model: Any = Llama.build(engine.config, context(rank_of(rank, 2)))
            with torch.inference_mode():
                load_weights(model, Llama.weight_map(engine.config), path)
            models.append(dict(model.named_parameters()))
        assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama in several files, to be damaged."""
    return make_model(tmp_path / "model", "LlamaForCausalLM", shard_size="100KB")


def edit(folder: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> str:
    """Change one tensor in the file that holds it; returns the file's name."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"][name]
    tensors = load_file(path)
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    return path.name


def load(folder: Path, dtype: str | None = None) -> None:
    """Load the checkpoint as a Llama."""
    config = Llama.config_from_hf(json.loads((folder / "config.json").read_text()))
    with torch.inference_mode():
        model: Any = Llama.build(config, context(dtype=getattr(torch, dtype or config.dtype)))
        load_weights(model, Llama.weight_map(config), folder)


Q = "model.layers.1.self_attn.q_proj.weight"


def test_what_is_wrong_is_named_with_its_file(folder: Path) -> None:
    """A tensor that the index has and its file lacks, one of another shape, one that is not finite."""
    load(folder)
    file = edit(folder, Q, lambda t: t[:, :-1])
    with pytest.raises(ConfigError, match=rf"wrong shape or type: {Q} \[64, 63\] instead of \[64, 64\] \({file}\)"):
        load(folder)
    edit(folder, Q, lambda t: torch.full((64, 64), 1e5))
    load(folder)
    with pytest.raises(ConfigError, match=rf"not finite: {Q} \({file}\)"):
        load(folder, dtype="float16")  # 65504 is its largest number
    edit(folder, Q, lambda t: t.index_fill(0, torch.tensor([3]), float("nan")))
    with pytest.raises(ConfigError, match=rf"not finite: {Q} \({file}\)"):
        load(folder)
    edit(folder, Q, lambda t: None)
    with pytest.raises(ConfigError, match=rf"the index names tensors that their files lack: {Q} \({file}\)"):
        load(folder)


def test_a_truncated_file_is_named_before_anything_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of several files ends too early."""
    path = sorted(folder.glob("model-*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-10])
    monkeypatch.setattr("dovetail.runtime.checkpoint.weights._place", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ConfigError, match=rf"{path.name}: broken safetensors file"):
        load(folder)


def test_a_place_that_is_filled_twice_is_named(tmp_path: Path) -> None:
    """Single and fused tensors for the same matrix, and more parts or experts than there are."""
    torch.manual_seed(0)
    model = MoE(context(), False, "inner")
    all_of = {"gate": torch.randn(E, INNER, H), "up": torch.randn(E, INNER, H), "down": torch.randn(E, H, INNER)}
    tensors = LAYOUTS["all in one"](all_of)
    extra = {"mlp.experts.2.gate_proj.weight": all_of["gate"][2]}
    with pytest.raises(ConfigError, match=r"there twice: experts\.gate_up\.weight\[gate, expert 2\] by mlp"):
        load_weights(model, RULES, write(tmp_path / "a", tensors | extra))
    extra = {"mlp.experts.4.gate_proj.weight": all_of["gate"][2]}
    with pytest.raises(ConfigError, match=r"mlp\.experts\.4\.gate_proj\.weight fills weight\[gate, expert 4\], which"):
        load_weights(model, RULES, write(tmp_path / "b", tensors | extra))
    few = {name: tensor for name, tensor in LAYOUTS["each by itself"](all_of).items() if "3.up" not in name}
    with pytest.raises(ConfigError, match=r"missing: experts\.gate_up\.weight\[up, expert 3\]"):
        load_weights(model, RULES, write(tmp_path / "c", few))


def test_a_checkpoint_s_makers_own_files_are_left_alone(tmp_path: Path) -> None:
    """Beside `model.safetensors`, the same weights under other names in `consolidated.safetensors` are not read."""
    folder = make_model(tmp_path, "LlamaForCausalLM")
    save_file({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors")
    load(folder)


def test_a_matrix_kept_under_another_name_is_refused(tmp_path: Path) -> None:
    """What a quantised checkpoint would look up by name must stand under that name."""

    class Misnamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.right: Any = context().at("wrong").linear("right", 4, (Part("a", 4),))

    with pytest.raises(PluginError, match=r"layer 'right' was asked for as 'wrong\.right'"):
        load_weights(Misnamed(), (), write(tmp_path, {"x": torch.zeros(1)}))


def test_large_numbers_are_no_poison() -> None:
    """A tensor whose sum overflows is finite; whole numbers always are."""
    assert is_finite(torch.full((1000,), 3e38))
    assert is_finite(torch.tensor([3e38, 3e38, -3e38, -3e38]))
    assert not is_finite(torch.tensor([1.0, float("inf"), float("-inf")]))
    assert is_finite(torch.full((4,), 127, dtype=torch.int8))
    assert is_finite(torch.zeros(4).to(torch.float8_e4m3fn))
