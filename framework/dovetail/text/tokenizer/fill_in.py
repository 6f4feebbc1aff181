"""Fill in the middle: the prompt of a model that was trained to write what stands between two texts.

Which form a model has is known by its added tokens: each family has names of its own for the three markers.

| markers | order | models |
|---|---|---|
| `<|fim_prefix|>` `<|fim_suffix|>` `<|fim_middle|>` | before, after | Qwen2.5-Coder, Qwen3-Coder, CodeGemma |
| `<fim_prefix>` `<fim_suffix>` `<fim_middle>` | before, after | StarCoder, StarCoder2, StableCode, Granite |
| `<fim-prefix>` `<fim-suffix>` `<fim-middle>` | before, after | SantaCoder |
| `fim▁begin`, `fim▁hole`, `fim▁end` between `<`, `>` and full-width bars | before, after | DeepSeek-Coder |
| `<[fim-prefix]>` `<[fim-suffix]>` `<[fim-middle]>` | after, before | Seed-Coder |
| `[PREFIX]` `[SUFFIX]`, nothing at the end | after, before | Codestral |

Sources: the model cards of these models, arXiv:2207.14255.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", False),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", False),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", False),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>", False),
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", True),
    ("[PREFIX]", "[SUFFIX]", "", True),
)
ENDS = (
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|repo_name|>", "<|file_sep|>", "<file_sep>", "<|file_separator|>"),
    *("<|endoftext|>", "<|EOT|>"),
)
"""Tokens that end a middle as well as a model's own end does: the next file, or padding."""


@dataclass(frozen=True, slots=True)
class Infill:
    """One model's form. A marker is its text; `stop_ids` end what is filled in."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool
    stop_ids: tuple[int, ...]

    @classmethod
    def of_tokens(cls, added: Mapping[str, int]) -> Infill | None:
        """Find the form that a tokenizer's added tokens have; None for a model that knows none."""
        for prefix, suffix, middle, suffix_first in FORMS:
            markers = [marker for marker in (prefix, suffix, middle) if marker]
            if all(marker in added for marker in markers):
                ends = (*markers, *(name for name in ENDS if name in added))
                return cls(prefix, suffix, middle, suffix_first, tuple(added[name] for name in ends))
        return None

    def text(self, before: str, after: str) -> str:
        """Write the prompt between two texts."""
        first, last = self.prefix + before, self.suffix + after
        return (last + first if self.suffix_first else first + last) + self.middle

    def ids(self, before: list[int], after: str, encode: Callable[[str], list[int]]) -> list[int]:
        """As `text`, where what stands before is given as tokens; `encode` adds no special ones."""
        first, last = encode(self.prefix) + before, encode(self.suffix + after)
        return (last + first if self.suffix_first else first + last) + (encode(self.middle) if self.middle else [])
