"""What files that claim sizes have in common: values that no size should have, checkpoints, and what reads them."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from dovetail.contracts.layers import BuildContext
from dovetail.contracts.needs import unserved
from dovetail.errors import ModelError
from dovetail.layers.plain import PLAIN
from dovetail.plugin_settings import PluginSettings
from dovetail.processing.embeddings import Embedder
from dovetail.processing.prepare import check_model
from dovetail.processing.reranker import says_so
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.hf_config import CONFIG_KEYS, eos_token_ids, quant_method
from dovetail.runtime.memory.plan import DeviceBytes, plan_memory

sys.path.append(str(Path(__file__).parents[2] / "models"))
from families import make_checkpoint

NUMBERS: list[Any] = [
    *(-1, 0, 1, 2, 3, 5, 7, 16, 31, 63, 65, 100, 255, 1000, 4097, 65_535, 65_537, 10**6, 10**7),
    *(sign * (1 << bits) + more for bits in (15, 16, 20, 24, 31, 32, 40, 53, 62, 63, 64, 70) for sign in (1, -1)
      for more in (-1, 0, 1)),
    *(10**18, 10**30, 10**300, float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 0.5, 1.5, -0.0),
]  # fmt: skip
OTHERS: list[Any] = [
    *(True, False, None, "", "7", "x", "true", "nan", "1e9", "\0", "../../x", "é" * 3000),
    *([], {}, [[]], [None], {"": 1}),
    *([1] * 9999, ["x"] * 999, [10**9], {"a": {"b": [1, {"c": 2}]}}, [1 << 40] * 3, {"full_attention": {}}),
]
DEVICE = DeviceBytes(kind="cpu", name="cpu", total=4 << 30, free=4 << 30)
LIMIT_S = 10.0


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


def value(rng: random.Random) -> Any:
    """Draw a value."""
    return rng.choice(NUMBERS if rng.random() < 0.7 else OTHERS)


@cache
def checkpoint(kind: str) -> Path:
    """A tiny checkpoint of a family; not among those that are removed."""
    made = Path(tempfile.mkdtemp(dir="/tmp"))
    make_checkpoint(made, kind)
    return made


@cache
def plugin(architecture: str) -> Any:
    """The plugin of an architecture."""
    found = [entry for entry in entry_points(group="dovetail.models.v1") if entry.name == architecture]
    if not found:
        raise ModelError(f"no model plugin serves {architecture!r}")
    return found[0].load()


def read(path: Path) -> float:
    """Do what a start does until weights are read: check, translate, plan, build.

    Raises:
        ConfigError: The file is refused.
        TimeoutError: It took longer than any such file may.
    """
    began = time.process_time()
    settings = PluginSettings(model_path=str(path), device="cpu")
    check_model(settings)
    folder = ModelFolder.read(path)
    eos_token_ids(path, folder.config)
    found = plugin(folder.architecture)
    config = folder.model_config(found.config_from_hf, served=CONFIG_KEYS if quant_method(folder.config) else ())
    if (reason := unserved(config)) is not None:
        raise ModelError(reason)
    Embedder.of_checkpoint(path, config.pool)
    says_so(path, folder.config)
    plan = plan_memory(settings, config, config.dtype, DEVICE, 1 << 20, has_graphs=False)
    assert plan.context_len <= config.max_position_embeddings
    if quant_method(folder.config) == "":  # others are built by their quantisation
        dtype = getattr(torch, config.dtype)
        found.build(config, BuildContext(device=torch.device("cpu"), dtype=dtype, factory=PLAIN))
    if time.process_time() - began > LIMIT_S:
        raise TimeoutError(f"{time.process_time() - began:.0f} s of processor time")
    return 0.0
