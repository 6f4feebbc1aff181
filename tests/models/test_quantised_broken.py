"""Quantised checkpoints with something wrong: each is named with its module, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from packers import METHODS
from quantised_models import change, loaded, logits, make, same
from safetensors.torch import load_file, save_file
from torch import Tensor

from dovetail.contracts.errors import ModelError

WRONG: dict[str, tuple[str, str, Any, str]] = {
    "no scale": (
        "fp8-blocks",
        "down_proj.weight_scale_inv",
        lambda t: None,
        "needs one scale, model.*down_proj.weight_",
    ),
    "a scale of other blocks": (
        "fp8-blocks",
        "down_proj.weight_scale_inv",
        lambda t: t[:1],
        r"is \[1, 3\]; for a weight",
    ),
    "awq without zeros": ("awq", ".qzeros", lambda t: None, r"\.qzeros is missing; it has \.qweight I32"),
    "awq scales of another group": (
        "awq",
        "down_proj.scales",
        lambda t: t[::2],
        r"is \[3, 64\] instead of \[6, 64\] \(gro",
    ),
    "gptq without scales": ("gptq", ".scales", lambda t: None, r"\.scales is missing"),
    "gptq words cut off": (
        "gptq",
        "down_proj.qweight",
        lambda t: t[:-1],
        r"\.qweight is \[11, 64\] instead of \[12, 64\]",
    ),
    "a group that is not there": ("gptq", "down_proj.g_idx", lambda t: t + 1, r"\.g_idx has groups 1 to 6 of 6"),
    "an order of its own": (
        "gptq",
        "down_proj.g_idx",
        lambda t: t.flip(0),
        "an order of its own, and .* desc_act false",
    ),
    "zeros in a symmetric one": (
        "gptq",
        "down_proj.qzeros",
        lambda t: t + 1,
        "says that it is symmetric, and has zeros beside 8",
    ),
    "scales alone": ("ct-int4", "down_proj.weight_packed", lambda t: None, r"unexpected: .*down_proj\.weight_s"),
    "another shape": (
        "ct-int4",
        "down_proj.weight_shape",
        lambda t: t + 8,
        r"\.weight_shape says \[72, 104\], and it is",
    ),
    "packed words cut off": (
        "ct-int4",
        "down_proj.weight_packed",
        lambda t: t[:, :-1],
        r"is \[64, 11\] instead of \[64, 12",
    ),
    "nvfp4 without its whole scale": (
        "modelopt-nvfp4",
        "weight_scale_2",
        lambda t: None,
        r"\.weight_scale_2 is missing",
    ),
    "nvfp4 groups cut off": (
        "ct-nvfp4",
        "down_proj.weight_scale",
        lambda t: t[:, 1:],
        r"is \[64, 5\] instead of \[64, 6\]",
    ),
    "mxfp4 bytes cut off": (
        "ct-mxfp4",
        "down_proj.weight_packed",
        lambda t: t[:, 1:],
        r"is \[64, 47\] instead of \[64, 48",
    ),
    "nf4 without its map": ("nf4", ".weight.quant_map", lambda t: None, r"\.weight\.quant_map is missing"),
    "nf4 with a broken state": ("nf4", "bitsandbytes__nf4", lambda t: t[:-3], "is not the JSON of a state"),
    "nf4 with blocks cut off": (
        "nf4",
        "down_proj.weight.absmax",
        lambda t: t[1:],
        "absmax has 95 scales for 96 blocks",
    ),
    "nf4 cut off": ("nf4", "down_proj.weight", lambda t: t[1:], "6142 numbers are no matrix of 96 inputs"),
    "awq words of another type": ("awq", "down_proj.qweight", lambda t: t.float(), r"\.qweight is F32; possible: I32"),
    "gptq words with one axis": (
        "gptq",
        "down_proj.qweight",
        lambda t: t.flatten(),
        r"\.qweight is \[768\] instead of a matrix",
    ),
    "gptq zeros of another type": ("gptq", "down_proj.qzeros", lambda t: t.half(), r"\.qzeros is F16; possible: I32"),
    "an order that is lost": ("gptq-desc-act", "down_proj.g_idx", lambda t: None, r"\.g_idx is missing"),
    "an order of words that is lost": (
        "ct-int4-act-order",
        "down_proj.weight_g_idx",
        lambda t: None,
        "g_idx is missing",
    ),
    "zeros that are lost": (
        "ct-int4-asymmetric",
        "down_proj.weight_zero_point",
        lambda t: None,
        r"\.weight_zero_point is missing",
    ),
    "int8 zeros that are lost": (
        "ct-int8-asymmetric",
        "down_proj.weight_zero_point",
        lambda t: None,
        r"\.weight_zero_point is missing",
    ),
    "int8 with three axes": ("ct-int8", "down_proj.weight", lambda t: t[None], "instead of a matrix"),
    "blocks that fit as one": (
        "fp8-blocks",
        "k_proj.weight_scale_inv",
        lambda t: t[:, :-1],
        r"is \[1, 1\]; for a weight .* possible: \[1, 2\] \(blocks of 32 x 32\); the configuration says so",
    ),
    "mxfp8 groups that divide": (
        "mxfp8",
        "down_proj.weight_scale_inv",
        lambda t: t[:, :-1],
        r"is \[64, 2\]; for a weight .* possible: \[64, 3\]",
    ),
    "one scale for rows": (
        "ct-float-rows",
        "down_proj.weight_scale",
        lambda t: t[:1, 0],
        r"possible: \[64, 1\] \(rows.*the configuration says so",
    ),
    "fp8 with one axis": ("fp8-tensor", "down_proj.weight", lambda t: t.flatten(), r"is \[6144\] instead of a matrix"),
    "nvfp4 with no axis": ("modelopt-nvfp4", "down_proj.weight", lambda t: t.flatten()[0], "instead of a matrix"),
    "nf4 levels of another type": ("nf4", "down_proj.weight.absmax", lambda t: t.int(), r"absmax is I32; possible: U8"),
    "int8 without its rows": ("bnb-int8", ".SCB", lambda t: None, r"\.SCB is missing"),
}
"""What is wrong: the way, the tensor that is changed, how, and what is said."""


@pytest.mark.parametrize(
    ("way", "scheme", "said"),
    [
        ("ct-int4", {"group_size": 32}, "a scale for 16 inputs, and config_groups says for 32 inputs"),
        (
            "ct-int4",
            {"strategy": "channel", "group_size": None},
            "a scale for 16 inputs, and config_groups says for a row",
        ),
        ("ct-int8-groups", {"group_size": 32}, "a scale for 16 inputs, and config_groups says for 32 inputs"),
        (
            "ct-int8",
            {"strategy": "group", "group_size": 16},
            r"a scale for \d+ inputs, and config_groups says for 16 inputs",
        ),
    ],
)
def test_a_group_size_that_the_file_does_not_have_is_named(
    way: str, scheme: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """What config.json says of compressed-tensors' integers is held against their scales."""
    folder = make(tmp_path, way, num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= scheme
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said) as error:
        loaded(folder, "compressed-tensors")
    assert str(error.value).startswith("model.layers.0.")
    assert "\n" not in str(error.value)


STATES: dict[str, tuple[str, Any, str]] = {
    "no JSON": (".quant_state.bitsandbytes__nf4", lambda t: t[1:], "quant_state is not the JSON of a state"),
    "no blocks": (".quant_state.bitsandbytes__nf4", lambda t: said(t, blocksize=0), "has blocks of 0 and 256 numbers"),
    "blocks of one": (".quant_state.bitsandbytes__nf4", lambda t: said(t, nested_blocksize=0), "64 and 0 numbers"),
    "no inner blocks": (".quant_state.bitsandbytes__nf4", lambda t: said(t, nested_blocksize=None), "not the JSON"),
    "scales cut off": (".absmax", lambda t: t[:-1], r"absmax has \d+ scales for \d+ blocks of 64"),
    "scales of scales": (".nested_absmax", lambda t: torch.cat((t, t)), "nested_absmax has 2 scales for"),
    "levels cut off": (".nested_quant_map", lambda t: t[:200], "nested_quant_map 200 of 256 levels"),
    "numbers cut off": (".weight.quant_map", lambda t: t[:9], "quant_map has 9 numbers instead of 16"),
}


def said(state: Tensor, **changes: Any) -> Tensor:
    """Change keys of a state that bitsandbytes stores as text."""
    return torch.tensor(list(json.dumps(json.loads(bytes(state.tolist())) | changes).encode()), dtype=torch.uint8)


@pytest.mark.parametrize("what", STATES)
def test_what_is_wrong_with_a_state_of_bitsandbytes_is_named(what: str, tmp_path: Path) -> None:
    """What no header tells is found where the matrix is made, in one line that has its name."""
    ending, how, match = STATES[what]
    folder = make(tmp_path, "nf4-nested", num_hidden_layers=1)
    name = change(folder, ending, how)
    with pytest.raises(ModelError, match=match) as error:
        loaded(folder, "bitsandbytes")
    assert str(error.value).startswith(name.partition(".weight")[0] + ".weight: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_a_file_is_named(what: str, tmp_path: Path) -> None:
    """In one line that has the module's name, and what would be right."""
    way, ending, how, said = WRONG[what]
    folder = make(tmp_path, way, num_hidden_layers=1)
    change(folder, ending, how)
    with pytest.raises(ModelError, match=said) as error:
        loaded(folder, METHODS[way].plugin)
    assert "model.layers.0." in str(error.value)
    assert "\n" not in str(error.value)


def test_blocks_of_nothing_are_named(tmp_path: Path) -> None:
    """Under a name that is nothing of the model's they are not taken for a matrix of some width."""
    folder = make(tmp_path, "nf4", num_hidden_layers=1)
    file = folder / "model.safetensors"
    tensors = {name.replace("down_proj", "sideways"): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"sideways\.weight: in 4 bits, and the model has no matrix there"):
        loaded(folder, "bitsandbytes")


FAULTS: dict[str, tuple[str, str, Any]] = {
    "scales turned": ("fp8-blocks", "q_proj.weight_scale_inv", lambda t: t.T.reshape(t.shape)),
    "zeros off by one": ("gptq-asymmetric", "q_proj.qzeros", lambda t: t + 0x11111111),
    "nibbles in another order": ("awq", "q_proj.qweight", lambda t: (t << 4) | ((t >> 28) & 15)),
    "halves of bytes swapped": ("ct-nvfp4", "q_proj.weight_packed", lambda t: (t << 4) | (t >> 4)),
    "one exponent more": ("ct-mxfp4", "v_proj.weight_scale", lambda t: t + 1),
    "blocks one further": ("nf4", "q_proj.weight.absmax", lambda t: t.roll(1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_each_fault(fault: str, tmp_path: Path) -> None:
    """A file with one of the usual faults gives other logits: the tests above would see a reader that has it."""
    way, ending, how = FAULTS[fault]
    folder = make(tmp_path, way, num_hidden_layers=1)
    change(folder, ending, how)
    with pytest.raises(AssertionError):
        same(logits(folder, METHODS[way].plugin), logits(folder.with_name("plain")))
