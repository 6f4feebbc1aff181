"""Tiny random models that see, images of odd sizes, and requests with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import DECODERS, DELTA, GLM4V, HALF, MOE, QUARTER, SECTIONS, SIZES, perturb
from image_references import (
    INTERNVL_PREPROCESSOR,
    by_pillow,
    gemma3,
    gemma4,
    glm4v,
    internvl,
    llama4,
    pixtral,
    qwen2_vl,
    qwen3_vl,
)
from PIL import Image

from dovetail.contracts.processor import ImageProcessor
from dovetail.messages import SamplerParams, Submit
from dovetail.messages.media import content_digest, write_arrays
from dovetail.plugins import Registry, load, make_plan
from dovetail.processing.images import PreparedImage, expand, make_image_processor
from dovetail.runtime.checkpoint.folder import ModelFolder

IMAGE, START, END = 120, 121, 122
TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 123}
PIXELS = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 60}
TURNS = {"rope_parameters": {**SECTIONS["rope_parameters"], "mrope_interleaved": True}}
QWEN3 = {
    **{"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64},
    **{"deepstack_visual_indexes": [2, 0], "num_position_embeddings": 25, "patch_size": 16},
}
GLM_TOWER = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 64},
    **{"image_size": 56, "patch_size": 14, "attention_bias": True, "initializer_range": 0.2},
}
PIXTRAL = {
    **{"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2},
    "patch_size": 10,  # transformers' Mistral 3 fails where an image is one block
}
GEMMA4_TOKENS = 70
VISION: dict[str, dict[str, Any]] = {
    "gemma4": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "head_dim": 16, "patch_size": 4, "position_embedding_size": 256},
        **{"use_clipped_linears": True, "standardize": True},
    },
    "gemma3": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"image_size": 56, "patch_size": 7},
    },
    "qwen2_vl": {"depth": 3, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2, "patch_size": 14},
    "qwen2_5_vl": {
        **{"depth": 3, "hidden_size": 32, "intermediate_size": 44, "num_heads": 2, "out_hidden_size": 64},
        **{"fullatt_block_indexes": [1], "window_size": 56, "patch_size": 14},
    },
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "qwen3_5": {key: value for key, value in QWEN3.items() if key != "deepstack_visual_indexes"},
    **{"glm4v": GLM_TOWER, "glm4v_moe": GLM_TOWER},
    "llava": {**PIXTRAL, "model_type": "pixtral", "hidden_act": "silu"},
    "mistral3": PIXTRAL,
    "internvl": {
        **{"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2},
        **{"image_size": [28, 28], "patch_size": [7, 7], "attention_bias": True},
    },
    "llama4": {
        **{"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2},
        **{"image_size": 28, "patch_size": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        "initializer_range": 0.2,
        **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 40),
    },
}
"""The vision part by `model_type`."""
TEXT: dict[str, dict[str, Any]] = {
    "gemma4": {**DECODERS["gemma4_text"], "sliding_window": 80, "use_bidirectional_attention": "vision"}
    | {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3, "pad_token_id": 3}
    | {"initializer_range": 0.03},
    "gemma3": {**DECODERS["gemma3_text"], "sliding_window": 18, "initializer_range": 0.02},
    "qwen2_vl": SECTIONS,
    "qwen2_5_vl": SECTIONS,
    "qwen3_vl": {**TURNS, "num_hidden_layers": 3},
    "qwen3_vl_moe": {**TURNS, **MOE, "norm_topk_prob": True, "num_hidden_layers": 3},
    **{"glm4v": {"rope_parameters": HALF}, "glm4v_moe": GLM4V},
    "llava": {"model_type": "mistral"},
    "mistral3": {"model_type": "mistral"},
    "internvl": {"model_type": "qwen2"},
    "llama4": {**DECODERS["llama4_text"], "floor_scale": 16, "attn_scale": 0.5},
    "qwen3_5": {
        **DELTA,
        "head_dim": 48,
        "rope_parameters": {**QUARTER["rope_parameters"], "mrope_section": [2, 2, 2]},
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma3": {"image_token_index": IMAGE, "boi_token_index": 118, "eoi_token_index": 119, "mm_tokens_per_image": 16},
    "gemma4": {"image_token_id": IMAGE, "boi_token_id": 118, "eoi_token_id": 119, "audio_config": None},
    "llava": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_token_index": IMAGE},
    "mistral3": {"image_token_index": IMAGE},
    "internvl": {"image_token_id": IMAGE},
    "llama4": {"image_token_index": IMAGE, "boi_token_index": 118, "eoi_token_index": 119},
}
"""Keys of the outer configuration by `model_type`; Qwen's models have `TOKENS`."""
ADDED = {"[IMG_BREAK]": 124, "[IMG_END]": 125, "<img>": 126, "</img>": 127}
ADDED |= {"<|tile_x_separator|>": 115, "<|tile_y_separator|>": 116, "<|image|>": 117}
"""Tokens of a tokenizer."""
EDGE = {"size": {"longest_edge": 140}}
TILES = {**INTERNVL_PREPROCESSOR, "size": {"height": 28, "width": 28}, "max_patches": 6}
FRAMES = {"size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 28 * 28 * 60}}
PREPROCESSOR: dict[str, dict[str, Any]] = {
    **{
        "gemma3": {},
        "gemma4": {"patch_size": 4, "max_soft_tokens": GEMMA4_TOKENS},
        "llava": EDGE,
        "mistral3": EDGE,
        "internvl": TILES,
        "llama4": {"size": {"height": 28, "width": 28}, "max_patches": 6},
        "glm4v": FRAMES,
        "glm4v_moe": FRAMES,
    },
}
"""`preprocessor_config.json` by `model_type`; of Qwen's models, it is `PIXELS` and the patch."""
ODD = ((28, 28), (57, 91), (200, 31), (143, 143))


def config_of(kind: str, vision: Mapping[str, Any], **changes: Any) -> Any:
    """Return transformers' configuration of a tiny model, changed so."""
    from transformers import CONFIG_MAPPING

    text = {**SIZES, **TEXT[kind], "max_position_embeddings": 1024, **changes}
    vision = {**VISION[kind], **vision}
    if "out_hidden_size" in vision:
        vision["out_hidden_size"] = text["hidden_size"]
    given = {"text_config": text, "vision_config": vision, **OTHERS.get(kind, TOKENS)}
    return CONFIG_MAPPING[kind](**deepcopy(given))  # some configs write into the dicts that they are given


def make_vl(folder: Path, kind: str = "qwen2_5_vl", vision: Mapping[str, Any] = {}, **changes: Any) -> Any:
    """Write a random checkpoint with both configurations, changed so; return transformers' model."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    config = config_of(kind, vision, **changes)
    made = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    perturb(made)
    if kind.startswith("gemma"):
        open_eyes(made)
    for param in made.parameters():
        if param.dim() > 1 and not param.any():  # learned positions: zeros would hide where they stand
            torch.nn.init.normal_(param, std=0.5)
    made.save_pretrained(folder)
    preprocessor = PREPROCESSOR.get(kind, {**PIXELS, "patch_size": VISION[kind]["patch_size"]})
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return made.requires_grad_(False)


@torch.no_grad()
def open_eyes(model: Any) -> None:
    """Have tokens depend on images: a fresh projection is zero, and other fresh weights hardly tell images apart."""
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("mm_input_projection_weight"):
            torch.nn.init.normal_(weight)
        if name.endswith(("_min", "_max")) and not weight.dim():  # bounds that some numbers pass
            weight.fill_(-1.5 if name.endswith("min") else 1.25)
        if "std_" in name or name.endswith("position_embedding_table"):
            torch.nn.init.normal_(weight)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and ("vision_tower" in name or "layers" in name):
            weight.mul_(3 if "vision_tower" in name else 2)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise on a ramp."""
    rng = np.random.default_rng((seed, width, height))
    ramp = np.linspace(0, 150, width * height * 3).reshape(height, width, 3)
    return Image.fromarray((ramp + rng.integers(0, 100, ramp.shape)).astype(np.uint8))


def processor_of(folder: Path) -> ImageProcessor:
    """What `auto` chooses."""
    model = ModelFolder(folder, weights=False)
    plan = make_plan(Registry.scan(), model=model.architecture, attention_backend="torch_native", processor="auto")
    found = make_image_processor(load(plan, "api"), model, ADDED)
    assert found is not None
    return found


class Prompts:
    """Makes requests with images of a checkpoint, as a server would."""

    def __init__(self, folder: Path, files: Path) -> None:
        self.processor, self.files = processor_of(folder), files
        files.mkdir(exist_ok=True)

    def prepare(self, image: Image.Image) -> PreparedImage:
        digest = content_digest(image.size, image.tobytes(), self.processor.fingerprint(), "")
        file = self.files / digest.hex()
        arrays = self.processor.process(image)
        file.unlink(missing_ok=True)
        refs = write_arrays(file, arrays)
        return PreparedImage(width=image.width, height=image.height, digest=digest, file=str(file), arrays=refs)

    def submit(self, parts: Sequence[Sequence[int] | Image.Image], num: int = 8, rid: str = "", **more: Any) -> Submit:
        """Texts as ids, and images."""
        image = START, self.processor.placeholder_id, END
        ids = [token for part in parts for token in (part if isinstance(part, list | tuple) else image)]
        images = [self.prepare(part) for part in parts if isinstance(part, Image.Image)]
        found = expand(ids, self.processor, images)
        params = SamplerParams(max_tokens=num, temperature=0.0, ignore_eos=True)
        return Submit(rid=rid, prompt_ids=found.ids, params=params, media=found.media, **more)


def processed(model: Any, images: Sequence[Image.Image]) -> Any:
    """What transformers' processor makes of images."""
    config = model.config
    if config.model_type in ("internvl", "gemma3"):
        made = internvl(28, 6) if config.model_type == "internvl" else gemma3(config.vision_config.image_size)
        return {"pixel_values": made(list(images), return_tensors="pt")["pixel_values"]}
    if config.model_type == "gemma4":
        made = gemma4(patch_size=4, max_soft_tokens=GEMMA4_TOKENS)(list(images), return_tensors="pt")
        return {key: made[key] for key in ("pixel_values", "image_position_ids")}
    if config.model_type == "llama4":
        tiles = [llama4(image, by_pillow, 28, 6, normalizes=True)[0].flatten(0, -4) for image in images]
        return {"pixel_values": torch.cat(tiles).float()}
    if PREPROCESSOR.get(config.model_type) is FRAMES:
        return made_of(glm4v, **FRAMES)(list(images), return_tensors="pt")
    if config.model_type in PREPROCESSOR:
        unit = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
        return made_of(pixtral, **EDGE, patch_size=unit)(list(images), return_tensors="pt")
    made = qwen2_vl if model.config.vision_config.patch_size == 14 else qwen3_vl
    size = {"shortest_edge": PIXELS["min_pixels"], "longest_edge": PIXELS["max_pixels"]}
    given = {"min_pixels": None, "max_pixels": None, "size": size} if made is qwen2_vl else {"size": size}
    return made_of(made, **given)(list(images), return_tensors="pt")


def seen(model: Any, image: Image.Image) -> torch.Tensor:
    """transformers' embeddings of an image, and what deeper layers add `[L, N, H]`."""
    found = model.get_image_features(**processed(model, [image]))
    if model.config.model_type == "llama4":
        return model.multi_modal_projector(found.last_hidden_state.flatten(0, 1))[None]  # type: ignore[no-any-return]
    added = getattr(found, "deepstack_features", None) or ()
    pooled = found.pooler_output
    embeds = pooled.flatten(0, 1) if isinstance(pooled, torch.Tensor) else pooled[0]
    return torch.stack([embeds, *(each[0] for each in added)])


def made_of(made: Any, **given: Any) -> Any:
    """A processor with another size; what is cached of these must be hashable."""
    return made.__wrapped__(**given)


def reference(model: Any, parts: Sequence[Sequence[int] | Image.Image], submit: Submit, num: int = 8) -> list[int]:
    """Transformers' greedy tokens."""
    ids = torch.tensor([submit.prompt_ids])
    kind = model.config.model_type
    ids_of_kinds = "token_type_ids" if kind == "gemma3" else "mm_token_type_ids"
    has_kinds = kind.startswith("gemma") or kind not in OTHERS
    given: dict[str, Any] = {ids_of_kinds: (ids == IMAGE).int()} if has_kinds else {}
    images = [part for part in parts if isinstance(part, Image.Image)]
    if images:
        given |= dict(processed(model, images))
    found = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False, eos_token_id=None,
        pad_token_id=0, **given,
    )  # fmt: skip
    tokens: list[int] = found[0, ids.shape[1] :].tolist()
    return tokens
