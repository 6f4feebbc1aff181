"""Where a long text may be cut so that its pieces have the tokens that it has as a whole.

A tokenizer takes some 150 bytes for each byte of the text that it is given, and holds them until the end. Those that
split a text by a regular expression first, and then merge bytes within words, can be given it in pieces: between a
letter and a space before a letter such an expression always splits, and what comes before decides nothing of what comes
after. So it does before a special token. That a tokenizer is of this sort is read from its parts and tried; any other
gets its texts whole.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence

import tokenizers

from dovetail.text.tokenizer.bounded import state

PIECE = 1 << 10
"""Characters of a piece, which the longest may exceed: an eighth of a megabyte while it is tokenized."""
TOGETHER = 16
"""Pieces that the library is given at a time, for as many threads as it has; each time, Python's lock is waited for."""
KNOWN, KNOWN_IDS, LONGEST_KNOWN = 2048, 1 << 19, 2 * PIECE
"""Pieces and ids of a generation, and characters of the longest piece: some 5 MB of ASCII, 18 MB at most."""
_CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")
_KEEPS_CUTS = {None, "NFC", "NFD", "NFKC", "NFKD"}
_SPLITS_FURTHER = {"Digits", "Punctuation"}
_PROBES = (
    "The quick brown fox  jumps over the lazy dog",
    "it's Bob's AND they'll I'M so we'd go\n\nNext line here\r\n x y\tz a",
    "x1 y 22 z 3a b4 c5 d (a b) [c d] e.f g,h i - j k_l m/n o@p q# r",
    "na\u00efve \u00e9l\u00e8ve Stra\u00dfe a \u4e2d\u6587 b \u3042 c e\u0301 d \U0001f600 f g\u0301h i \u0e01 k l",
    "def f(a, b):\n    return a if b else c\n\tif a and b or c : d\n",
)


def pieces(text: str, cut: re.Pattern[str]) -> Iterator[str]:
    """Yield a text in pieces, cut where `cut` ends; what cannot be cut stays whole."""
    at = 0
    while at < len(text):
        found = cut.search(text, at + PIECE)
        end = len(text) if found is None else found.end()
        yield text[at:end]
        at = end


class KnownPieces:
    """Ids of pieces that were tokenized before: two generations, of which the elder goes when the younger is full.

    Conversations are sent again with each turn, and many begin alike: so do their pieces, which are found from the
    start of a text. Threads may use it at once, as each of its steps is one of the interpreter's.
    """

    def __init__(self, most: int = KNOWN) -> None:
        """`most`: pieces of a generation."""
        self._most, self._num_ids = most, 0
        self._young: dict[str, array[int]] = {}
        self._old: dict[str, array[int]] = {}

    def find(self, piece: str) -> array[int] | None:
        """Return a piece's ids, where they are known."""
        found = self._young.get(piece)
        if found is None and (found := self._old.get(piece)) is not None:
            self.keep(piece, found)
        return found

    def keep(self, piece: str, ids: Sequence[int] | array[int]) -> None:
        """Know a piece's ids from now on; not those of a piece that could not be cut."""
        if len(piece) > LONGEST_KNOWN:
            return
        if len(self._young) >= self._most or self._num_ids >= KNOWN_IDS:
            self._old, self._young, self._num_ids = self._young, {}, 0
        self._num_ids += len(ids)
        self._young[piece] = ids if isinstance(ids, array) else array("I", ids)


def shared(ids: Iterable[int], known: dict[int, int] | None = None) -> list[int]:
    """Return ids as a list in which equal ones are one object: 8 bytes each where they would take 40."""
    known = {} if known is None else known
    return [known.setdefault(token_id, token_id) for token_id in ids]


def cuts_of(backend: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """Return what a tokenizer's texts may be cut behind, or None where they have to stay whole.

    `bounded.growth_of` has to allow short texts: some are tried.
    """
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE) or model.dropout or backend.truncation or backend.padding:
        return None
    if state(backend.normalizer).get("type") not in _KEEPS_CUTS or not _splits_words(backend):
        return None
    added = list(backend.get_added_tokens_decoder().values())
    if any(_CUT.search(token.content) or (token.rstrip and token.content[-1:].isalpha()) for token in added):
        return None
    # The text is split before a token wherever it stands, where nothing that begins earlier can reach over it.
    reached = {char for token in added for char in token.content[1:]}
    reached |= {token.content[:1] for token in added if token.lstrip or token.single_word}
    whole = [token.content for token in added if token.special and not token.normalized and token.content]
    marks = [text for text in whole if text[0] not in reached]
    ahead = "|".join(map(re.escape, sorted(marks)))
    return re.compile(f"{_CUT.pattern}|(?={ahead})") if ahead else _CUT


def _splits_words(backend: tokenizers.Tokenizer) -> bool:
    """Whether the text is split at every cut, whatever stands before it."""
    whole = state(backend.pre_tokenizer)
    parts = whole["pretokenizers"] if whole.get("type") == "Sequence" else [whole]
    has_split = False
    for part in parts:
        kind = part.get("type")
        if kind == "Split":
            source = part["pattern"].get("Regex", "")
            if not source or "(?<" in source or part["behavior"] != "Isolated" or part["invert"]:
                return False
            has_split = True
        elif kind == "ByteLevel":
            if part["add_prefix_space"]:
                return False
            has_split = has_split or part["use_regex"]
        elif kind not in _SPLITS_FURTHER:
            return False
    return has_split and all(_is_split(backend, probe) for probe in _PROBES)


def _is_split(backend: tokenizers.Tokenizer, probe: str) -> bool:
    starts = {start for _, (start, _) in backend.pre_tokenizer.pre_tokenize_str(probe)}
    return all(cut.end() in starts for cut in _CUT.finditer(probe))
