"""What the author of a tool-call parser implements: `ToolParser`. What it declares is in `contracts/output.py`.

Importing this module imports neither torch nor a tokenizer. A parser for a format whose calls are JSON objects
between two markers needs no code of its own:

```python
class Acme(ToolParser):
    def extend(self, spec, tools):
        return replace(spec, tools=ToolFormat("<call>", "</call>", body=JsonCalls))
```

with `JsonCalls` from `dovetail.sdk.formats.json_calls`. Another shape brings its own `ToolBody`. The class is named in
the entry-point group `dovetail.tool_parsers.v1`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dovetail.contracts.options import Configurable

if TYPE_CHECKING:
    from dovetail.contracts.grammar import GrammarSpec
    from dovetail.contracts.output import FormatSpec, TemplateView


class ToolParser(Configurable, ABC):
    """One tool-call format. Made once per process without arguments; keeps no per-request state."""

    @abstractmethod
    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add this format to what the reasoning parser declared.

        Args:
            spec: The reasoning parser's, or an empty one. Return a copy (`dataclasses.replace`).
            tools: The request's tools as OpenAI writes them: `{"type": "function", "function": {...}}`.
        """

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """Describe the calls that `tool_choice` allows, in the model's own format, or None: not constrained.

        Beside a `FormatSpec.machine` it describes the whole reply, thinking included; else what follows the thinking.
        """
        return None

    def for_template(self, template: TemplateView) -> ToolParser:
        """Return the parser for a model with this template: itself, unless it depends on it. Called once."""
        return self

    def described(self, template: TemplateView) -> Mapping[str, str]:
        """Return what `dovetail info` shows of the format under labels: what the parser read off the template."""
        return {}
