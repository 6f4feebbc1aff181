"""What the author of a reasoning parser implements: `ReasoningParser`. What it declares is in `contracts/output.py`.

Importing this module imports neither torch nor a tokenizer. A parser declares where the format's markers stand; the
core derives the incremental machine from the declaration:

```python
class AcmeR2(ReasoningParser):
    def spec(self, tokenizer, template, request):
        return FormatSpec(reasoning=Markers("<r>", "</r>"))
```

The class is named in the entry-point group `dovetail.reasoning_parsers.v1`. Whether the model starts inside thinking
is never declared: it is read from what the chat template appended to the prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.contracts.options import Configurable

if TYPE_CHECKING:
    from dovetail.contracts.output import FormatSpec, TemplateView, TokenizerView


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserRequest:
    """What a parser may know of the request. New fields arrive with defaults."""

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs` as sent."""


class ReasoningParser(Configurable, ABC):
    """One reasoning format. Made once per process without arguments; keeps no per-request state."""

    @abstractmethod
    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the format for one request."""

    def for_template(self, template: TemplateView) -> ReasoningParser:
        """Return the parser for a model with this template: itself, unless it depends on it. Called once."""
        return self

    def described(self, template: TemplateView) -> Mapping[str, str]:
        """Return what `dovetail info` shows of the format under labels: what the parser read off the template."""
        return {}
