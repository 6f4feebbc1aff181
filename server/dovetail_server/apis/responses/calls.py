"""Calls among the items of a response."""

from __future__ import annotations

from typing import Literal

import msgspec

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class FunctionCallOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model asks for; `arguments` is JSON text as the model wrote it."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomCallOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool; `input` is text."""

    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class ExecAction(msgspec.Struct, kw_only=True, tag_field="type", tag="exec", forbid_unknown_fields=True):
    """A command: the program and its arguments."""

    command: list[str]
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    working_directory: str | None = None
    user: str | None = None


class LocalShellCall(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell_call"):
    """A command that the client is to run."""

    id: str
    call_id: str
    action: ExecAction
    status: ItemStatus


class ShellAction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Commands for a shell."""

    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class ShellCall(msgspec.Struct, kw_only=True, tag_field="type", tag="shell_call"):
    """Commands that the client is to run."""

    id: str
    call_id: str
    action: ShellAction
    status: ItemStatus


class PatchOperation(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A change of a file; `diff` is of one that is created or updated."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        """Have a diff where one belongs.

        Raises:
            ValueError: There is one too many, or too few.
        """
        if (self.type == "delete_file") != (self.diff is msgspec.UNSET):
            raise ValueError("a diff belongs to create_file and update_file")


class ApplyPatchCall(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch_call"):
    """A change that the client is to make."""

    id: str
    call_id: str
    operation: PatchOperation
    status: ItemStatus


ClientCall = LocalShellCall | ShellCall | ApplyPatchCall
