"""Examples in the OpenAPI document, which `/docs` offers to run. A test runs each against the demo model.

`examples.json` has them by path, and the `parts` that several name. `$model` stands for the first served name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.contracts.tables import table

_DATA = table(__file__)


def _with(parts: Mapping[str, Any], value: Any) -> Any:
    """Put parts where an example names them."""
    if isinstance(value, dict):
        return {key: _with(parts, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with(parts, item) for item in value]
    return parts.get(value, value) if isinstance(value, str) else value


def fill(value: Any, model: str) -> Any:
    """Put the model's name into an example."""
    return _with({"$model": model}, value)


BODIES: dict[str, dict[str, dict[str, Any]]] = _with(_DATA["parts"], _DATA["bodies"])
BODIES |= {f"/v1{path}": BODIES[path] for path in ("/tokenize", "/detokenize")}
BODIES |= {"/classify": BODIES["/v1/classify"], "/rerank": BODIES["/v1/rerank"], "/v2/rerank": BODIES["/v1/rerank"]}
BODIES |= {
    f"{path}/render": {name: {**body, "stream": False} for name, body in list(BODIES[path].items())[:1]}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
}
"""Bodies by path, each under the name that the page shows."""
PARAMETERS: dict[str, dict[str, str]] = {"/v1/models/{model_id}": {"model_id": "$model"}}
"""Values of path parameters that exist on every server."""


def add_examples(document: dict[str, Any], model: str) -> None:
    """Write the examples into an OpenAPI document."""
    for path, examples in BODIES.items():
        operation = document["paths"].get(path, {}).get("post", {})
        if "requestBody" not in operation:  # `--apis` leaves its API out; perhaps a package has the path
            continue
        content = operation["requestBody"]["content"]["application/json"]
        content["examples"] = {
            name: {"summary": name, "value": fill(example, model)} for name, example in examples.items()
        }
    for path, values in PARAMETERS.items():
        for operation in document["paths"][path].values():
            for parameter in operation["parameters"]:
                if parameter["name"] in values:
                    parameter["example"] = fill(values[parameter["name"]], model)
