"""A plugin's own settings: from strings and YAML values to an instance of its `Options` class, and back.

`Options` is a dataclass or a pydantic model whose fields all have defaults. pydantic does the checking; it is imported
only where a plugin has options, so that a parser without any needs nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from dovetail.contracts.errors import PluginError

SECRETS = frozenset({"SecretStr", "SecretBytes", "Secret"})
"""Types of pydantic's, by name: it is imported only where a plugin has options."""


class Option(NamedTuple):
    """One field of an `Options` class. `default` is shown as text; None for no default worth showing.

    A value of one that `is_secret`, whose type is pydantic's `SecretStr` or has it in it, is shown nowhere.
    """

    name: str
    type: str
    default: str | None
    help: str
    is_secret: bool = False

    @property
    def flag(self) -> str:
        """The field's name as a flag writes it: `top-k`."""
        return self.name.replace("_", "-")


class OptionError(PluginError):
    """An option is unknown or has a wrong value.

    Args:
        name: The option's.
        reason: What was given and what is possible.
        owner: The plugin and its package, once known.
        plugin: The plugin's name, once known.
    """

    def __init__(self, name: str, reason: str, owner: str = "", plugin: str = "") -> None:
        super().__init__(f"{owner}: option {name!r}: {reason}" if owner else f"option {name!r}: {reason}")
        self.name = name
        self.reason = reason
        self.owner = owner
        self.plugin = plugin


def option_key(name: str) -> str:
    """Return the form in which plugin names of options compare: lower case, `_` and `.` as `-`."""
    return name.strip().lower().replace("_", "-").replace(".", "-")


def describe_options(options: type[Any]) -> list[Option]:
    """Return the fields of an `Options` class.

    Raises:
        PluginError: It is neither a dataclass nor a pydantic model, or a field has no default.
    """
    fields = getattr(options, "model_fields", None)
    if isinstance(fields, dict):
        rows = [(n, f.annotation, f.annotation, f.get_default, f.description or "") for n, f in fields.items()]
        required = [name for name, field in fields.items() if field.is_required()]
    elif dataclasses.is_dataclass(options):
        each, types, missing = dataclasses.fields(options), _types_of(options), dataclasses.MISSING
        rows = [
            (f.name, f.type, types.get(f.name, f.type), lambda f=f: f.default, f.metadata.get("help", "")) for f in each
        ]
        required = [f.name for f in each if f.default is missing and f.default_factory is missing]
    else:
        raise PluginError(f"{options!r} is neither a dataclass nor a pydantic model")
    if required:
        raise PluginError(f"{options.__qualname__}.{required[0]} has no default; every option needs one")
    return [
        Option(name, _type_name(written, meant), _default(default), str(text), _is_secret(meant))
        for name, written, meant, default, text in rows
    ]


def make_options(options: type[Any], given: Mapping[str, Any]) -> Any:
    """Return an instance of `options` from plain values; strings are converted as pydantic does.

    Raises:
        OptionError: A name that is no field, or a value of the wrong type or out of bounds.
        PluginError: The class refuses its values as a whole, or has a type that cannot be checked.
    """
    described = {option.name: option for option in describe_options(options)}
    known = list(described)
    values: dict[str, Any] = {}
    for written, value in given.items():
        name = written.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"possible: {', '.join(known) or 'none'}"
            raise OptionError(written, f"unknown; {hint}")
        values[name] = value
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    try:
        return TypeAdapter(options).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # what the class itself checks of all values
            raise PluginError(f"{options.__qualname__}: {_one_line(first['msg'])}") from None
        name = str(first["loc"][0])
        text = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        is_secret = name in described and described[name].is_secret
        given_as = "the value" if is_secret else repr(first["input"])
        raise OptionError(name, f"{given_as} {text[:1].lower()}{text[1:]}") from None
    except PydanticUserError as error:  # a type that pydantic does not know, or that is not defined
        raise PluginError(f"{options.__qualname__}: {_one_line(error.message)}") from None


def _one_line(text: str) -> str:
    return " ".join(text.removeprefix("Value error, ").split())


def plain_options(options: type[Any], made: Any) -> dict[str, Any]:
    """Return the values of an instance as JSON values, which a plan can carry: secrets too, as they are."""
    from pydantic import TypeAdapter
    from pydantic_core import to_jsonable_python

    adapter = TypeAdapter(options)
    values, plain = dict(adapter.dump_python(made, mode="json")), adapter.dump_python(made)
    secret = {option.name for option in describe_options(options) if option.is_secret}
    return values | {name: to_jsonable_python(_shown_value(plain[name])) for name in secret & plain.keys()}


def _shown_value(value: Any) -> Any:
    """Return a value with the secrets in it as they are, at any depth."""
    if hasattr(value, "get_secret_value"):
        return value.get_secret_value()
    if isinstance(value, Mapping):
        return {name: _shown_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_shown_value(item) for item in value]
    return value


def _is_secret(annotation: Any, within: tuple[Any, ...] = ()) -> bool:
    """Tell whether a field's type is one of pydantic's secrets, or has one in it: a list of them, a model with one."""
    kinds = (annotation, get_origin(annotation))
    if any(getattr(kind, "__name__", "") in SECRETS for kind in kinds):
        return True
    inner = list(get_args(annotation))
    if isinstance(annotation, type) and annotation not in within:
        fields = getattr(annotation, "model_fields", None)
        if isinstance(fields, dict):
            inner += [field.annotation for field in fields.values()]
        elif dataclasses.is_dataclass(annotation):
            inner += _types_of(annotation).values()
        within = (*within, annotation)
    return any(_is_secret(each, within) for each in inner)


def _types_of(options: type[Any]) -> dict[str, Any]:
    """Return the types of a dataclass's fields, those that its module can resolve."""
    try:
        return get_type_hints(options)
    except (NameError, TypeError, AttributeError):  # a type that is imported for checking only is no secret's
        return {}


def _type_name(annotation: Any, meant: Any) -> str:
    if get_origin(meant) is Literal:
        return "{" + ",".join(map(str, get_args(meant))) + "}"
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _default(get: Any) -> str | None:
    value = get()
    shown = value is not None and value is not dataclasses.MISSING and type(value).__name__ != "PydanticUndefinedType"
    return str(value) if shown else None
