"""`/v1/models`."""

from __future__ import annotations

from typing import Literal

import msgspec

DEFAULT_MODEL = "default"
"""What SGLang's clients call the model of a server that they do not know."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A name under which the model is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dovetail"
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]
