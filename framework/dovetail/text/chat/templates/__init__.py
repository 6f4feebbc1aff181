"""Chat templates that Dovetail brings, one file per name, for models that come without one.

Each is written in the style of a family, so that a model of that family sees the turns it was trained on and the
parser of that name reads its replies. They are for models without a template of their own: a model's own is better.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from dovetail.contracts.errors import ConfigError

FOLDER = Path(__file__).parent


def builtin_templates() -> list[str]:
    """Return the names that `--chat-template` takes besides files."""
    return sorted(path.stem for path in FOLDER.glob("*.jinja"))


def template_path(choice: str | os.PathLike[str]) -> Path:
    """Return the file that `--chat-template` means.

    Raises:
        ConfigError: There is no such file and no template of that name.
    """
    path = Path(choice)
    if path.is_file():
        return path
    text = os.fspath(choice)
    names = builtin_templates()
    name = text.replace("_", "-").lower()
    if name in names:
        return FOLDER / f"{name}.jinja"
    if os.sep in text or path.suffix:
        raise ConfigError(f"--chat-template {text!r}: no such file; give a Jinja template file")
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"built in: {', '.join(names)}"
    raise ConfigError(f"--chat-template {text!r}: neither a file nor a built-in template; {hint}")


def read_template(choice: str | os.PathLike[str]) -> str:
    """Return the text of the template that `--chat-template` means.

    Raises:
        ConfigError: There is none, or the file cannot be read.
    """
    path = template_path(choice)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--chat-template {os.fspath(choice)!r}: {reason}; give a Jinja template file") from error
