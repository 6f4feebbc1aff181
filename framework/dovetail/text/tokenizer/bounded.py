"""Whether a tokenizer takes time and memory in proportion to its text, whatever that is: read off its parts.

Tokenizers come with a model. One that does may run in the server's process; another may take minutes for thirty
characters, or write a gigabyte for one, so it runs where it can be killed. One whose time grows with the square of the
text, as DeepSeek-LLM's does for spaces, runs in the server's process for short ones.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from typing import Any

import tokenizers

from dovetail.text.tokenizer.expressions import is_linear, num_failed_reads

MAX_GROWTH = 16
"""Characters that normalizing may make of one: Unicode's own forms make 18 at most, and count as one here."""
MAX_WORD = 1000
"""Characters of a word that WordPiece looks up, piece by piece: it takes their number to the power of three."""
MAX_PIECE = 512
"""Characters of the longest token of a Unigram model, which tries all that fit at each place."""
MAX_PARTS = 64
SHORT, MAX_FAILED_READS = 1024, 2
"""Characters of a text that a tokenizer may take 4 ms for, for each of so many alternatives that read in vain."""
_NORMALIZERS = {
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "StripAccents",
    "BertNormalizer",
    "Nmt",
    "Strip",
    "ByteLevel",
}
_CUTTERS = {
    "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation",
    "UnicodeScripts", "Whitespace", "WhitespaceSplit",
}  # fmt: skip
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")


def state(part: Any) -> dict[str, Any]:
    """Return a part of a tokenizer as its file has it."""
    found: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return found


def growth_of(backend: tokenizers.Tokenizer) -> tuple[int, str | None]:
    """Return how long a text may be for a tokenizer to take little time and memory, in characters, and why no longer.

    The reason is None where it takes both in proportion to any text.
    """
    growth, failed_reads, slow = 1.0, 0, None
    for part in _few(state(backend.normalizer)):
        made = _growth(part)
        if made is None:
            return 0, f"its normalizer {_named(part)} may take more than linear time"
        growth *= made
        if growth > MAX_GROWTH:
            return 0, f"its normalizer {_named(part)} makes a text much longer"
    for part in _few(state(backend.pre_tokenizer)):
        if part.get("type") in _CUTTERS:
            continue
        source = part.get("pattern", {}).get("Regex")
        found = (0 if source is None else num_failed_reads(source)) if part.get("type") == "Split" else None
        reason = f"its pre-tokenizer {_named(part)} may take more than linear time"
        if found is None or (failed_reads := failed_reads + found) > MAX_FAILED_READS or (failed_reads and growth > 1):
            return 0, reason
        slow = slow or (reason if found else None)
    if (reason_of_model := _why_unbounded(backend.model)) is not None:
        return 0, reason_of_model
    return (sys.maxsize, None) if slow is None else (SHORT, slow)


def parts_of(whole: Any) -> Iterator[dict[str, Any]]:
    """Yield a normalizer, pre-tokenizer, post-processor or decoder as its file has it; of a sequence each part."""
    left = [whole] if whole else []
    while left:
        part = left.pop(0)
        if not isinstance(part, dict):
            continue
        if part.get("type") == "Sequence":
            left[:0] = next((part[name] for name in _LISTS if isinstance(part.get(name), list)), [])
        else:
            yield part


def _few(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts; more than `MAX_PARTS` end with one of no known kind."""
    for number, part in enumerate(parts_of(whole), 1):
        yield part if number <= MAX_PARTS else {"type": f"number {number}"}


def _growth(part: dict[str, Any]) -> float | None:
    """Return how many characters a normalizer makes of one at most; None where it may take long."""
    kind = part.get("type")
    if kind in _NORMALIZERS:
        return 1
    if kind == "Prepend":
        return 1 if len(part["prepend"]) <= MAX_PARTS else MAX_GROWTH + 1
    if kind == "Replace":
        content, pattern = part["content"], part["pattern"]
        if "Regex" in pattern:
            return max(1, len(content)) if is_linear(pattern["Regex"], finds_nothing=False) else None
        return max(1.0, len(content) / len(pattern["String"])) if pattern["String"] else None
    if kind == "Precompiled":
        table = base64.b64decode(part["precompiled_charsmap"] or "")
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return 1 if max(map(len, texts)) <= MAX_PARTS else MAX_GROWTH + 1
    return None


def _named(part: dict[str, Any]) -> str:
    source = part.get("pattern", {}).get("Regex")
    return str(part.get("type")) + ("" if source is None else f" by {source[:100]!r}")


def _why_unbounded(model: Any) -> str | None:
    if isinstance(model, (tokenizers.models.BPE, tokenizers.models.WordLevel)):
        return None
    if isinstance(model, tokenizers.models.WordPiece):
        most = model.max_input_chars_per_word
        return None if most <= MAX_WORD else f"its WordPiece model takes words of up to {most} characters"
    most = max(map(len, tokenizers.Tokenizer(model).get_vocab()), default=0)
    return None if most <= MAX_PIECE else f"its Unigram model has a token of {most} characters"
