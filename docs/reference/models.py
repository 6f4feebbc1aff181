"""The page `reference/models.md`: every architecture with a plugin of its own, from the plugins."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from math import prod
from typing import Any

from dovetail.base.distribution import DISTRIBUTION
from dovetail.contracts.cache import DTYPE_BYTES, CacheGroup, Recurrent
from dovetail.contracts.config import ModelConfig
from dovetail.sdk.checkpoint import dense_numel

HEAD = """\
# Models in figures

Every architecture that a plugin of Dovetail serves; [Models](../models.md) says what else runs, and what is refused.
The example is transformers' default configuration of the family, weights and cache are those of bfloat16. What your
model takes, `dovetail plan DIR` says.

"""
MISSING: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 26]},
    "deepseek_v2": {"num_experts_per_tok": 6},
}
"""What transformers' default configurations leave open."""
TASKS = {
    "ForCausalLM": "FOR_CAUSAL_LM_",
    "ForMaskedLM": "FOR_MASKED_LM_",
    "ForSequenceClassification": "FOR_SEQUENCE_CLASSIFICATION_",
}
"""How transformers calls its lists of classes with a head."""
GIB, ITEM = 1 << 30, 2


def page() -> str:
    """Return the whole page."""
    return HEAD + "\n".join(rows()) + "\n"


def rows() -> Iterator[str]:
    """Yield the rows of the table."""
    yield "| architecture | what it is | for example | weights | cache of a token |"
    yield "|---|---|---|---|---|"
    found = {point.name: point for point in entry_points(group="dovetail.models.v1")}
    for name, point in sorted(found.items()):
        if point.dist is None or point.dist.name != DISTRIBUTION or name == "transformers":
            continue
        about = " ".join((import_module(point.module).__doc__ or "").partition("\n\n")[0].split())
        if name.endswith("ForConditionalGeneration"):
            yield f"| `{name}` | {about} | | | as its text part |"
            continue
        kind, config = example(name, point.load())
        size = dense_numel(config) * ITEM / GIB
        kept = ", ".join(map(group, config.cache_groups)) or "nothing"
        yield f"| `{name}` | {about} | {kind} | {size:,.1f} GiB | {kept} |"


def example(architecture: str, plugin: Any) -> tuple[str, ModelConfig]:
    """Return transformers' name of an architecture's configuration, and what the plugin makes of its defaults."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    task = next((name for ending, name in TASKS.items() if architecture.endswith(ending)), "")
    classes = getattr(modeling_auto, f"MODEL_{task}MAPPING_NAMES")
    kinds = [kind for kind, cls in classes.items() if architecture in (cls if isinstance(cls, tuple) else (cls,))]
    kind = min(kinds, key=lambda kind: (not kind.endswith("_text"), len(kind)))  # others share the class
    values = json.loads(CONFIG_MAPPING[kind](**MISSING.get(kind, {})).to_json_string(use_diff=False))
    return kind, plugin.config_from_hf({**values, "architectures": [architecture]})


def group(found: CacheGroup) -> str:
    """Describe a group of layers and its bytes a token, in a 2-byte type."""
    num = sum(prod(tensor.shape) * DTYPE_BYTES.get(tensor.dtype or "", ITEM) for tensor in found.tensors)
    num *= len(found.writers)
    what = re.sub(r"-\d+$", "", found.name) if not found.name.startswith("window") else found.name
    latent = " latent" if any(tensor.name == "latent" for tensor in found.tensors) else ""
    per = " a request" if isinstance(found.reach, Recurrent) else ""
    return f"{len(found.layers)} layers {what}{latent}: {num / 1024:,.0f} KiB{per}"
