"""What replies of all APIs say of a grammar."""

from __future__ import annotations

import re

import msgspec

from dovetail.contracts.replies import ChoiceView
from dovetail_server.schema.common import StructuredOutput

PARAMETERS = "function/parameters"
"""Where the chat API has the schema of a tool, in the tool."""
_IN_TOOL = re.compile(rf"^(/tools/\d+/){PARAMETERS}")


def report_field(choice: ChoiceView, parameters: str = PARAMETERS) -> StructuredOutput | msgspec.UnsetType:
    """Return what a full reply says of a choice's grammar; nothing where it has none.

    Args:
        choice: It.
        parameters: Where the schema of a tool stands in the tool, as the request wrote it: places point into that.
    """
    made = choice.structured_output
    if made is None:
        return msgspec.UNSET
    if parameters != PARAMETERS:
        for part in (made, *made.get("tools", ())):
            part["ignored"] = [_IN_TOOL.sub(rf"\g<1>{parameters}", place) for place in part["ignored"]]
    return StructuredOutput(**made)
