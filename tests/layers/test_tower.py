"""Layers of towers, and rotary embeddings with three positions, beside transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.contracts.config import RopeConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.plain import PLAIN
from dovetail.sdk.layers.rotary import Rotary, section_axes
from dovetail.sdk.layers.tower import PatchEmbedding, TowerAttention, TowerMLP, axial_rope, merged_places
from dovetail_models.qwen2_5_vl import Windows

CTX = BuildContext(device=torch.device("cpu"), dtype=torch.float32, factory=PLAIN)


@pytest.mark.parametrize("grid", [(2, 2), (4, 6), (10, 14), (16, 16), (6, 38)])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_windows_are_transformers(grid: tuple[int, int], size: int) -> None:
    """The same patches stand together, and each finds its place again."""
    from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

    grids = torch.tensor([[1, *grid]])
    rows, columns = merged_places(*grid, 2, torch.device("cpu"))
    assert torch.equal(torch.stack((rows, columns), 1), get_vision_position_ids(grids, 2))
    windows = Windows.of(rows, columns, grid, size)
    index, ends = get_vision_window_index(grids, spatial_merge_size=2, window_size=size * 14, patch_size=14)
    theirs = torch.arange(grid[0] * grid[1]).view(-1, 4)[index].flatten()
    wanted = {frozenset(part.tolist()) for part in torch.tensor_split(theirs, ends[1:-1].long())}
    found = {frozenset(part.tolist()) for part in windows.order.split(lens(windows))}
    assert found == wanted
    assert torch.equal(windows.order.sort().values, torch.arange(len(rows)))
    assert (windows.order.view(-1, 4) // 4 == windows.order[::4, None] // 4).all()


def lens(windows: Windows) -> list[int]:
    """Patches of each window."""
    return [size for num, size in windows.sizes for _ in range(num)]


def test_windows_attend_as_each_alone() -> None:
    """Attention in windows of several sizes is that of each window's patches by themselves."""
    torch.manual_seed(0)
    attention = TowerAttention(32, 2, CTX)
    for param in attention.parameters():
        param.normal_()
    rows, columns = merged_places(6, 10, 2, torch.device("cpu"))
    x, rope = torch.randn(60, 32), axial_rope(rows, columns, 16, 1e4)
    windows = Windows.of(rows, columns, (6, 10), 4)
    assert len(windows.sizes) == 4
    x, cos, sin = (each[windows.order] for each in (x, *rope))
    found = attention(x, (cos, sin), windows.sizes)
    for mine in torch.arange(60).split(lens(windows)):
        alone = attention(x[mine], (cos[mine], sin[mine]), None)
        torch.testing.assert_close(found[mine], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inner", "wide"), [(12, 64), (44, 64), (66, 128), (24, 24), (64, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_an_mlp_of_any_width_is_that_of_its_checkpoint(inner: int, wide: int, bias: bool) -> None:
    """Its matrices may be wider: they take what a checkpoint has, and nothing else changes what they compute."""
    torch.manual_seed(inner)
    hf: dict[str, Any] = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    hf |= {"num_attention_heads": 2, "max_position_embeddings": 8, "architectures": ["LlamaForCausalLM"]}
    config = dense_config(hf)
    mlp = TowerMLP(config, CTX, bias=bias, inner=inner)
    weights: dict[tuple[str, str, str], torch.Tensor] = {}
    matrices = {"gate_up": mlp.gate_up, "down": mlp.down}
    for param in mlp.parameters():
        param.fill_(torch.nan)  # what nothing is placed in shows
    for name, matrix in matrices.items():
        assert isinstance(matrix, Matrix)
        for slot, shape in matrix.slots().items():
            weights[name, slot.tensor, slot.part] = value = torch.randn(shape)
            matrix.place(slot, value)
        matrix.finalize()
    shapes = {name: tuple(param.shape) for name, param in mlp.named_parameters() if name.endswith("weight")}
    assert shapes == {"gate_up.weight": (2 * wide, 32), "down.weight": (32, wide)}

    def product(x: torch.Tensor, name: str, part: str = "") -> torch.Tensor:
        return torch.nn.functional.linear(x, weights[name, "weight", part], weights.get((name, "bias", part)))

    x = torch.randn(7, 32)
    wanted = product(torch.nn.functional.silu(product(x, "gate_up", "gate")) * product(x, "gate_up", "up"), "down")
    torch.testing.assert_close(mlp(x), wanted, rtol=1e-5, atol=1e-5)


def test_patches_are_transformers() -> None:
    """A product over normalized pixels of two equal frames is transformers' convolution."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionPatchEmbed

    torch.manual_seed(0)
    theirs = Qwen2_5_VisionPatchEmbed(14, 2, 3, 32)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    own = PatchEmbedding((3, 2, 14, 14), 32, CTX, mean=mean, std=std)
    [slot] = own.slots()
    assert own.slots()[slot] == tuple(theirs.proj.weight.shape)
    own.place(slot, theirs.proj.weight.detach())
    patches = torch.randint(0, 256, (7, 588), dtype=torch.uint8)
    values = (patches.view(7, 3, 1, 196) / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    wanted = theirs(values.expand(-1, -1, 2, -1).reshape(7, -1))
    torch.testing.assert_close(own(patches), wanted.detach(), rtol=1e-5, atol=1e-5)


def mrope(kind: str, sections: list[int], positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of transformers."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    sizes: dict[str, Any] = {"hidden_size": 4 * dim, "num_attention_heads": 4, "head_dim": dim, "rope_parameters": rope}
    if kind == "in turns":
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding as Theirs

        config: Any = Qwen3VLTextConfig(**sizes)
    else:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding as Theirs

        config = Qwen2_5_VLTextConfig(**sizes)
    cos, sin = Theirs(config)(torch.zeros(1), positions[:, None])
    sin[..., : dim // 2] *= -1  # here the sine has the sign of what it is multiplied with
    return cos[0], sin[0]


@pytest.mark.parametrize("kind", ["one after the other", "in turns"])
@pytest.mark.parametrize("sections", [[3, 3, 2], [2, 4, 2], [4, 2, 2]])
def test_three_positions_turn_as_in_transformers(kind: str, sections: list[int]) -> None:
    """Both orders of sections; where the three are one, the result is that of plain positions, to the bit."""
    rope = RopeConfig(sections=tuple(sections), mixes_sections=kind == "in turns")
    rotary = Rotary(rope, 16, 512, CTX)
    positions = torch.randint(0, 500, (3, 9))
    wanted = mrope(kind, sections, positions, 16)
    for found, theirs in zip(rotary(positions), wanted, strict=True):
        torch.testing.assert_close(found[:, 0], theirs)
    for found, plain in zip(
        rotary(positions[:1].expand(3, -1)), Rotary(RopeConfig(), 16, 512, CTX)(positions[0]), strict=True
    ):
        assert torch.equal(found, plain)


@pytest.mark.parametrize("sections", [(3, 3), (3, 3, 3), (9, -1, 0)])
def test_sections_that_do_not_fit_are_refused(sections: tuple[int, ...]) -> None:
    """Three numbers whose sum is that of the frequencies."""
    with pytest.raises(ModelError, match="give three numbers whose sum is 8"):
        section_axes(RopeConfig(sections=sections), 8, 16)


def test_three_positions_need_sections() -> None:
    """An embedding without sections does not guess."""
    with pytest.raises(ValueError, match="without sections"):
        Rotary(RopeConfig(), 16, 512, CTX)(torch.zeros(3, 2, dtype=torch.int64))
