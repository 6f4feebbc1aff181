"""What the memory plan counts of a vision tower bounds what encoding an image allocates, for every family."""

from __future__ import annotations

import json
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import seeing
import torch
from seeing import picture, processor_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ConfigError, PluginError, RequestError
from dovetail.contracts.layers import BuildContext
from dovetail.plugins import Registry, load, make_plan
from dovetail.processing.images import max_patches_of
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.memory.estimates import tower_bytes
from dovetail.sdk.layers import tower
from dovetail.sdk.layers.plain import PLAIN
from dovetail_models.pixtral_images import PixtralImages
from dovetail_models.qwen2_vl_images import Qwen2VLImages
from dovetail_server.media.rules import layout_of

FACTOR = 2.5
"""The plan counts at most so many times what is allocated."""


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, while these live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made, given = (
            {each.untyped_storage() for each in tree_leaves(tree) if isinstance(each, torch.Tensor)}
            for tree in (found, (args, kwargs))
        )
        for storage in made - given:
            if storage._cdata not in self._known:
                self._add(storage)
        self.most = max(self.most, self.now)
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


PATCH = 4
"""Side of a patch. Published ones have 14 or 16: the pixels of those would hide in small towers what layers hold."""
QWEN3 = {"hidden_size": 144, "intermediate_size": 538, "num_heads": 4}
PIXTRAL = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
WIDE: dict[str, dict[str, Any]] = {
    "gemma4": {"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 6, "num_key_value_heads": 6}
    | {"head_dim": 32},
    "gemma3": {"hidden_size": 144, "intermediate_size": 538, "num_attention_heads": 4, "image_size": 112},
    "qwen2_vl": {"embed_dim": 160, "num_heads": 4, "mlp_ratio": 4},
    "qwen2_5_vl": {"hidden_size": 160, "intermediate_size": 428, "num_heads": 4, "window_size": 32},
    **{"qwen3_vl": QWEN3, "qwen3_5": QWEN3},
    "glm4v": {"hidden_size": 192, "intermediate_size": 1712, "num_heads": 3},
    **{"llava": PIXTRAL, "mistral3": PIXTRAL},
    "internvl": {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "use_qk_norm": True}
    | {"image_size": [40, 40]},
    "llama4": {"hidden_size": 176, "intermediate_size": 704, "num_attention_heads": 4, "image_size": 40}
    | dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 512),
}
"""Towers an eighth as wide as published ones, in their proportions."""
MOST = (2 * PATCH) ** 2 * 160
LARGE: dict[str, dict[str, Any]] = {
    "gemma4": {"patch_size": PATCH, "max_soft_tokens": 70},
    "gemma3": {},
    "internvl": {**seeing.TILES, "size": {"height": 40, "width": 40}},
    "llama4": {"size": {"height": 40, "width": 40}, "max_patches": 6},
    **{"llava": {"size": {"longest_edge": 100}}, "mistral3": {"size": {"longest_edge": 100}}},
    "glm4v": {"size": {"shortest_edge": 128, "longest_edge": 2 * MOST}, "patch_size": PATCH},
}
"""`preprocessor_config.json`, for images of some 600 patches."""
SIZES = ((400, 280), (90, 91), (1000, 80))
"""The last one has windows that are padded most."""


class Built:
    """A model that sees with made-up weights, and what makes its images ready."""

    def __init__(self, folder: Path, kind: str, dtype: torch.dtype) -> None:
        from transformers import AutoModelForImageTextToText

        patch = [PATCH, PATCH] if kind == "internvl" else PATCH
        config = seeing.config_of(kind, {**WIDE[kind], "patch_size": patch}, hidden_size=256)
        config.architectures = [AutoModelForImageTextToText._model_mapping[type(config)].__name__]
        config.save_pretrained(folder)
        qwen = {"min_pixels": 64, "max_pixels": MOST, "patch_size": PATCH}
        (folder / "preprocessor_config.json").write_text(json.dumps(LARGE.get(kind, qwen)))
        self.processor, self.files = processor_of(folder), ModelFolder(folder, weights=False)
        files = self.files
        registry, attention = Registry.scan(), "torch_native"
        self.plan = plan = make_plan(registry, model=files.architecture, attention_backend=attention, processor="auto")
        plugin = load(plan, "engine").get("model", plan.of_kind("model")[0].qualified)
        self.config: ModelConfig = files.model_config(plugin.config_from_hf)
        self.model: Any = plugin.build(
            self.config, BuildContext(device=torch.device("cpu"), dtype=dtype, factory=PLAIN)
        )
        for param in self.model.parameters():
            torch.nn.init.uniform_(param, -0.01, 0.01)

    def encoded(self, size: tuple[int, int]) -> torch.Tensor:
        """Return what the tower makes of an image."""
        given = {name: torch.from_numpy(array) for name, array in self.processor.process(picture(*size)).items()}
        with torch.inference_mode():
            found: torch.Tensor = self.model.encode(given)
        return found

    def measure(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return an image's patches, and the bytes that are allocated at most while it is encoded."""
        given = {name: torch.from_numpy(array) for name, array in self.processor.process(picture(*size)).items()}
        with torch.inference_mode(), Peak() as peak:
            self.model.encode(given)
        return self.processor.layout(*size).num_patches, peak.most + sum(each.nbytes for each in given.values())


@pytest.mark.parametrize("kind", WIDE)
def test_a_limit_holds_to_the_patch(kind: str, tmp_path: Path) -> None:
    """At every family's own bound and at any below, a patch too many is a 400 that says what is possible."""
    processor = Built(tmp_path, kind, torch.float32).processor
    most = processor.max_patches()
    assert most is not None
    found = [processor.layout(width, height).num_patches for width in range(7, 2000, 53) for height in (31, 90, 577)]
    assert 0.75 * most <= max(found) <= most  # it is near what there is
    num = processor.layout(90, 91).num_patches
    for limit in (num, num + 1, most):
        assert layout_of(processor, 90, 91, "x", limit) == processor.layout(90, 91)
    with pytest.raises(RequestError) as refused:
        layout_of(processor, 90, 91, "messages[0].content[1]", num - 1)
    assert refused.value.param == "messages[0].content[1]"
    said = f"an image of 90 x 91 pixels has {num} patches for this model; possible: {num - 1} (--max-image-patches)"
    assert said in refused.value.message
    if (hint := re.search(r"shrink it to (\d+) x (\d+)", refused.value.message)) is not None:
        wide, high = map(int, hint.groups())
        assert processor.layout(wide, high).num_patches < num
    else:
        assert "send an image of another shape" in refused.value.message
    assert (hint is None) == (kind in ("gemma3", "gemma4"))  # all images have as many, those of a shape


def test_what_a_server_starts_with(tmp_path: Path) -> None:
    """The processor's bound is known before memory is planned; less may be asked for, but not less than any image."""
    built = Built(tmp_path, "qwen2_5_vl", torch.float32)
    for asked, most in ((None, 712), (712, 712), (711, 711), (713, 712)):
        assert max_patches_of(built.plan, built.files, asked) == most
    with pytest.raises(ConfigError, match="--max-image-patches 100: small images have 256 here; give at least as many"):
        max_patches_of(built.plan, built.files, 100)


def test_a_hint_for_a_photograph() -> None:
    """Of an image that is shrunk several times over, too, the error names a size that fits, of the same shape."""
    processor = PixtralImages((10, 12, 13), 14, 1, (1540, 1540))
    with pytest.raises(RequestError) as refused:
        layout_of(processor, 8000, 6000, "x", 1024)
    [(wide, high)] = re.findall(r"; shrink it to (\d+) x (\d+)$", refused.value.message)
    assert 700 <= processor.layout(int(wide), int(high)).num_patches <= 1024
    assert int(wide) / int(high) == pytest.approx(8000 / 6000, rel=0.1)
    with pytest.raises(
        RequestError, match=r"has 9213 tokens .* possible: 1024, its context length; shrink it to"
    ) as bad:
        layout_of(processor, 8000, 6000, "x", 9130, 1024)
    assert bad.value.code == "image_too_large"
    whole = processor.layout(8000, 6000)
    assert layout_of(processor, 8000, 6000, "x", whole.num_patches, len(whole.ids)) == whole


@pytest.mark.parametrize(
    "bound",
    [0, -5, True, 712.0, float("nan"), float("inf"), 1 << 63, "712", 255, ValueError("no bound"), KeyError("a")],
)
def test_a_bound_that_is_none(bound: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a processor says of its images is looked at before anything starts, and the error names the plugin."""
    built = Built(tmp_path, "qwen2_5_vl", torch.float32)

    def max_patches(self: Any) -> Any:
        if isinstance(bound, Exception):
            raise bound
        return bound

    monkeypatch.setattr(Qwen2VLImages, "max_patches", max_patches)
    said = re.escape(f"raised {bound!r}" if isinstance(bound, Exception) else f"returned {bound!r}, and small images")
    with pytest.raises(PluginError, match=f"^processor 'qwen2-vl' of dovetail-llm .*{said}"):
        max_patches_of(built.plan, built.files, None)
    monkeypatch.setattr(Qwen2VLImages, "max_patches", lambda self: None)
    assert max_patches_of(built.plan, built.files, None) is None


@pytest.mark.parametrize("kind", WIDE)
def test_pieces_change_nothing(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image in pieces, the last of which is shorter, has the embeddings that it has at once, but for rounding."""
    built = Built(tmp_path, kind, torch.float32)
    whole = built.encoded((90, 91))
    monkeypatch.setattr(tower, "PIECE", 56)
    found = built.encoded((90, 91))
    assert whole.abs().max() > 0
    assert (found - whole).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", WIDE)
def test_the_plan_bounds_what_is_allocated(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of three shapes, whole and in pieces: the plan has what is taken, and at most `FACTOR` times that."""
    built = Built(tmp_path, kind, dtype)
    seen = built.config.vision
    assert seen is not None
    for piece in (seen.piece_patches, 64):
        monkeypatch.setattr(tower, "PIECE", piece)
        seen = replace(seen, piece_patches=piece)
        for size in SIZES:
            patches, taken = built.measure(size)
            planned = tower_bytes(seen, dtype.itemsize, patches)
            assert taken <= planned <= FACTOR * taken, (piece, size)
