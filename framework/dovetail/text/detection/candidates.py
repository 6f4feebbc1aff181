"""Parsers that come into question for a model, by what their manifests say; the best are imported and tried.

A manifest says by which texts a parser knows a chat template (`clues`), and what opens its thinking or calls in any
template (`opens`). That gives each parser the most that it can score; they are imported in that order, and no other is
where the best of those tried cannot be beaten. Trying one means to read back what the template writes:

| reading back | score |
|---|---|
| gives the message | the clue's, but at least 0.4, and 0.1 more |
| is not possible, since the template does not print such a message behind the prompt | the clue's |
| gives something else | half of the clue's, unless the prompt teaches its marker; 0 if other marks stand there |

Where it is not possible, but the template begins thinking in the prompt, parsers of those markers score at least 0.5.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, TypeVar

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.contracts.errors import RequestError
from dovetail.contracts.output import FormatSpec, SampleReply
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.contracts.tools import ToolParser
from dovetail.plugins.clues import score_of
from dovetail.plugins.loader import describe, import_planned
from dovetail.plugins.plan import as_planned
from dovetail.plugins.records import PluginRecord
from dovetail.plugins.registry import Registry
from dovetail.plugins.time_limit import time_limit
from dovetail.sdk.formats.matcher import common_len
from dovetail.sdk.formats.reply_markers import reply_markers
from dovetail.sdk.formats.samples import (
    ANSWERED,
    CALLED,
    CALLED_BEHIND,
    NAMES,
    SWITCHES,
    THOUGHTS,
    TWICE,
    UNIT,
    reads_all,
    shown_text,
    tools_of,
)
from dovetail.text.chat.deterministic import frozen_render
from dovetail.text.chat.rendered import QUESTION, message_of
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.parsing.fitted import fit_reasoning, fit_tools

logger = logging.getLogger("dovetail.text")


# What a chat template says of replies: only there do the texts count by which a parser knows the template.
#
# A template may name other families' tags and never write them: in its system message, in a branch that no conversation
# reaches, in a constant that it does not print. So conversations are rendered, with and without what a text is to be
# evidence of, and a text counts where it stands more often with it. Names in the template's code count, too.

Conversation = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, Mapping[str, Any]]
"""Messages, tools, `chat_template_kwargs`."""
SYSTEM = {"role": "system", "content": "dovetail instruction"}
RESULT = {"role": "tool", "tool_call_id": "abcdef000", "name": NAMES[0], "content": "dovetail result"}
THINKING = (*SWITCHES, {"enable_thinking": False, "thinking": False})
_ASKED: Conversation = ([QUESTION], None, {})
_BEFORE, _BEHIND = "dovetail before ", " dovetail behind"
_BRACKETS = frozenset("<>[]◁▷")
_TAUGHT = re.compile(r"\s*[^\s\w]*\s*(?!(?:and|or|nor|to|with)\b)\w")
"""How a thought is shown between two tags: a word stands behind the first that does not only join it to the next."""


class TemplateEvidence:
    """What one template says of thinking, and of calls. It renders at first use, each conversation once."""

    def __init__(self, template: ChatTemplate, declared: str = "") -> None:
        """Take the template.

        Args:
            template: With the limits of a start.
            declared: What the tokenizer says of replies; all of it counts.
        """
        self._template, self._declared = template, declared
        self._rendered: dict[str, str | None] = {}
        self.says = cache(self._says)

    def _says(self, text: str, kind: str) -> bool:
        """Whether a text is evidence for parsers of a kind.

        Where the template refuses a conversation with calls, or draws lots, all that it may print is.
        """
        return text in self._declared or text in self._template.code or self._writes(text, kind)

    def _writes(self, text: str, kind: str) -> bool:
        if any(more.count(text) > less.count(text) for less, more in self._pairs):
            return True
        prompt = self._text(_ASKED)
        if kind == "reasoning_parser" and prompt is not None:
            if self._is_taught(text, prompt) or self._is_read(text) or text in prompt.partition(" ")[0]:
                return True
        elif prompt is not None and self._shows_calls:
            return False
        return text in self._template.printable and text not in (prompt or "")

    @cached_property
    def _shows_calls(self) -> bool:
        """Whether the template takes a conversation with calls."""
        return self._text(([QUESTION, message_of(TWICE), RESULT], tools_of((TWICE,)), {})) is not None

    @cached_property
    def _pairs(self) -> list[tuple[str, str]]:
        """Texts of conversations without and with what the evidence is of."""
        tails = [("", tail) for tail in self.tails]
        pairs = [(self._text(less), self._text(more)) for less, more in _conversations()]
        return tails + [(less, more) for less, more in pairs if less is not None and more is not None]

    @cached_property
    def tails(self) -> list[str]:
        """What the template appends to a prompt, with thinking switched each way."""
        found = []
        for switches in () if self._template.varies else THINKING:
            with suppress(RequestError):
                found.append(self._template.render([QUESTION], template_kwargs=switches).tail or "")
        return found

    def _text(self, conversation: Conversation) -> str | None:
        """Render a conversation, without the header of a next reply; None where the template refuses or draws lots."""
        if self._template.varies:
            return None
        key, (messages, tools, switches) = json.dumps(conversation), conversation
        if key not in self._rendered:
            self._rendered[key] = None
            with suppress(RequestError):
                self._rendered[key] = self._template.render(
                    messages, tools=tools, template_kwargs=switches, add_generation_prompt=False
                ).text
        return self._rendered[key]

    def _is_read(self, text: str) -> bool:
        """Whether the template looks for it in a reply of the history: what stands around it does not come back."""
        said = [f"{_BEFORE}{_BEHIND}", f"{_BEFORE}{text}{_BEHIND}"]
        replies = [[QUESTION, message_of(SampleReply(content=each)), QUESTION, message_of(ANSWERED)] for each in said]
        plain, held = (self._text((messages, None, {})) for messages in replies)
        return said[0] in (plain or "") and held is not None and said[1] not in held

    def _is_taught(self, text: str, prompt: str) -> bool:
        """Whether a prompt shows it as one of two tags with a thought between them, or, if it is no tag, holds it."""
        if not _BRACKETS & set(text):
            return text in prompt
        for unit in UNIT.finditer(prompt) if (name := text.strip("<>[]/")) else ():
            end = prompt.find(unit[0][0] + "/" + unit[0][1:], unit.end())
            if end > 0 and name in unit[0] and _TAUGHT.match(prompt, unit.end(), end):
                return True
        return False


def _conversations() -> Iterator[tuple[Conversation, Conversation]]:
    """Yield conversations without and with calls or thinking."""
    tools = tools_of((TWICE,))
    for before in ([QUESTION], [SYSTEM, QUESTION]):
        yield (before, None, {}), (before, tools, {})
    for reply in (TWICE, *CALLED_BEHIND):
        yield _ASKED, ([QUESTION, message_of(reply)], tools, {})
        yield _ASKED, ([QUESTION, message_of(reply), RESULT], tools, {})
    for switches in THINKING:
        yield _ASKED, ([QUESTION], None, switches)
        for reply in (*THOUGHTS, ANSWERED):
            yield ([QUESTION], None, switches), ([QUESTION, message_of(reply)], None, switches)


T = TypeVar("T")
ENOUGH = 0.5
"""The lowest score that is taken."""
OPENED, READ = 0.4, 0.1
"""The least that a parser scores that reads replies back, and what reading adds."""
MOST = 3
"""Parsers of a kind that are imported for one model."""
MIN_KINSHIP = 4
"""Letters of the shortest word that names a family."""
DERIVED = "template"
"""The parser of what is read off the template."""


@dataclass(frozen=True, slots=True)
class MatchScore:
    """One parser's score. `reads_back` is None where the template does not show; `aliases` are its other names.

    `is_taught` says that the prompt tells the model to write its format, however the template writes a history.
    """

    name: str
    score: float
    reads_back: bool | None
    aliases: tuple[str, ...] = ()
    is_taught: bool = False


_JSON_HEAD = re.compile(r"\s*\[?\s*\{")
"""How a call begins that is plain JSON."""
_CALL_BEGINS = r"(?:\w|\s*[<{\[(])"
"""What follows a marker where a prompt shows a call, rather than names the marker."""


class CandidateVocabulary:
    """The tokenizer as far as it is known without loading it."""

    vocab_size = 0

    def __init__(self, files: TokenizerFiles) -> None:
        added = files.tokenizer_config.get("added_tokens_decoder") or {}
        listed = added if isinstance(added, dict) else {}  # what else it may be is refused where the tokenizer is read
        self.added_tokens = {
            str(entry["content"]): int(key)
            for key, entry in listed.items()
            if key.isdecimal() and isinstance(entry, dict) and "content" in entry
        }

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Nothing is known."""
        return []

    def token_bytes(self, token_id: int) -> bytes:
        """Nothing is known."""
        return b""


class CandidateModel:
    """What `auto` knows of a model: its tokenizer's files, its template, and what the template says of replies."""

    def __init__(self, files: TokenizerFiles, chat_template: str | None) -> None:
        """Take the files, and the operator's template: a file, or a built-in name.

        Raises:
            ConfigError: The template cannot be read.
        """
        self.template = ChatTemplate.load(files, chat_template)
        self.vocabulary = CandidateVocabulary(files)
        self.declared = self.template.response_template or files.tokenizer_config.get("response_schema")

    @cached_property
    def text(self) -> str:
        """The template, and what the tokenizer says of replies: what clues are looked for in."""
        return self.template.source + ("\n" + _plain(self.declared) if self.declared else "")

    @cached_property
    def evidence(self) -> TemplateEvidence:
        """Which texts of the template, and of what the tokenizer says of replies, count."""
        return TemplateEvidence(self.template, _plain(self.declared) if self.declared else "")

    @cached_property
    def call_head(self) -> str:
        """What the template writes before the name in a call; "" where it shows no call, or only one of plain JSON."""
        shown = self.template.written(CALLED[0])
        head, found, _ = ("" if shown is None else shown.output or "").partition(NAMES[0])
        return head.strip() if found and _JSON_HEAD.match(head) is None else ""

    def written(self, kind: str) -> str:
        """Return the replies that the template shows, with what the prompt begins of them; "" where it shows none."""
        if kind == "reasoning_parser":
            return "".join(shown_text(self.template, THOUGHTS, switches) for switches in SWITCHES)
        return shown_text(self.template, CALLED, {})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A parser, what its clues say of the template, the most that it can score, and whether a shown reply opens so."""

    record: PluginRecord
    said: float
    most: float
    is_shown: bool


class Candidates:
    """The parsers of one kind for one model. Each is imported once, if it is tried."""

    def __init__(
        self, registry: Registry, kind: str, model: CandidateModel, base: FormatSpec, timeout_s: float
    ) -> None:
        """Look at the manifests.

        Args:
            registry: What is installed.
            kind: The parsers' kind.
            model: The model.
            base: What a tool parser extends.
            timeout_s: What each may take to be imported, and to be tried; 0 for no limit.
        """
        self._registry, self._kind = registry, kind
        self._model, self._base, self._timeout_s = model, base, timeout_s
        written = model.written(kind)
        begun = written or ("".join(model.evidence.tails) if kind == "reasoning_parser" else "")
        self._all: list[Candidate] = []
        self._tried: dict[str, MatchScore | None] = {}
        for record in registry.of_kind(kind):
            if not record.usable or record.name == DERIVED:
                continue
            said = score_of(record.facts.clues, model.text, lambda text: model.evidence.says(text, kind))
            opens = record.facts.opens
            if said or (opens and opens in begun):
                at_least = OPENED if written else ENOUGH if opens and opens in begun else 0.0
                most = round(max(said, at_least) + (READ if written else 0), 2)
                self._all.append(Candidate(record, said, min(most, 1.0), bool(opens) and opens in written))

    def ranked(self, family: str | None = None) -> tuple[MatchScore, ...]:
        """Try those that can be the best, at most `MOST` in all, and return what was tried, the best first.

        Args:
            family: Name of the tool-call parser: of equal parsers, those of its family come first.
        """

        def place(score: float, name: str, aliases: tuple[str, ...]) -> tuple[float, int, str]:
            shared = [common_len(each, family or "") for each in (name, *aliases)]  # families share a word
            return -score, -max((num for num in shared if num >= MIN_KINSHIP), default=0), name

        def tried() -> list[MatchScore]:
            scores = [score for score in self._tried.values() if score is not None and score.score > 0]
            return sorted(scores, key=lambda one: place(one.score, one.name, one.aliases))

        rows = [(place(one.most, one.record.name, one.record.facts.aliases), one) for one in self._all]
        for limit, candidate in sorted(rows, key=lambda row: (row[0][0], not row[1].is_shown, row[0])):
            best = next(iter(tried()), None)
            if best is not None and place(best.score, best.name, best.aliases) <= limit:
                continue
            if candidate.record.qualified not in self._tried:
                if len(self._tried) == MOST:
                    break
                self._tried[candidate.record.qualified] = self._try(candidate)
        return tuple(tried())

    def _try(self, candidate: Candidate) -> MatchScore | None:
        """Import a parser and have it read back; None if it cannot be used."""
        record, said, model = candidate.record, candidate.said, self._model
        name = self._registry.name_of(record)
        if candidate.most < ENOUGH:  # it is not taken whatever it reads
            return MatchScore(name, said, None, record.facts.aliases)

        def score(plugin: Any) -> MatchScore:
            reads_back = _reads_back(plugin.for_template(model.template), model, self._base)
            is_taught = reads_back is False and not model.call_head and _is_taught(plugin, model.template)
            if reads_back:
                scored = max(said, OPENED) + READ
            elif reads_back is None and said < ENOUGH and _begins_in_prompt(plugin, model):
                scored = ENOUGH
            elif reads_back is False and _writes_otherwise(plugin, model):
                scored = 0.0
            else:
                scored = said / 2 if reads_back is False and not is_taught else said
            return MatchScore(name, min(round(scored, 2), 1.0), reads_back, record.facts.aliases, is_taught)

        return self._ask(record, score)

    @cached_property
    def read_off(self) -> Literal["shown", "declared"] | None:
        """What the parser of what is read off the template says: it reads back, it has a format, or neither."""
        kind, base, template = self._kind, self._base, self._model.template
        record = next((record for record in self._registry.of_kind(kind) if record.name == DERIVED), None)

        def look(plugin: Any) -> Literal["shown", "declared"] | None:
            bound = plugin.for_template(template)
            if kind == "reasoning_parser":
                spec = bound.spec(self._model.vocabulary, template, ParserRequest())
                has_format = spec.reasoning is not None or spec.machine is not None
            else:
                has_format = bound.extend(base, tools_of((TWICE,)) or ()).tools is not None
            return None if not has_format else "shown" if _reads_back(bound, self._model, base) else "declared"

        return None if record is None or not record.usable else self._ask(record, look)

    def _ask(self, record: PluginRecord, question: Callable[[Any], T | None]) -> T | None:
        """Import a parser and ask it something; None if it cannot be used."""
        planned = as_planned(record)
        try:
            plugin = import_planned(planned, self._timeout_s)()
            with time_limit(f"{describe(planned)}: reading a reply back", self._timeout_s):
                return question(plugin)
        except Exception as error:  # a stranger's code must not keep the server from starting
            logger.warning("auto passes over %s: %s: %s", record.qualified, type(error).__name__, error)
            return None


def _plain(declared: Any) -> str:
    """Return the text of a description of replies, regular expressions in it without their backslashes."""
    return re.sub(r"\\+(.)", r"\1", json.dumps(declared, ensure_ascii=False))


def _is_taught(plugin: Any, template: ChatTemplate) -> bool:
    """Whether the prompt says how calls begin, though the template writes those of a history in another way."""
    if not isinstance(plugin, ToolParser) or template.varies:
        return False
    tools = tools_of((TWICE,)) or []
    section = plugin.extend(FormatSpec(), tools).tools
    try:
        with frozen_render():
            with_tools, plain = (template.render([QUESTION], tools=each).text for each in (tools, None))
    except RequestError:
        return False
    if section is None or not section.start or section.start in plain:
        return False
    return re.search(re.escape(section.start) + _CALL_BEGINS, with_tools) is not None


def _writes_otherwise(plugin: Any, model: CandidateModel) -> bool:
    """Whether the template shows a call behind marks of which the parser knows none."""
    if not (isinstance(plugin, ToolParser) and model.call_head):
        return False
    section = plugin.for_template(model.template).extend(FormatSpec(), tools_of(CALLED[:1]) or ()).tools
    marks = () if section is None else (section.start, *section.also, *section.starts)
    return any(marks) and not any(mark and mark in model.call_head for mark in marks)


def _begins_in_prompt(plugin: Any, model: CandidateModel) -> bool:
    """Whether the template ends a prompt with thinking in a parser's markers, open or closed."""
    if not isinstance(plugin, ReasoningParser):
        return False
    markers = plugin.spec(model.vocabulary, model.template, ParserRequest()).reasoning
    if markers is None or not markers.start:
        return False
    tails = [tail for tail in model.evidence.tails if markers.start in tail]
    is_closed = markers.end in model.template.source
    return any(is_closed or tail.rstrip().endswith(markers.start) for tail in tails)


def _reads_back(plugin: Any, model: CandidateModel, base: FormatSpec) -> bool | None:
    """Render replies and read them back, with the template's newlines; None where the template shows none."""
    template = model.template
    if not template.source:
        return None
    if isinstance(plugin, ReasoningParser):
        results = []
        for switches in SWITCHES:
            spec = plugin.spec(model.vocabulary, template, ParserRequest(template_kwargs=switches))
            results.append(reads_all(template, fit_reasoning(spec, reply_markers(template)), THOUGHTS, switches))
        return False if False in results else True if True in results else None
    spec = plugin.extend(base, tools_of((TWICE,)) or ())
    return reads_all(template, fit_tools(spec, template), CALLED, {})
