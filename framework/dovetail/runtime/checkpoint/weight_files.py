"""Which files of a folder hold the weights. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dovetail.base.model_files import is_there, object_if_there, read_object
from dovetail.checkpoint.formats import Formats
from dovetail.contracts.errors import ModelError
from dovetail.runtime.hf_config import ADAPTER, adapter_alone, inside
from dovetail.sdk.config import some

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
MAX_INDEX_BYTES = 64 << 20
"""The index of 90,000 tensors takes 9 MB."""


class WeightFiles(NamedTuple):
    """The files of a checkpoint.

    Attributes:
        files: In the order in which they are read.
        names: The file of each tensor, by names; empty where no index holds.
        note: What is odd about them, in a sentence; empty for nothing.
    """

    files: list[Path]
    names: Mapping[str, str] = {}
    note: str = ""


def weight_files(folder: Path) -> WeightFiles:
    """List the files of a checkpoint: those the index names, else `model.safetensors`, else all such.

    Raises:
        ModelError: None is there, or the index names a file that is not and no whole file stands beside it.
    """
    index, whole, note = index_of(folder), folder / WHOLE, ""
    if index:
        names = sorted(set(index.values()))
        absent = [name for name in names if not is_there(folder / name)]
        beside = is_there(whole) and WHOLE not in names
        if not absent:
            note = f"{folder}: {WHOLE} is not read, as {INDEX} names other files; remove the older" if beside else ""
            return WeightFiles([folder / name for name in names], index, note)
        if not beside:
            raise ModelError(
                f"{folder / INDEX} names files that are not there: {some(absent)}; download the checkpoint again"
            )
        note = f"{folder / INDEX} names files that are not there ({some(absent, 2)}): {WHOLE} is read; remove the index"
    if is_there(whole):  # beside it may stand the same weights under their maker's own names: of these nothing is said
        others = sorted(path.name for path in folder.glob("model*.safetensors") if path.name != WHOLE)
        left = f"{folder}: {WHOLE} is read, and {some(others, 2)} beside it is not; remove what is too much"
        return WeightFiles([whole], note=note or (left if others else ""))
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_model"))
    if not files:
        raise ModelError(_why_none(folder))
    return WeightFiles(files)


def is_bare(path: Path) -> bool:
    """Whether a model path has nothing that is, or was meant to be, weights: a folder of descriptions."""
    if Formats.installed().at(path) is not None:
        return False
    patterns = ("*.index.json", "*.safetensors", ADAPTER, *PICKLED)
    return not any(next(path.glob(pattern), None) for pattern in patterns)


def _why_none(folder: Path) -> str:
    others = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if is_there(folder / ADAPTER):
        return adapter_alone(folder, object_if_there(folder / ADAPTER))
    if others:
        return (
            f"model path {str(folder)!r}: only pickled weights ({some(others)}), which can run code when read and are "
            "refused; convert them with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    return (
        f"model path {str(folder)!r}: no *.safetensors; finish the download, or use --load-format dummy for random "
        "weights"
    )


def index_of(folder: Path) -> dict[str, str]:
    """Return the file of each tensor as the checkpoint's index says, empty without an index.

    Raises:
        ModelError: It is no index.
    """
    index = folder / INDEX
    if not is_there(index):
        return {}
    weight_map = read_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index}: not a weight index: it has no 'weight_map' of file names")
    for name in set(weight_map.values()):
        inside(folder, name)
    return weight_map
