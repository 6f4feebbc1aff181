"""Tools that Anthropic's API describes and the client runs: shell, editor and memory, by their types.

A model that was not trained on them sees a function with their published input; its call is a `tool_use` as any other.
"""

from __future__ import annotations

from dovetail.contracts.requests import JsonObject

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
RANGE = {"type": "array", "items": NUMBER, "description": "First and last line; -1 is the last of the file."}
BASH: JsonObject = {
    "name": "bash",
    "description": "Run a command in a shell that stays open, on the user's computer; `restart` begins a new one.",
    "parameters": {"type": "object", "properties": {"command": TEXT, "restart": {"type": "boolean"}}},
}
EDITS = {"path": TEXT, "file_text": TEXT, "old_str": TEXT, "new_str": TEXT, "insert_line": NUMBER}
COMMANDS = ["view", "create", "str_replace", "insert"]


def _commands(about: str, commands: list[str], properties: JsonObject, required: list[str]) -> JsonObject:
    """Return a function whose `command` says which of its other parameters count."""
    given = {"command": {"type": "string", "enum": commands}, **properties}
    schema = {"type": "object", "properties": given, "required": ["command", *required]}
    return {"description": about, "parameters": schema}


def _editor(name: str, commands: list[str], inserted: JsonObject) -> JsonObject:
    about = (
        "View and edit files on the user's computer. `create` writes `file_text`, `str_replace` puts `new_str` in the "
        f"place of `old_str`, which is there once, `insert` puts `{next(iter(inserted))}` behind `insert_line`."
    )
    return {"name": name, **_commands(about, commands, {**EDITS, **inserted, "view_range": RANGE}, ["path"])}


MEMORY = {
    "name": "memory",
    **_commands(
        "Files below /memories that last beyond this conversation, on the user's computer. `insert` puts `insert_text` "
        "behind `insert_line`, `rename` takes `old_path` and `new_path`, all other commands take `path`.",
        [*COMMANDS, "delete", "rename"],
        {**EDITS, "insert_text": TEXT, "old_path": TEXT, "new_path": TEXT, "view_range": RANGE},
        [],
    ),
}
CLIENT_TOOLS: dict[str, JsonObject] = {
    "bash_20241022": BASH,
    "bash_20250124": BASH,
    "text_editor_20241022": _editor("str_replace_editor", [*COMMANDS, "undo_edit"], {"new_str": TEXT}),
    "text_editor_20250124": _editor("str_replace_editor", [*COMMANDS, "undo_edit"], {"new_str": TEXT}),
    "text_editor_20250429": _editor("str_replace_based_edit_tool", COMMANDS, {"new_str": TEXT}),
    "text_editor_20250728": _editor("str_replace_based_edit_tool", COMMANDS, {"insert_text": TEXT}),
    "memory_20250818": MEMORY,
}
