"""The page `reference/settings.md`: every setting of `dovetail serve`, from the settings' class."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from dovetail.processing.plugin_settings import ENV_PREFIX
from dovetail_server.cli.options import describe, flag_names, has_flag, is_common
from dovetail_server.settings.serve import ServeSettings

HEAD = f"""\
# Settings

Every setting of `dovetail serve`. Each is a flag, an environment variable (`{ENV_PREFIX}PORT` for `--port`) and a key
of the file of `--config`. Flags override variables, and variables override the file. A switch also has a `--no-` form.
The offline `LLM` takes those of the engine as arguments: `LLM(max_total_tokens=4096)`.

Flags of SGLang, vLLM and llama.cpp that are not listed here are known too: see
[Migrate](../migrate.md#flags-fields-and-routes).
Options of plugins are shown by `dovetail plugin info NAME`.

"""


def page() -> str:
    """Return the whole page."""
    shown = {name: field for name, field in ServeSettings.model_fields.items() if has_flag(field)}
    common = {name: field for name, field in shown.items() if is_common(field)}
    rest = {name: field for name, field in shown.items() if name not in common}
    return "\n".join([HEAD + "## Common\n", *table(common), "\n## All others\n", *table(rest), ""])


def table(fields: dict[str, FieldInfo]) -> Iterator[str]:
    """Yield a table of settings by name."""
    yield "| flag | also | what it does |"
    yield "|---|---|---|"
    for name, field in sorted(fields.items()):
        first, *others = flag_names(name, field)
        also = ", ".join(f"`{flag}`" for flag in others)
        yield f"| `{first}` | {also} | {cell(describe(name))} |"


def cell(text: str) -> str:
    """Return a help text as a table takes it."""
    text = " ".join(text.replace("%%", "%").split())
    for char in r"\|*_<>{":
        text = text.replace(char, "\\" + char)
    return text
