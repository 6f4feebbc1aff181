"""What `docs/results.toml` holds, and how it becomes parts of README and docs; `write_results.py` writes them.

A page holds `<!-- results: NAME -->`, what was written last, and `<!-- results end -->`. What stands between them is
made of `docs/site/results/NAME.md`, where `{run.load.figure}` is a figure of the file:

    {run.load.figure:.2f}    written in a format of Python's
    {run.load.figure.key}    of a figure with several values
    {a / b:.2f}              a ratio
    {a or b or -}            the first that there is; a dash if there is none
    {conditions}             how everything above was measured, as lines and a table
    {conditions without command, device}
    {dates of Dovetail}      the first and the last day on which the figures of Dovetail above were measured

A line of a table whose figures are all dashes is left out.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs/results.toml"
TEMPLATES = Path(__file__).parent / "results"
SHOWN = {
    "of": "of",
    "model": "model",
    "device": "device",
    "date": "date",
    "prompts": "prompts",
    "kernel_cache": "kernel cache",
    "prefix_cache": "prefix cache",
    "sampling": "sampling",
    "tokens_per_event": "tokens per event",
    "command": "command",
}
"""The conditions that every measurement states, and how a page calls them."""
CONDITIONS = (*SHOWN, "load")
OPTIONAL = ("source", "note")
"""What a measurement may say besides: who reported a figure that is not ours, and what else a reader should know."""
UNNAMED = frozenset({"of", "model", "device", "date", "sampling", *OPTIONAL})
"""Conditions whose text is understood without a name before it."""
FOUND = ("prefix_cache", "tokens_per_event")
"""Conditions that nobody sets: what each load found."""
NOT_RECORDED, NOT_MEANT = "not recorded", "does not apply"
OURS = "Dovetail"
DASH = "\N{EN DASH}"
PART = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- results end -->)", re.DOTALL)
FIELD = re.compile(r"\{([^{}]+)\}")
HEADER = """\
# Every figure of README and docs that was measured, with the conditions that it holds under. `make results` writes the
# pages from it; `make results ARGS="out.json"` records what `dovetail bench serve --json out.json` found first.
#
# [run] is what measurements have in common, [run.load] one of them; what a load says holds for it instead. All state
# the conditions that docs/site/results.py lists; what nobody wrote down is "not recorded". A list is of repeated runs.

"""


class ResultsError(ValueError):
    """The file, a page or a template is wrong; the message says where."""


@dataclass(slots=True)
class Measurement:
    """One load of one run, with all its conditions."""

    run: str
    load: str
    conditions: dict[str, Any]
    figures: dict[str, Any]

    @property
    def name(self) -> str:
        """As templates name it."""
        return f"{self.run}.{self.load}"


@dataclass(slots=True)
class Results:
    """All measurements by their names."""

    by_name: dict[str, Measurement]

    @classmethod
    def read(cls, path: Path = FILE) -> Results:
        """Read the file.

        Raises:
            ResultsError: A measurement lacks a condition or has no figure.
        """
        return cls.of(tomllib.loads(path.read_text("utf-8")))

    @classmethod
    def of(cls, runs: Mapping[str, Any]) -> Results:
        """Take the file's runs; raises as `read`."""
        found = {m.name: m for name, run in runs.items() for m in measurements(name, run)}
        for measurement in found.values():
            check(measurement)
        return cls(found)

    def figure(self, reference: str) -> tuple[Measurement, Any] | None:
        """Return the figure or condition that `run.load.name[.key]` names, with its measurement, if there is one."""
        run, _, rest = reference.partition(".")
        load, *keys = rest.split(".")
        measurement = self.by_name.get(f"{run}.{load}")
        if measurement is None:
            return None
        value: Any = measurement.figures | measurement.conditions
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return None if value is None or isinstance(value, Mapping) else (measurement, value)


def measurements(name: str, run: Mapping[str, Any]) -> Iterator[Measurement]:
    """Yield a run's measurements, each with what they have in common."""
    common = {key: value for key, value in run.items() if not isinstance(value, Mapping)}
    for load, own in run.items():
        if isinstance(own, Mapping):
            whole = {**common, **own}
            conditions = {key: whole[key] for key in (*CONDITIONS, *OPTIONAL) if key in whole}
            yield Measurement(name, load, conditions, {k: v for k, v in whole.items() if k not in conditions})


def check(measurement: Measurement) -> None:
    """Refuse what cannot be understood.

    Raises:
        ResultsError: Naming measurement and key.
    """
    where, conditions = f"results.toml: {measurement.name}", measurement.conditions
    missing = [key for key in CONDITIONS if conditions.get(key) in (None, "")]
    if missing:
        raise ResultsError(
            f"{where}: says nothing of {', '.join(missing)}; write {NOT_RECORDED!r} where it is not known"
        )
    if conditions["of"] != OURS and not conditions.get("source"):
        raise ResultsError(f"{where}: of {conditions['of']}; say in 'source' where the figure is from")
    if not measurement.figures:
        raise ResultsError(f"{where}: has no figure")
    for key, value in measurement.figures.items():
        values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
        if not values or any(isinstance(one, bool) or not isinstance(one, int | float) for one in values):
            raise ResultsError(
                f"{where}: {key} = {value!r} is neither a condition nor a figure; a figure is of numbers"
            )


@dataclass(slots=True)
class Filler:
    """Fills one template, and keeps what it used."""

    results: Results
    name: str
    used: dict[str, Measurement] = field(default_factory=dict)

    def fill(self, template: str) -> str:
        """Return the text with every field replaced.

        Raises:
            ResultsError: A field names no figure.
        """
        return FIELD.sub(self._replace, template)

    def _replace(self, match: re.Match[str]) -> str:
        inner = match[1].strip()
        if inner.startswith("dates of "):
            return self._dates(inner.removeprefix("dates of "))
        if inner == "conditions" or inner.startswith("conditions without "):
            without = inner.removeprefix("conditions").removeprefix(" without ").split(", ")
            return conditions_of(list(self.used.values()), [name for name in without if name])
        body, _, form = inner.partition(":")
        options = [option.strip() for option in body.split(" or ")]
        for option in options:
            if option == "-" and len(options) > 1:
                return DASH
            found = [self.results.figure(part.strip()) for part in option.split(" / ")]
            known = [each for each in found if each is not None]
            if len(known) == len(found):
                self.used |= {measurement.name: measurement for measurement, _ in known}
                values = [value for _, value in known]
                return write(values[0] if len(values) == 1 else ratio(*values), form)
        raise ResultsError(f"docs/site/results/{self.name}.md: {match[0]}: no such figure in docs/results.toml")

    def _dates(self, of: str) -> str:
        """Write when the figures used so far were measured that are `of` one program."""
        days = [m.conditions["date"] for m in self.used.values() if m.conditions["of"] == of]
        if not days or not all(isinstance(day, date) for day in days):
            raise ResultsError(f"docs/site/results/{self.name}.md: dates of {of}: not every figure has a day: {days}")
        return write(days)


def ratio(above: Any, below: Any) -> float:
    """Return one figure over another, the means of repeated ones."""
    top, bottom = (sum(x) / len(x) if isinstance(x, list) else x for x in (above, below))
    return float(top / bottom)


def write(value: Any, form: str = "") -> str:
    """Write a figure: the least and the largest of repeated ones; numbers with commas unless a format is given."""
    if isinstance(value, list):
        least, largest = write(min(value), form), write(max(value), form)
        return least if least == largest else f"{least} to {largest}"
    if isinstance(value, date):
        return f"{value.day} {value:%B %Y}"
    return format(value, form) if form else f"{value:,}" if isinstance(value, int | float) else str(value)


Row = tuple[str | None, ...]


def conditions_of(used: list[Measurement], without: list[str]) -> str:
    """Tell how measurements were made: what holds for all of them, then a line for each kind that differs."""
    keys = [key for key in (*SHOWN, *OPTIONAL) if key not in {"model", *without}]
    firm = [key for key in keys if key not in FOUND]
    groups: dict[Row, list[Measurement]] = {}
    for measurement in used:
        groups.setdefault(tuple(shown(measurement, key) for key in firm), []).append(measurement)
    join_silent(groups)
    rows = [
        {key: found(group, key) if key in FOUND else shown(group[0], key) for key in keys} for group in groups.values()
    ]
    said = {key: list(dict.fromkeys(row[key] for row in rows if row[key] is not None)) for key in keys}
    common = {key: texts[0] if texts else None for key, texts in said.items() if len(texts) <= 1}
    models = [] if "model" in without else list(dict.fromkeys(str(m.conditions["model"]) for m in used))
    lead = [*(models if len(models) == 1 else []), *told(common)]
    lines = [f"*Measured:* {'; '.join(lead)}."] if lead else []
    if len(groups) > 1:
        lines.append("")
        for row, group in zip(rows, groups.values(), strict=True):
            others = [m for other in groups.values() if other is not group for m in other]
            names = labels(group, others, models)
            differing = told({key: text for key, text in row.items() if key not in common})
            lines.append("- " + ": ".join(filter(None, (", ".join(names), "; ".join(differing)))))
    return "\n".join(lines)


def found(group: list[Measurement], key: str) -> str | None:
    """Write a condition that every load finds anew: numbers as a range, else what most found, then others by load."""
    values = [(m.conditions[key], m.load) for m in group if m.conditions[key] != NOT_MEANT]
    if not values:
        return None
    if all(isinstance(value, int | float) for value, _ in values):
        return write([value for value, _ in values])
    loads: dict[str, list[str]] = {}
    for value, load in values:
        loads.setdefault(write(value), []).append(load)
    first, *rest = sorted(loads.items(), key=lambda item: -len(item[1]))
    parts = [f"{' '.join(f'`{load}`' for load in dict.fromkeys(names))} {text}" for text, names in rest]
    return ", ".join([first[0], *parts])


def join_silent(groups: dict[Row, list[Measurement]]) -> None:
    """Join what says nothing of some conditions, a start for instance, to what its run says otherwise."""
    for row, group in list(groups.items()):
        runs = {measurement.run for measurement in group}
        for other, larger in groups.items():
            agrees = all(cell in (None, also) for cell, also in zip(row, other, strict=True))
            if row != other and agrees and runs <= {measurement.run for measurement in larger}:
                larger += groups.pop(row)
                break


def labels(group: list[Measurement], others: list[Measurement], models: list[str]) -> list[str]:
    """Name what a line is of: models if there are several, and loads where they tell it from other lines."""
    split = {measurement.run for measurement in others}
    is_start = bool(others) and all(measurement.conditions["prompts"] == NOT_MEANT for measurement in group)
    loads: dict[str, list[str]] = {}
    for measurement in group:
        names = loads.setdefault(str(measurement.conditions["model"]) if len(models) > 1 else "", [])
        tells = is_start or measurement.run in split
        names += [f"`{measurement.load}`"] if tells and f"`{measurement.load}`" not in names else []
    each = {" ".join(names) for names in loads.values()}
    if len(models) > 1 and len(loads) == len(models) and len(each) == 1:
        return [" ".join(filter(None, ("all models", each.pop())))]
    return [label for model, names in loads.items() if (label := " ".join(filter(None, (model, *names))))]


def told(row: Mapping[str, str | None]) -> list[str]:
    """Write some conditions of a line; those that mean nothing are left out."""
    pairs = [(key, text) for key, text in row.items() if text]
    return [text if key in UNNAMED and text != NOT_RECORDED else f"{SHOWN[key]} {text}" for key, text in pairs]


def shown(measurement: Measurement, key: str) -> str | None:
    """Write a condition as a page shows it; None where it means nothing."""
    text = write(measurement.conditions.get(key, ""))
    if text == NOT_MEANT:
        return None
    return f"`{text}`" if key == "command" and text != NOT_RECORDED else text


def filled(name: str, results: Results) -> str:
    """Return what a template becomes.

    Raises:
        ResultsError: There is no such template, or a field names no figure.
    """
    path = TEMPLATES / f"{name}.md"
    if not path.is_file():
        raise ResultsError(f"<!-- results: {name} -->: there is no docs/site/results/{name}.md")
    lines = Filler(results, name).fill(path.read_text("utf-8").strip()).splitlines()
    return "\n".join(line for line in lines if not is_empty(line))


def is_empty(line: str) -> bool:
    """Whether a line of a table has nothing but dashes for figures."""
    cells = set(line.strip().strip("|").replace(" / ", "|").replace(" ", "").split("|")[1:])
    return line.startswith("|") and DASH in cells and cells <= {DASH, ""}


def with_parts(text: str, results: Results, fill: Callable[[str, Results], str] = filled) -> str:
    """Return a page with all its parts written anew."""
    return PART.sub(lambda match: f"{match[1]}\n{fill(match[2], results)}\n\n{match[4]}", text)
