r"""`k2-horizon`: K2 Horizon (K2-V3).

```
<ifm|think>Paris is the capital.</ifm|think>The capital of France is Paris.
```

`reasoning_effort` chooses the tags: `think` (high, the default), `think_fast` (medium), `think_faster` (low); all are
read. Text without a prompt to look at is taken to start inside thinking.

Defined by the description of the format in vLLM's `reasoning/k2_horizon_reasoning_parser.py`.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, Markers, State, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser

TAGS = {
    "high": ("<ifm|think>", "</ifm|think>"),
    "medium": ("<ifm|think_fast>", "</ifm|think_fast>"),
    "low": ("<ifm|think_faster>", "</ifm|think_faster>"),
}


class K2HorizonReasoning(ReasoningParser):
    """Thinking between the tags of an effort."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the tags of the request's effort, and the others beside them."""
        effort = str(request.template_kwargs.get("reasoning_effort"))
        start, end = TAGS.get(effort, TAGS["high"])
        others = tuple(pair for pair in TAGS.values() if pair != (start, end))
        markers = Markers(start, end, "", "", "", ended_by_tools=True, also=others)
        return FormatSpec(reasoning=markers, initial=State.IN)
