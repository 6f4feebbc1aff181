"""How a plugin gets settings of its own: a nested class `Options`, whose instance the plugin finds in `options`.

```python
@dataclass
class AcmeOptions:
    top_k: int = field(default=4, metadata={"help": "Candidates to look at."})


class Acme(ReasoningParser):
    Options = AcmeOptions

    def spec(self, tokenizer, template, request):
        markers = Markers("<r>", "</r>") if self.options.top_k else None
        return FormatSpec(reasoning=markers)
```

The fields become `--acme.top-k`, `DOVETAIL_PLUGIN__ACME__TOP_K` and `plugins: {acme: {top_k: …}}` in the configuration
file, where `acme` is the plugin's name. Class methods read `cls.options`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class Configurable:
    """What every class chosen by name has: `Options` declares its settings, `options` holds them."""

    Options: ClassVar[type[Any] | None] = None
    """A dataclass or a pydantic model whose fields all have defaults; None for a plugin without settings."""

    needs_minor: ClassVar[int] = 0
    """The lowest minor version of its kind's API that it can do with: one that uses what 1.2 has added says 2."""

    needs_sdk: ClassVar[int] = 0
    """The same of `dovetail.sdk`, which has a version of its own."""

    options: ClassVar[Any] = None
    """An instance of `Options`, there before anything is called. The loader sets it on a subclass of its own."""
