"""Which parsers a model needs: what `auto` for `--reasoning-parser` and `--tool-call-parser` finds out, and why.

The order: a hook plugin's answer; the name that the model's tokenizer_config.json gives as `response_template`; then
the parsers whose manifests know the chat template (together with what the tokenizer says about replies), the likeliest
first: replies are rendered and read back, with the newlines that the template itself writes (see `formats.py`). The
best score wins, if it is good enough (see `candidates.py`); of equal ones, that of the tool-call parser's family. The
last one tried is the parser `template`, which reads the format off the template itself: it wins where it reads back
what no other does, and, where it knows a format that the template does not show, over those that are not good enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.contracts.errors import PluginError
from dovetail.contracts.output import FormatSpec
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import AUTO, as_planned, by_name
from dovetail.plugins.registry import Registry
from dovetail.plugins.time_limit import DEFAULT_TIMEOUT_S
from dovetail.sdk.formats.reply_markers import reply_markers
from dovetail.text.detection.candidates import DERIVED, ENOUGH, CandidateModel, Candidates, MatchScore
from dovetail.text.parsing.fitted import fit_reasoning

logger = logging.getLogger("dovetail.text")
LABELS = {"reasoning_parser": "Reasoning parser", "tool_parser": "Tool-call parser"}


@dataclass(frozen=True, slots=True)
class Detection:
    """What was chosen for one kind, None for none; why; and the scores of the parsers that were tried, best first."""

    name: str | None
    why: str
    scores: tuple[MatchScore, ...] = ()


def resolve_parsers(
    registry: Registry,
    files: TokenizerFiles,
    given: Mapping[str, str | None],
    *,
    chat_template: str | None = None,
    select: Callable[[str, Mapping[str, str]], str | None] | None = None,
    facts: Mapping[str, str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> tuple[dict[str, str | None], list[str]]:
    """Answer `auto` for both kinds and say what was chosen and why.

    Args:
        registry: What is installed.
        files: What the model's files say of its tokenizer and its replies.
        given: The parser of each kind as the user gave it; anything but `auto` is returned as it is.
        chat_template: The operator's template: a file, or a built-in name.
        select: Asked before anything else, as for `make_plan`.
        facts: Passed to `select`.
        timeout_s: What each parser may take to be imported, and to read a reply back; 0 for no limit.

    Returns:
        Names of the parsers by kind, None for none, and a line for the log about each that `auto` chose.

    Raises:
        ConfigError: The template cannot be read.
        PluginError: One is named, and cannot be used.
    """
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
        for kind, found in detect(registry, files, chat_template, wanted, timeout_s).items():
            names[kind] = found.name
            fix = "; name one to use it" if found.name is None else f"; {KINDS[kind].label} none turns it off"
            notes.append(f"{LABELS[kind]}: {found.name or 'none'} (auto: {found.why}{fix})")
    return names, notes


def detect(
    registry: Registry,
    files: TokenizerFiles,
    chat_template: str | None = None,
    kinds: Sequence[str] = tuple(LABELS),
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Detection]:
    """Find out which parsers a model needs. Imports the likeliest only; one that fails or hangs is passed over.

    Args:
        registry: What is installed.
        files: What the model's files say of its tokenizer and its replies.
        chat_template: The operator's template: a file, or a built-in name.
        kinds: Which are asked for.
        timeout_s: What each parser may take to be imported, and to read a reply back; 0 for no limit.

    Raises:
        ConfigError: The template cannot be read.
    """
    model = CandidateModel(files, chat_template)
    thinkers = Candidates(registry, "reasoning_parser", model, FormatSpec(), timeout_s)
    thinking = _found(registry, "reasoning_parser", model, thinkers)
    base = _spec_of(registry, thinking.name, model)
    callers = Candidates(registry, "tool_parser", model, base, timeout_s)
    tools = _found(registry, "tool_parser", model, callers)
    thinking = _found(registry, "reasoning_parser", model, thinkers, tools.name)
    found = {"reasoning_parser": thinking, "tool_parser": tools}
    return {kind: found[kind] for kind in kinds}


def _spec_of(registry: Registry, name: str | None, model: CandidateModel) -> FormatSpec:
    """Return what a reasoning parser declares, for reading calls behind thinking."""
    if name is None:
        return FormatSpec()
    plugin: ReasoningParser = import_planned(as_planned(registry.resolve("reasoning_parser", name)))()
    spec = plugin.for_template(model.template).spec(model.vocabulary, model.template, ParserRequest())
    return fit_reasoning(spec, reply_markers(model.template))


def _found(
    registry: Registry, kind: str, model: CandidateModel, candidates: Candidates, family: str | None = None
) -> Detection:
    """Choose the parser of one kind; of equal ones that of a family."""
    if isinstance(model.declared, str):
        try:
            name = registry.resolve(kind, model.declared).name
        except PluginError:
            logger.debug("response_template %r names no installed %s", model.declared, kind)
        else:
            return Detection(name, "named by response_template in tokenizer_config.json")
    if not model.text:
        return Detection(None, "the model has no chat template")
    ranked = candidates.ranked(family)
    read_off = None if ranked and (ranked[0].reads_back or ranked[0].is_taught) else candidates.read_off
    if read_off == "shown":
        return Detection(
            DERIVED, "no other parser reads back what the chat template writes; read off the template", ranked
        )
    if read_off is not None and (not ranked or ranked[0].score < ENOUGH):
        return Detection(DERIVED, "no other parser knows the format; read off response_template", ranked)
    if not ranked:
        return Detection(None, "no installed parser knows the chat template")
    best = ranked[0]
    test = {True: ", and reads a rendered reply back", False: ", but does not read a rendered reply back", None: ""}
    how = f"scores {best.score:.2f} for the chat template{test[best.reads_back]}"
    if best.score < ENOUGH:
        return Detection(None, f"the best, {best.name}, only {how}", ranked)
    return Detection(best.name, f"it {how}", ranked)
