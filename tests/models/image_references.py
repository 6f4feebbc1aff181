"""What transformers' image processors, those that use Pillow, make of an image, in the form of the built-in plugins."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

CONFIG = {"image_token_id": 151655, "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
PREPROCESSOR = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
}
"""As in the published Qwen2.5-VL."""


@cache
def qwen2_vl(**changes: Any) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    kept = {key: value for key, value in PREPROCESSOR.items() if key != "image_processor_type"}
    return Qwen2VLImageProcessorPil(**{**kept, **changes})


def reference_count(self: Any, width: int, height: int) -> int:
    return int(qwen2_vl().get_number_of_image_patches(height, width)) // 4


def reference_arrays(self: Any, image: Any) -> dict[str, Any]:
    """The pixels before rescaling, of the first of the two equal frames."""
    found = qwen2_vl(do_rescale=False, do_normalize=False)(image, return_tensors="np")
    values = found["pixel_values"].reshape(-1, 3, 2, 14 * 14)
    assert (values[:, :, 0] == values[:, :, 1]).all()
    grid = found["image_grid_thw"][0].astype(np.int32)
    return {"patches": values[:, :, 0].reshape(-1, 3 * 14 * 14).astype(np.uint8), "grid": grid}


QWEN3_CONFIG = {"image_token_id": 151655, "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
QWEN3_PREPROCESSOR = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
"""As in the published Qwen3-VL."""


@cache
def qwen3_vl(**changes: Any) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    kept = {key: value for key, value in QWEN3_PREPROCESSOR.items() if key != "image_processor_type"}
    return Qwen2VLImageProcessorPil(**{**kept, **changes})


def qwen3_count(self: Any, width: int, height: int) -> int:
    return int(qwen3_vl().get_number_of_image_patches(height, width)) // 4


def qwen3_arrays(self: Any, image: Any) -> dict[str, Any]:
    found = qwen3_vl(do_rescale=False, do_normalize=False)(image, return_tensors="np")
    values = found["pixel_values"].reshape(-1, 3, 2, 16 * 16)
    return {"patches": values[:, :, 0].reshape(-1, 3 * 16 * 16).astype(np.uint8)}


PIXTRAL_CONFIG = {
    **{"model_type": "mistral3", "image_token_index": 10, "image_break_token_id": 12, "image_end_token_id": 13},
    **{"spatial_merge_size": 2, "vision_config": {"model_type": "pixtral", "patch_size": 14}},
}
PIXTRAL_PREPROCESSOR = {
    "size": {"longest_edge": 1540},
    "patch_size": {"height": 14, "width": 14},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "PixtralImageProcessor",
}
"""As in the published Mistral Small 3.1."""


@cache
def pixtral(**changes: Any) -> Any:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    kept = {key: value for key, value in PIXTRAL_PREPROCESSOR.items() if key != "image_processor_type"}
    return PixtralImageProcessorPil(**{**kept, "patch_size": 28, **changes})  # as its processor has it: merged


def pixtral_count(self: Any, width: int, height: int) -> int:
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    pixels = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (height, width, 3), (0, 0, 0))  # no memory
    high, wide = get_resize_output_image_size(pixels, 1540, 28, "channels_last")
    return int(high // 28 * (wide // 28))


def pixtral_arrays(self: Any, image: Any) -> dict[str, Any]:
    found = pixtral(do_rescale=False, do_normalize=False)(image, return_tensors="np")
    _, high, wide = found["pixel_values"][0].shape
    values = found["pixel_values"][0].reshape(3, high // 14, 14, wide // 14, 14).transpose(1, 3, 0, 2, 4)
    grid = np.array([1, high // 14, wide // 14], np.int32)
    return {"patches": values.reshape(-1, 3 * 14 * 14).astype(np.uint8), "grid": grid}


GLM4V_CONFIG = {"image_token_id": 151363, "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
GLM4V_PREPROCESSOR = {
    "size": {"shortest_edge": 12544, "longest_edge": 9633792},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Glm4vImageProcessor",
}
"""As in the published GLM-4.5V."""


@cache
def glm4v(**changes: Any) -> Any:
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    kept = {key: value for key, value in GLM4V_PREPROCESSOR.items() if key != "image_processor_type"}
    return Glm4vImageProcessorPil(**{**kept, **changes})


def glm4v_count(self: Any, width: int, height: int) -> int:
    return int(glm4v().get_number_of_image_patches(height, width)) // 4


def glm4v_arrays(self: Any, image: Any) -> dict[str, Any]:
    found = glm4v(do_rescale=False, do_normalize=False)(image, return_tensors="np")
    values = found["pixel_values"].reshape(-1, 3, 2, 14 * 14)
    grid = found["image_grid_thw"][0].astype(np.int32)
    return {"patches": values[:, :, 0].reshape(-1, 3 * 14 * 14).astype(np.uint8), "grid": grid}


GLM4V: dict[str, Any] = {
    "config": GLM4V_CONFIG,
    "preprocessor": GLM4V_PREPROCESSOR,
    "changes": [{"size": {"longest_edge": 16384, "shortest_edge": 1024}}],
    "reference_count": glm4v_count,
    "reference_arrays": glm4v_arrays,
}
INTERNVL_CONFIG = {
    **{"image_token_id": 151667, "start_image_token_id": 151665, "end_image_token_id": 151666},
    **{"downsample_ratio": 0.5, "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]}},
}
INTERNVL_PREPROCESSOR = {
    "crop_to_patches": False,
    "image_mean": [0.485, 0.456, 0.406],
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "image_std": [0.229, 0.224, 0.225],
    "max_patches": 12,
    "min_patches": 1,
    "resample": 3,
    "size": {"height": 448, "width": 448},
}
"""As in the published InternVL 3; its processor cuts images into tiles all the same."""


@cache
def internvl(side: int = 448, most: int = 12, **changes: Any) -> Any:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    kept = {key: value for key, value in INTERNVL_PREPROCESSOR.items() if key != "image_processor_type"}
    given = {"size": {"height": side, "width": side}, "max_patches": most, "crop_to_patches": True}
    return GotOcr2ImageProcessorPil(**{**kept, **given, **changes})


def internvl_count(self: Any, width: int, height: int) -> int:
    return 256 * int(internvl().get_number_of_image_patches(height, width))


def internvl_arrays(self: Any, image: Any) -> dict[str, Any]:
    tiles = np.stack(internvl(do_rescale=False, do_normalize=False)(image, return_tensors="np")["pixel_values"])
    values = tiles.reshape(-1, 3, 32, 14, 32, 14).transpose(0, 2, 4, 1, 3, 5)
    grid = np.array([len(tiles), 32, 32], np.int32)
    return {"patches": values.reshape(-1, 3 * 14 * 14).astype(np.uint8), "grid": grid}


INTERNVL: dict[str, Any] = {
    "config": INTERNVL_CONFIG,
    "preprocessor": INTERNVL_PREPROCESSOR,
    "changes": [{"max_patches": 3}, {"min_patches": 5}],
    "reference_count": internvl_count,
    "reference_arrays": internvl_arrays,
}
PIXTRAL: dict[str, Any] = {
    "config": PIXTRAL_CONFIG,
    "preprocessor": PIXTRAL_PREPROCESSOR,
    "changes": [{"size": {"longest_edge": 100}}, {"size": {"height": 56, "width": 400}}],
    "reference_count": pixtral_count,
    "reference_arrays": pixtral_arrays,
}
GEMMA3_CONFIG = {
    **{"boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144, "mm_tokens_per_image": 256},
    "vision_config": {"image_size": 896, "patch_size": 14},
}
GEMMA3_PREPROCESSOR = {
    "do_pan_and_scan": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Gemma3ImageProcessor",
    "image_seq_length": 256,
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "size": {"height": 896, "width": 896},
}
"""As in the published Gemma 3."""


@cache
def gemma3(side: int = 896, **changes: Any) -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(size={"height": side, "width": side}, **changes)


def gemma3_arrays(self: Any, image: Any) -> dict[str, Any]:
    found = gemma3(do_rescale=False, do_normalize=False)(image, return_tensors="np")["pixel_values"][0]
    blocks = found.reshape(3, 64, 14, 64, 14).transpose(1, 3, 0, 2, 4)
    return {"patches": blocks.reshape(4096, -1).astype(np.uint8), "grid": np.array([1, 64, 64], np.int32)}


GEMMA4_CONFIG = {
    **{"boi_token_id": 255999, "eoi_token_id": 258882, "image_token_id": 258880},
    "text_config": {"use_bidirectional_attention": "vision", "sliding_window": 1024},
    "vision_config": {"patch_size": 16, "pooling_kernel_size": 3},
}
GEMMA4_PREPROCESSOR = {
    "do_normalize": False,
    "image_mean": [0.0, 0.0, 0.0],
    "image_processor_type": "Gemma4ImageProcessor",
    "image_std": [1.0, 1.0, 1.0],
    "max_soft_tokens": 280,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "resample": 3,
}
"""What transformers takes for Gemma 4."""


@cache
def gemma4(**changes: Any) -> Any:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil(**changes)


def gemma4_count(self: Any, width: int, height: int) -> int:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    high, wide = get_aspect_ratio_preserving_size(height, width, 16, 280 * 9, 3)
    return high // 48 * (wide // 48)


def gemma4_arrays(self: Any, image: Any) -> dict[str, Any]:
    found = gemma4(do_rescale=False)(image, return_tensors="np")
    places = found["image_position_ids"][0]
    num = int((places[:, 0] >= 0).sum())
    grid = np.array([1, *(places[:num].max(0) + 1)[::-1]], np.int32)
    return {"patches": found["pixel_values"][0][:num].astype(np.uint8), "grid": grid}


LLAMA4_CONFIG = {
    **{"boi_token_index": 200080, "eoi_token_index": 200081, "image_token_index": 200092},
    **{"column_end_token_id": 200084, "row_end_token_id": 200085, "whole_image_token_id": 200090},
    "vision_config": {"image_size": 336, "patch_size": 14, "pixel_shuffle_ratio": 0.5},
}
LLAMA4_PREPROCESSOR = {
    "do_convert_rgb": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Llama4ImageProcessorFast",
    "image_std": [0.5, 0.5, 0.5],
    "max_patches": 16,
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "resize_to_max_canvas": False,
    "size": {"height": 336, "width": 336},
}
"""As in the published Llama 4."""


@cache
def llama4_module() -> Any:
    """transformers' module of Llama 4's images, whatever torchvision there is: no build of it is beside every torch.

    The module takes padding of it alone.
    """
    import torch.nn.functional as F
    from transformers import image_processing_backends  # noqa: F401 - which looks for torchvision, too

    def pad(image: Any, padding: list[int], fill: list[int]) -> Any:
        assert not any(fill)
        left, top, right, bottom = padding
        return F.pad(image, (left, right, top, bottom))

    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    present = {name: sys.modules.get(name) for name in names}
    try:
        sys.modules.update({name: ModuleType(name) for name in names})
        sys.modules[names[-1]].functional = SimpleNamespace(pad=pad)  # type: ignore[attr-defined]
        return importlib.import_module("transformers.models.llama4.image_processing_llama4")
    finally:
        for name, module in present.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})


def by_torch(images: Any, high: int, wide: int) -> Any:
    """Resize as torchvision, which calls this."""
    import torch.nn.functional as F

    return F.interpolate(images, (high, wide), mode="bilinear", antialias=True)


def by_pillow(images: Any, high: int, wide: int) -> Any:
    import torch
    from PIL import Image

    each = [Image.fromarray(image.permute(1, 2, 0).numpy()).resize((wide, high), 2) for image in images]
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in each])


def llama4(
    image: Any,
    resize: Any = by_torch,
    side: int = 336,
    most: int = 16,
    *,
    normalizes: bool = False,
    enlarges: bool = False,
) -> Any:
    """Tiles of an image `[N, 3, side, side]`, and their rows and columns, by transformers' rules."""
    import torch
    from transformers.image_utils import SizeDict

    cls = llama4_module().Llama4ImageProcessor
    processor = SimpleNamespace(
        resize=lambda images, size, resample: resize(images, size.height, size.width),
        normalize=lambda images, mean, std: (images - mean) / std,
    )
    processor.rescale_and_normalize = lambda *args: cls.rescale_and_normalize(processor, *args)
    found = cls._preprocess(
        processor, [torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()], do_resize=True,
        size=SizeDict(height=side, width=side), resample=2, do_rescale=normalizes, rescale_factor=1 / 255,
        do_normalize=normalizes, image_mean=0.5, image_std=0.5, max_patches=most, resize_to_max_canvas=enlarges,
        disable_grouping=False, return_tensors="pt",
    )  # fmt: skip
    return found["pixel_values"], tuple(found["aspect_ratios"][0].tolist())


def llama4_count(self: Any, width: int, height: int) -> int:
    import torch
    from transformers.image_utils import SizeDict

    module = llama4_module()
    canvases = torch.tensor(module.find_supported_resolutions(16, SizeDict(height=336, width=336)))
    high, wide = (module.get_best_fit((height, width), canvases) // 336).tolist()
    return 144 * (high * wide + (high * wide > 1))


def llama4_arrays(self: Any, image: Any) -> dict[str, Any]:
    tiles, _ = llama4(image)
    values = tiles.reshape(-1, 3, 24, 14, 24, 14).permute(0, 2, 4, 1, 3, 5)
    grid = np.array([len(tiles), 24, 24], np.int32)
    return {"patches": values.reshape(-1, 3 * 14 * 14).numpy(), "grid": grid}


LLAMA4: dict[str, Any] = {
    "config": LLAMA4_CONFIG,
    "preprocessor": LLAMA4_PREPROCESSOR,
    "changes": [{"max_patches": 3}, {"resize_to_max_canvas": True}],
    "reference_count": llama4_count,
    "reference_arrays": llama4_arrays,
    "tolerance": 1,
}
GEMMA4: dict[str, Any] = {
    "config": GEMMA4_CONFIG,
    "preprocessor": GEMMA4_PREPROCESSOR,
    "changes": [{"max_soft_tokens": 70}, {"max_soft_tokens": 560}],
    "reference_count": gemma4_count,
    "reference_arrays": gemma4_arrays,
}
GEMMA3: dict[str, Any] = {
    "config": GEMMA3_CONFIG,
    "preprocessor": GEMMA3_PREPROCESSOR,
    "reference_count": lambda self, width, height: 256,  # `Gemma3Processor` writes so many, whatever the size
    "reference_arrays": gemma3_arrays,
}
QWEN3_VL: dict[str, Any] = {
    "config": QWEN3_CONFIG,
    "preprocessor": QWEN3_PREPROCESSOR,
    "changes": [{"size": {"longest_edge": 16384, "shortest_edge": 1024}}],
    "reference_count": qwen3_count,
    "reference_arrays": qwen3_arrays,
}
QWEN2_VL: dict[str, Any] = {
    "config": CONFIG,
    "preprocessor": PREPROCESSOR,
    "changes": [{"max_pixels": 6272}, {"min_pixels": 60_000}, {"min_pixels": None, "max_pixels": None}],
    "reference_count": reference_count,
    "reference_arrays": reference_arrays,
}
"""Attributes of its conformance class."""
