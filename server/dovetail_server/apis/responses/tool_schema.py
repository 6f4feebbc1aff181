"""`/v1/responses`: tools of a request. The type of a tool decides before its fields are looked at."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from dovetail_server.apis.custom import ToolText
from dovetail_server.apis.dropped import UnservableTool
from dovetail_server.schema.common import FreeForm, RequestModel, Text

CLIENT_RUN = ("local_shell", "shell", "apply_patch")
"""Tools that the API describes and the client runs."""
HOSTED = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search"),
    *("code_interpreter", "image_generation", "computer", "computer_use_preview", "mcp", "tool_search"),
)
"""Tools that OpenAI's servers run."""
ToolName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9_.:\-]+$")]


class ResponseTool(RequestModel):
    """A function. `strict` is false where it is left out."""

    type: Literal["function"]
    name: ToolName | None = None
    description: Text | None = None
    parameters: FreeForm | None = None
    strict: bool | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=8)] | None = Field(
        None, description="The model itself is the only caller."
    )
    defer_loading: bool | None = Field(None, description="Only false: all tools stand in the prompt.")
    output_schema: FreeForm | None = Field(None, description="Reaches the chat template.")


class ToolGrammar(RequestModel):
    """A text that matches a grammar. A regular expression is enforced, a Lark grammar where that is possible."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Text


class ResponsesCustomTool(RequestModel):
    """A tool that is given a text."""

    type: Literal["custom"]
    name: ToolName
    description: Text | None = None
    format: Annotated[ToolText | ToolGrammar, Field(discriminator="type")] | None = None
    defer_loading: bool | None = Field(None, description="Only false: all tools stand in the prompt.")


class ClientTool(RequestModel):
    """A tool that the API describes and the client runs."""

    type: Literal["local_shell", "shell", "apply_patch"]
    environment: FreeForm | None = Field(None, description="Where the client runs it; the model does not see it.")


class ResponsesHostedTool(UnservableTool):
    """A tool that OpenAI's servers run. It is left out, or with `--unservable-tools refuse` a 400."""

    type: Literal[HOSTED]  # type: ignore[valid-type]


def _tool_kind(tool: Any) -> str:
    """Return the tag of a tool: its type decides before its fields are looked at."""
    kind = tool.get("type", "function") if isinstance(tool, dict) else getattr(tool, "type", "function")
    if not isinstance(kind, str):
        return "function"
    return "hosted" if kind in HOSTED else "client" if kind in CLIENT_RUN else kind


class NamespaceTool(RequestModel):
    """Tools of one origin. The model sees them as `NAMESPACE__NAME`."""

    type: Literal["namespace"]
    name: ToolName
    description: Text | None = Field(None, description="Accepted; no chat template has a place for it.")
    tools: Annotated[
        list[
            Annotated[
                Annotated[ResponseTool, Tag("function")] | Annotated[ResponsesCustomTool, Tag("custom")],
                Discriminator(
                    _tool_kind,
                    custom_error_type="tool_type",
                    custom_error_message="has a type that is not supported in a namespace; possible: function, custom",
                ),
            ]
        ],
        Field(max_length=1024),
    ]


TOOL_TYPES = ("function", "custom", "namespace", *CLIENT_RUN, *HOSTED)
AnyTool = Annotated[
    Annotated[ResponseTool, Tag("function")]
    | Annotated[ResponsesCustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[ClientTool, Tag("client")]
    | Annotated[ResponsesHostedTool, Tag("hosted")],
    Discriminator(
        _tool_kind,
        custom_error_type="tool_type",
        custom_error_message=f"has a type that is not supported; possible: {', '.join(TOOL_TYPES)}",
    ),
]
tool_model = TypeAdapter(AnyTool).validate_python
