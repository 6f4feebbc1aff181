"""Whether a text conforms to a JSON Schema. Only for the child process: see `validate`."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import validator_for


def is_valid(schema: Any, text: str) -> bool:
    """Whether `text` is JSON that conforms to `schema`, of the draft that it names, else 2020-12. Fetches nothing."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    validator = validator_for(schema, default=Draft202012Validator)
    try:
        validator(schema).validate(value)
    except ValidationError:
        return False
    return True
