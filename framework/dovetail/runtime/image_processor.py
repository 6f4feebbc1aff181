"""The image processor of a plan, as a model folder sets it up."""

from __future__ import annotations

from pathlib import Path

from dovetail.base.model_files import object_if_there
from dovetail.contracts.processor import ImageProcessor
from dovetail.plugins import PluginPlan
from dovetail.plugins.loader import import_planned
from dovetail.runtime.checkpoint.folder import ModelFolder

KIND = "processor"


def preprocessor_config(folder: Path) -> dict[str, object]:
    """Return what a model's folder says of image processing; empty where it has no such file.

    Raises:
        ModelError: A file is not a JSON object.
    """
    nested = object_if_there(folder / "processor_config.json").get("image_processor")
    if isinstance(nested, dict):
        return nested
    return object_if_there(folder / "preprocessor_config.json")


def processor_of(plan: PluginPlan, model: ModelFolder) -> ImageProcessor | None:
    """Return the plan's processor for layouts and arrays; None where the plan has none.

    Ids that the tokenizer alone knows are 0, as no tokenizer is read.

    Raises:
        ModelError: The model's configuration has a value that the processor cannot serve.
    """
    for planned in plan.of_kind(KIND):
        cls: type[ImageProcessor] = import_planned(planned, plan.timeout_s)
        ids = {key: 0 for key in cls.token_texts if model.config.get(key) is None}
        return cls.from_config({**model.config, **ids}, preprocessor_config(model.path))
    return None
