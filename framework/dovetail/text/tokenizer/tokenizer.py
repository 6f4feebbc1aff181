"""`Tokenizer`: a model's vocabulary, special tokens and chat templates, on the `tokenizers` library alone."""

from __future__ import annotations

import codecs
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import tokenizers

from dovetail.base.panics import is_panic
from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.contracts.errors import DovetailError, ModelError, RequestError
from dovetail.text.inline import InlineCostError
from dovetail.text.tokenizer.backend import load_backend
from dovetail.text.tokenizer.bounded import growth_of
from dovetail.text.tokenizer.cuts import PIECE, TOGETHER, KnownPieces, cuts_of, pieces, shared
from dovetail.text.tokenizer.fill_in import Infill
from dovetail.text.tokenizer.vocabulary import TokenBytes

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
WHOLE = 4 * PIECE
"""Characters of a text that is tokenized as a whole, whatever the tokenizer."""
MOST_KEPT = 1 << 20
"""Characters of a text whose pieces are kept for others: longer ones are few, and would push out many."""
FAILED = "tokenizer_failed"
"""Code of errors that are the tokenizer's fault."""
JOINED = 4096
"""Joining takes 80 bytes beside each of what it joins."""
_SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class _Pieces(dict[int, str | None]):
    """Token text by id where the bytes are whole characters, else None. Computed at first use."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table

    def __missing__(self, token_id: int) -> str | None:
        try:
            value: str | None = self._table[token_id].decode()
        except UnicodeDecodeError:
            value = None
        self[token_id] = value
        return value


class Tokenizer:
    """Text to ids and back. Safe to share between threads; `encode` releases the GIL.

    Attributes:
        vocab_size: Number of ids, added tokens included. A model's logits may be wider (padding).
        eos_token_ids: Ids that end a reply.
        odd_ends: What the files say of ends and what cannot be, in sentences.
        added_tokens: Added tokens and their ids, special or not.
        special_ids: Ids that `skip_special_tokens` drops.
        special_tokens: `bos_token`, `eos_token`, … as templates read them; unset ones are absent.
        files: What the model says of it beside the vocabulary.
        default_sampling: `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` where generation_config
            sets them; `do_sample: false` gives temperature 0.
        unbounded: Why a text may take it more than time in proportion to its length; None where it cannot.
        inline_chars: Characters of a text that it takes little time for.
        max_chars: Characters of a text that it may tokenize in this process: all, until `keep_inline` is called.
        strips_leading_space: Whether a text decoded from its start loses one leading space (sentencepiece).
        fill_in: How the model is asked for what stands between two texts; None: it was not trained for it.
        pieces: Text of a token by id, None where its bytes are not whole characters. For hot loops.
        bytes_table: Bytes of a token by id. For hot loops.
        plain: Tables of `dovetail.sdk.formats.plain`, by what they are for.
    """

    def __init__(self, backend: tokenizers.Tokenizer, files: TokenizerFiles | None = None) -> None:
        files = files or TokenizerFiles()
        self._backend = backend
        self._add_configured_tokens(files.tokenizer_config.get("added_tokens_decoder") or {})
        added = backend.get_added_tokens_decoder()
        self.added_tokens: Mapping[str, int] = {token.content: token_id for token_id, token in added.items()}
        self.fill_in = Infill.of_tokens(self.added_tokens)
        self.special_tokens: Mapping[str, str] = files.special_tokens()
        named = {*self.special_tokens.values(), *files.extra_special_tokens()}
        self.special_ids = frozenset(
            token_id for token_id, token in added.items() if token.special or token.content in named
        )
        self.vocab_size = max(backend.get_vocab_size(), 1 + max(added, default=-1))
        self.files = files
        self.eos_token_ids = files.end_ids(backend.token_to_id)
        self.odd_ends = files.odd_ends(backend.token_to_id)
        self.default_sampling = _default_sampling(files.generation_config)
        self.bytes_table = TokenBytes(backend, {token_id: token.content for token_id, token in added.items()})
        self.pieces: Mapping[int, str | None] = _Pieces(self.bytes_table)
        self.plain: dict[Any, Any] = {}
        self.strips_leading_space = self.bytes_table.strips_leading_space
        bos = self.special_tokens.get("bos_token")
        self._bos_id = None if bos is None else backend.token_to_id(bos)
        self._add_bos = files.tokenizer_config.get("add_bos_token")
        self.inline_chars, self.unbounded = growth_of(backend)
        self.max_chars, self._serves = sys.maxsize, False
        self._cuts = cuts_of(backend) if self.inline_chars else None
        self._known = KnownPieces()
        self._has_token_types = "token_type_ids" in files.tokenizer_config.get("model_input_names", ("token_type_ids",))

    def keep_inline(self) -> None:
        """Refuse to tokenize in this process if that may take for ever, or has panicked once: `InlineCostError`."""
        self._serves, self.max_chars = True, self.inline_chars

    @classmethod
    def load(cls, folder: Path, model: Path | None = None) -> Tokenizer:
        """Load the tokenizer of a model folder.

        Args:
            folder: The tokenizer's.
            model: The model's, where that is another one: its configuration holds.

        Raises:
            ModelError: There is none, or a file cannot be read; the message names the file and the fix.
        """
        return cls.of_files(folder, TokenizerFiles.read(folder, model))

    @classmethod
    def of_files(cls, folder: Path, files: TokenizerFiles) -> Tokenizer:
        """Load the tokenizer of a folder whose other files have been read.

        Raises:
            ModelError: As `load`.
        """
        backend = load_backend(files.folder or folder, files.stored)
        try:
            return cls(backend, files)
        except DovetailError:
            raise
        except Exception as error:  # values that no tokenizer has
            reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            raise ModelError(f"{folder}: the tokenizer's files do not go together: {reason}") from error

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        keeps: bool = False,
        begun: Callable[[list[int], int], None] | None = None,
    ) -> list[int]:
        """Tokenize.

        Args:
            text: A text.
            add_special_tokens: False for text rendered by a chat template, True for raw prompts.
            keeps: Pieces of a long text are kept, and those known from others are not tokenized again. The
                duration then depends on earlier texts, so not where keys must not learn of one another.
            begun: Called with the first ids, which it does not change, and with about how many there will be, while the
                rest of a long text is tokenized; not with ids of known pieces alone, which come at once.

        Raises:
            RequestError: The text holds a lone surrogate or a NUL character. With status 500 the tokenizer failed.
            InlineCostError: It may not tokenize here.
        """
        check_text(text)
        if len(text) > WHOLE and self._cuts is not None:
            known = self._known if keeps and len(text) <= MOST_KEPT else None
            return self._encode_pieces(text, self._cuts, known, begun, add_special_tokens=add_special_tokens)
        ids = self._encode(text, add_special_tokens=add_special_tokens)
        return self._with_configured_bos(ids, text) if add_special_tokens else ids

    def encode_written(self, text: str) -> list[int]:
        """Tokenize text that a model may have written, whatever characters are in it: as text where it spells a marker.

        A marker is cut behind its first character, so that the tokenizer meets no added token.
        """
        ids: list[int] = []
        at = 0
        while (found := self._markers.search(text, at)) is not None:
            ids += self._encode(text[at : found.start() + 1], add_special_tokens=False)
            at = found.start() + 1
        return ids + self._encode(text[at:], add_special_tokens=False)

    @cached_property
    def _markers(self) -> re.Pattern[str]:
        """Added tokens that a text may spell in other tokens; longer ones first, though one match is like another."""
        texts = sorted((text for text in self.added_tokens if text.strip() and len(text) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def encode_within(
        self, first: str, second: str | None = None, *, most: int | None = None, cuts_left: bool = False
    ) -> tuple[list[int], int]:
        """Tokenize one or two texts as an encoder reads them, with its special tokens around and between them.

        Args:
            first: A text.
            second: Another one, or None.
            most: Maximum number of tokens, special ones included; of two texts the longer is cut first. None: all.
            cuts_left: Cut at the beginning of a text, not at its end.

        Returns:
            The ids, and where the second text begins, by the types that the tokenizer gives; 0 if it gives one type,
            or its `model_input_names` leave them out.

        Raises:
            RequestError: As `encode`.
        """
        texts = [first] if second is None else [first, second]
        for text in texts:
            check_text(text)
        parts = self._run(max(map(len, texts)), self._backend.encode_batch, texts, add_special_tokens=False)
        if most is not None:
            room = max(0, most - self._backend.num_special_tokens_to_add(len(parts) == 2))
            for part, kept in zip(parts, shares([len(part) for part in parts], room), strict=True):
                part.truncate(kept, direction="left" if cuts_left else "right")
        joined = self._run(0, self._backend.post_process, parts[0], parts[1] if len(parts) == 2 else None, True)
        types = joined.type_ids if self._has_token_types else ()
        return joined.ids, types.index(1) if 1 in types else 0

    def beginning(self, text: str, most: int) -> str:
        """Return what the first `most` tokens of a text stand for; the whole text if it has no more.

        Raises:
            RequestError: As `encode`.
        """
        check_text(text)
        found = self._run(len(text), self._backend.encode, text, add_special_tokens=False)
        return text if len(found) <= most else text[: found.offsets[most - 1][1]]

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # `encode` holds the GIL, `encode_batch_fast` does not.
        made = self._run(len(text), self._backend.encode_batch_fast, [text], add_special_tokens=add_special_tokens)
        return made[0].ids

    def _run(self, num_chars: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the library for texts of `num_chars` characters where it may run, and translate its failures.

        Raises:
            InlineCostError: It may not.
            RequestError: It failed, or panicked.
        """
        if num_chars >= self.max_chars:
            raise InlineCostError(f"the model's tokenizer runs in a process of its own: {self.unbounded}")
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            if is_panic(error):  # which takes 70 ms where RUST_BACKTRACE has it printed
                self.inline_chars, self.unbounded = 0, self.unbounded or "it panicked"
                self.max_chars = 0 if self._serves else self.max_chars
            elif not isinstance(error, Exception):
                raise
            reason = str(error).split("\n", 1)[0] or type(error).__name__
            text = f"the model's tokenizer failed: {reason}; the request is not at fault: serve with another"
            raise RequestError(text, code=FAILED, status=500) from error

    def _with_configured_bos(self, ids: list[int], text: str) -> list[int]:
        """Have ids begin as tokenizer_config.json says, where it does; `ids` are those of the text's beginning."""
        if self._add_bos is None or self._bos_id is None:
            return ids
        has_bos = ids[:1] == [self._bos_id]
        if self._add_bos and not has_bos:
            ids.insert(0, self._bos_id)
        elif not self._add_bos and has_bos and not text.startswith(self.special_tokens["bos_token"]):
            del ids[0]
        return ids

    def _encode_pieces(
        self,
        text: str,
        cuts: re.Pattern[str],
        known: KnownPieces | None,
        begun: Callable[[list[int], int], None] | None,
        *,
        add_special_tokens: bool,
    ) -> list[int]:
        around = self._encode("a", add_special_tokens=add_special_tokens)
        at = around.index(self._encode("a", add_special_tokens=False)[0])
        ids, equal = around[:at], dict[int, int]()
        left, num_done = pieces(text, cuts), 0
        while some := list(islice(left, TOGETHER)):
            before = [None if known is None else known.find(piece) for piece in some]
            new = [piece for piece, found in zip(some, before, strict=True) if found is None]
            longest = max(map(len, new), default=0)
            made = iter(
                self._run(longest, self._backend.encode_batch_fast, new, add_special_tokens=False) if new else ()
            )
            for piece, found in zip(some, before, strict=True):
                if found is not None:
                    ids += shared(found, equal)
                    continue
                fresh: list[int] = next(made).ids
                ids += shared(fresh, equal)
                if known is not None:
                    known.keep(piece, fresh)
            if add_special_tokens and num_done == 0:
                ids = self._with_configured_bos(ids, text)
            num_done += sum(map(len, some))
            if begun is not None and new and len(text) - num_done >= PIECE * TOGETHER:
                begun(ids, len(ids) * len(text) // num_done)
        return ids + around[at + 1 :]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Return the text of a whole sequence. Bytes that are not UTF-8 become U+FFFD."""
        skip = self.special_ids if skip_special_tokens else ()
        table = self.bytes_table
        left, pieces, decode = iter(ids), [], codecs.getincrementaldecoder("utf-8")("replace").decode
        while some := list(islice(left, JOINED)):
            pieces.append(decode(b"".join([table[token_id] for token_id in some if token_id not in skip])))
        text = "".join(pieces) + decode(b"", final=True)
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; empty for an id outside the vocabulary."""
        return self.bytes_table[token_id]

    def token_text(self, token_id: int) -> str:
        """Return a token's text on its own, as log probabilities show it. Cut characters become U+FFFD."""
        return self.bytes_table[token_id].decode(errors="replace")

    def _add_configured_tokens(self, configured: Mapping[str, Mapping[str, Any]]) -> None:
        """Add tokens that only tokenizer_config.json lists, where they get the id that it says."""
        new: dict[str, tokenizers.AddedToken] = {}
        size = self._backend.get_vocab_size()
        for key, entry in sorted(configured.items(), key=lambda item: int(item[0])):
            text = entry["content"]
            if not text or text in new or self._backend.token_to_id(text) is not None or int(key) != size + len(new):
                continue
            options = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            new[text] = tokenizers.AddedToken(text, special=bool(entry.get("special")), **options)
        self._backend.add_tokens(list(new.values()))  # together: each call looks at all that were added before


def shares(lengths: list[int], room: int) -> list[int]:
    """Return how many tokens each of one or two texts keeps: the longer one is cut until they are equal, then both."""
    if sum(lengths) <= room or len(lengths) == 1:
        return [min(length, room) for length in lengths]
    first, second = lengths
    kept = min(first, max(room // 2, room - second))
    return [kept, room - kept]


def check_text(text: str, *, param: str | None = None) -> None:
    """Refuse text that is not Unicode text.

    Raises:
        RequestError: The text holds a lone surrogate or a NUL character; the message says where.
    """
    if "\0" in text:
        raise RequestError(f"text holds a NUL character at position {text.index(chr(0))}; remove it", param=param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text holds a lone surrogate (half of a UTF-16 pair) at position {error.start}; send whole characters",
            param=param,
        ) from error


def _default_sampling(generation: Mapping[str, Any]) -> dict[str, float | int]:
    """Take the sampling defaults that are set and finite; others are warned of."""
    found: dict[str, float | int] = {}
    for name in _SAMPLING_NAMES:
        value = generation.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            found[name] = value
        elif value is not None:
            logger.warning("generation_config.json: %s is %r, not a number: it is left out.", name, value)
    if generation.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"}
        found["temperature"] = 0.0
    return found
