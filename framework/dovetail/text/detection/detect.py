"""Which parsers a model needs: what `auto` for `--reasoning-parser` and `--tool-call-parser` finds out, and why.

The order: the name that the model's tokenizer_config.json gives as `response_template`; then every installed parser is
asked how surely it knows the chat template (together with what the tokenizer says about replies), and the template is
put to the test: replies are rendered and read back, with the newlines that the template itself writes (see
`derive.py`). The best score wins, if it is good enough; of equal ones, that of the tool-call parser's family. Where
none reads back what the template shows, the format is read off the template itself, by the parser `template`.

| reading back | score |
|---|---|
| gives the message | what the parser said, but at least 0.4, and 0.1 more |
| is not possible, since the template does not print such a message behind the prompt | what the parser said |
| gives something else | half of what the parser said, unless the prompt itself teaches its marker |

Where it is not possible, but the template begins thinking in the prompt, parsers of those markers score at least 0.5.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.contracts.output import FormatSpec
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.contracts.tools import ToolParser
from dovetail.errors import PluginError, RequestError
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.loader import describe, import_planned
from dovetail.plugins.plan import AUTO, as_planned, by_name
from dovetail.plugins.records import PluginRecord
from dovetail.plugins.registry import Registry
from dovetail.plugins.time_limit import DEFAULT_TIMEOUT_S, time_limit
from dovetail.text.chat.moment import one_moment
from dovetail.text.chat.template import ChatTemplate, common_len
from dovetail.text.detection.derive import (
    CALLED,
    QUESTION,
    SWITCHES,
    THOUGHTS,
    TWICE,
    Derived,
    derive,
    reads_all,
    tools_of,
)
from dovetail.text.detection.formats import fit_reasoning, fit_tools
from dovetail.text.parsing.stream import NoTemplate
from dovetail.text.tokenizer.files import TokenizerFiles

logger = logging.getLogger("dovetail.text")
ENOUGH = 0.5
"""The lowest score that is taken."""
LABELS = {"reasoning_parser": "Reasoning parser", "tool_parser": "Tool-call parser"}

MIN_KINSHIP = 4
"""Letters of the shortest word that names a family."""
DERIVED = "template"
"""The parser of what is read off the template."""


@dataclass(frozen=True, slots=True)
class MatchScore:
    """One parser's score. `reads_back` is None where the template does not show; `aliases` are its other names."""

    name: str
    score: float
    reads_back: bool | None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Resolved:
    """Names of the parsers, None for none, and a line for the log about each that `auto` chose."""

    reasoning_parser: str | None
    tool_parser: str | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Detection:
    """What was chosen for one kind, None for none; why; and all scores above 0, best first."""

    name: str | None
    why: str
    scores: tuple[MatchScore, ...] = ()


class _Vocabulary:
    """The tokenizer as far as it is known without loading it."""

    vocab_size = 0

    def __init__(self, files: TokenizerFiles) -> None:
        added = files.tokenizer_config.get("added_tokens_decoder") or {}
        self.added_tokens = {str(entry.get("content")): int(key) for key, entry in added.items()}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Nothing is known."""
        return []

    def token_bytes(self, token_id: int) -> bytes:
        """Nothing is known."""
        return b""


def resolve_parsers(
    registry: Registry,
    folder: Path,
    *,
    reasoning_parser: str | None,
    tool_parser: str | None,
    chat_template: str | None = None,
    select: Callable[[str, Mapping[str, str]], str | None] | None = None,
    facts: Mapping[str, str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Resolved:
    """Answer `auto` for both kinds and say what was chosen and why.

    Args:
        registry: What is installed.
        folder: The tokenizer's folder.
        reasoning_parser: As the user gave it; anything but `auto` is returned as it is.
        tool_parser: As above.
        chat_template: The operator's template: a file, or a built-in name.
        select: Asked before anything else, as for `make_plan`.
        facts: Passed to `select`.
        timeout_s: What each parser may take to be imported, and to look at the template; 0 for no limit.

    Raises:
        ConfigError: The tokenizer's files or the template cannot be read.
        PluginError: One is named, and cannot be used.
    """
    given = {"reasoning_parser": reasoning_parser, "tool_parser": tool_parser}
    names, notes = dict(given), []
    for kind, name in given.items():
        if name == AUTO and select is not None and (answer := select(kind, facts or {})) is not None:
            names[kind] = answer
            notes.append(f"{LABELS[kind]}: {answer} (auto: chosen by a hook plugin)")
    wanted = [kind for kind, name in names.items() if name == AUTO]
    if wanted:
        for kind, name in names.items():
            if name not in (AUTO, None):  # one that cannot be used ends the start: no warning goes before it
                device = (facts or {}).get("device", AUTO)
                import_planned(by_name(registry, kind, name, device, {}), timeout_s)
        for kind, found in detect(registry, folder, chat_template, wanted, timeout_s).items():
            names[kind] = found.name
            fix = "; name one to use it" if found.name is None else f"; {KINDS[kind].label} none turns it off"
            notes.append(f"{LABELS[kind]}: {found.name or 'none'} (auto: {found.why}{fix})")
    return Resolved(names["reasoning_parser"], names["tool_parser"], tuple(notes))


def detect(
    registry: Registry,
    folder: Path,
    chat_template: str | None = None,
    kinds: Sequence[str] = tuple(LABELS),
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Detection]:
    """Find out which parsers a model needs. Imports every usable parser; one that fails or hangs is passed over."""
    files = TokenizerFiles.read(folder)
    said = files.tokenizer_config.get("response_template")
    template = ChatTemplate.choose(files.chat_templates, files.special_tokens(), chat_template, said)
    derived = derive(template)
    scored = _scores(registry, "reasoning_parser", files, template, derived, FormatSpec(), timeout_s)
    thinking = _found(registry, "reasoning_parser", files, template, derived, _ranked(scored))
    base = _spec_of(registry, thinking.name, files, template, derived)
    called = _scores(registry, "tool_parser", files, template, derived, base, timeout_s)
    tools = _found(registry, "tool_parser", files, template, derived, _ranked(called))
    thinking = _found(registry, "reasoning_parser", files, template, derived, _ranked(scored, tools.name))
    found = {"reasoning_parser": thinking, "tool_parser": tools}
    return {kind: found[kind] for kind in kinds}


def _spec_of(
    registry: Registry, name: str | None, files: TokenizerFiles, template: ChatTemplate, derived: Derived
) -> FormatSpec:
    """Return what a reasoning parser declares, for reading calls behind thinking."""
    if name is None:
        return derived.spec()
    plugin: ReasoningParser = import_planned(as_planned(registry.resolve("reasoning_parser", name)))()
    spec = plugin.for_template(template).spec(_Vocabulary(files), template, ParserRequest())
    return fit_reasoning(spec, derived)


def _scores(
    registry: Registry,
    kind: str,
    files: TokenizerFiles,
    template: ChatTemplate,
    derived: Derived,
    base: FormatSpec,
    timeout_s: float,
) -> list[MatchScore]:
    """Ask every parser of one kind; `base` is what a tool parser extends."""
    declared = _declared(files)
    if not template.source and not declared:
        return []
    view = NoTemplate(template.source + ("\n" + _plain(declared) if declared else ""))
    return [
        found
        for record in registry.of_kind(kind)
        if record.usable
        and record.name != DERIVED
        and (found := _score(record, view, files, template, derived, base, timeout_s)) is not None
        and found.score > 0
    ]


def _ranked(scores: Sequence[MatchScore], family: str | None = None) -> tuple[MatchScore, ...]:
    """Put the best first; of equal ones, those of the tool-call parser's family."""

    def kinship(score: MatchScore) -> int:
        return max(_kinship(name, family) for name in (score.name, *score.aliases))

    return tuple(sorted(scores, key=lambda score: (-score.score, -kinship(score), score.name)))


def _declared(files: TokenizerFiles) -> Any:
    config = files.tokenizer_config
    return config.get("response_template") or config.get("response_schema")


def _found(
    registry: Registry,
    kind: str,
    files: TokenizerFiles,
    template: ChatTemplate,
    derived: Derived,
    ranked: tuple[MatchScore, ...],
) -> Detection:
    """Choose the parser of one kind."""
    declared = _declared(files)
    if isinstance(declared, str):
        try:
            name = registry.resolve(kind, declared).name
        except PluginError:
            logger.debug("response_template %r names no installed %s", declared, kind)
        else:
            return Detection(name, "named by response_template in tokenizer_config.json")
    if not template.source and not declared:
        return Detection(None, "the model has no chat template")
    part = "reasoning" if kind == "reasoning_parser" else "calls"
    is_known = derived.says(part)
    is_shown = is_known and part not in derived.declared
    if is_shown and not (ranked and ranked[0].reads_back):
        return Detection(
            DERIVED, "no other parser reads back what the chat template writes; read off the template", ranked
        )
    if is_known and (not ranked or ranked[0].score < ENOUGH):
        return Detection(DERIVED, "no other parser knows the format; read off response_template", ranked)
    if not ranked:
        return Detection(None, "no installed parser knows the chat template")
    best = ranked[0]
    test = {True: ", and reads a rendered reply back", False: ", but does not read a rendered reply back", None: ""}
    how = f"scores {best.score:.2f} for the chat template{test[best.reads_back]}"
    if best.score < ENOUGH:
        return Detection(None, f"the best, {best.name}, only {how}", ranked)
    return Detection(best.name, f"it {how}", ranked)


def _kinship(name: str, family: str | None) -> int:
    """Return how much a parser's name has in common with that of the other kind: families share a word."""
    shared = common_len(name, family or "")
    return shared if shared >= MIN_KINSHIP else 0


def _plain(declared: Any) -> str:
    """Return the text of a description of replies, regular expressions in it without their backslashes."""
    return re.sub(r"\\+(.)", r"\1", json.dumps(declared, ensure_ascii=False))


def _score(
    record: PluginRecord,
    view: NoTemplate,
    files: TokenizerFiles,
    template: ChatTemplate,
    derived: Derived,
    base: FormatSpec,
    timeout_s: float,
) -> MatchScore | None:
    """Ask one parser; None if it cannot be used."""
    planned = as_planned(record)
    try:
        plugin = import_planned(planned, timeout_s)()
        with time_limit(f"{describe(planned)}: detect", timeout_s):
            said = min(max(float(plugin.detect(view)), 0.0), 1.0)
        reads_back = _reads_back(plugin.for_template(template), files, template, derived, base)
        if reads_back is None and said < ENOUGH and _begins_in_prompt(plugin, files, template):
            said = ENOUGH
    except Exception as error:  # a stranger's code must not keep the server from starting
        logger.warning("auto passes over %s: %s: %s", record.qualified, type(error).__name__, error)
        return None
    if reads_back:
        said = max(said, 0.4) + 0.1
    elif reads_back is False and not _is_taught(plugin, template):
        said /= 2
    return MatchScore(record.name, min(round(said, 2), 1.0), reads_back, tuple(record.facts.aliases))


def _is_taught(plugin: Any, template: ChatTemplate) -> bool:
    """Whether the prompt says how calls begin, though the template writes those of a history in another way."""
    if not isinstance(plugin, ToolParser) or template.varies:
        return False
    tools = tools_of((TWICE,)) or []
    section = plugin.extend(FormatSpec(), tools).tools
    try:
        with one_moment():
            told, plain = (template.render([QUESTION], tools=each).text for each in (tools, None))
    except RequestError:
        return False
    return section is not None and bool(section.start) and section.start in told and section.start not in plain


def _begins_in_prompt(plugin: Any, files: TokenizerFiles, template: ChatTemplate) -> bool:
    """Whether the template ends a prompt with thinking in a parser's markers, open or closed."""
    if not isinstance(plugin, ReasoningParser) or template.varies:
        return False
    spec = plugin.spec(_Vocabulary(files), template, ParserRequest())
    markers = spec.reasoning
    if markers is None or not markers.start or markers.end not in template.source:
        return False
    return any(markers.start in tail for tail in _tails(template))


def _tails(template: ChatTemplate) -> Iterator[str]:
    """Yield what the template appends to a prompt, with thinking switched each way."""
    for switches in (*SWITCHES, {"enable_thinking": False, "thinking": False}):
        try:
            yield template.render([QUESTION], template_kwargs=switches).tail or ""
        except RequestError:
            continue


def _reads_back(
    plugin: Any, files: TokenizerFiles, template: ChatTemplate, derived: Derived, base: FormatSpec
) -> bool | None:
    """Render replies and read them back, with the template's newlines; None where the template shows none."""
    if not template.source:
        return None
    if isinstance(plugin, ReasoningParser):
        results = []
        for switches in SWITCHES:
            spec = plugin.spec(_Vocabulary(files), template, ParserRequest(template_kwargs=switches))
            results.append(reads_all(template, fit_reasoning(spec, derived), THOUGHTS, switches))
        return False if False in results else True if True in results else None
    if isinstance(plugin, ToolParser):
        spec = plugin.extend(base, tools_of((TWICE,)) or ())
        return reads_all(template, fit_tools(spec, derived), CALLED, {})
    return None
