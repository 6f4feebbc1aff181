"""Measured figures of README and docs come from one file, with their conditions; a benchmark's JSON updates both."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import results

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs/results.json"
DATA: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
UNIT = re.compile(r"\d[\d,.]*\s*(?:tok/s|tokens/s|tokens a second|µs\b|ms\b)")
LOADS = [(name, load) for name, run in DATA["runs"].items() for load, own in run.items() if isinstance(own, dict)]
RUNS = {
    "a": {"of": "Dovetail", "model": "M", "prompts": "text", "x": {"speed": 1234.5, "again": [30, 10], "us": {"16": 2}}}
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_say_what_the_file_says(page: Path) -> None:
    """A part that was changed by hand, or a file that was changed without `make results`, is found."""
    text = page.read_text("utf-8")
    assert results.written(text, DATA) == text, "run `make results`"
    assert len(results.PART.findall(text)) == text.count("<!-- results: ")


def test_every_part_stands_in_a_page_once() -> None:
    """None is forgotten, none is there twice."""
    names = [match[2] for page in PAGES for match in results.PART.finditer(page.read_text("utf-8"))]
    assert sorted(names) == sorted(DATA["pages"])


@pytest.mark.parametrize("name", DATA["pages"])
def test_no_figure_is_typed_into_a_part(name: str) -> None:
    """Cells of its tables have digits in fields only, and how they were measured stands below, or where it says."""
    text = "\n".join(DATA["pages"][name])
    assert "\n{conditions}" in text or (name == "readme" and "](docs/benchmarks-gpu.md)" in text)
    body = [line for line in text.splitlines() if line.startswith("|")][2:]
    cells = [cell for line in body for cell in re.sub(r"\{[^}]*\}", "", line).strip("|").split("|")[1:]]
    assert [cell for cell in cells if re.search(r"\d", cell)] == []
    assert UNIT.findall(re.sub(r"\{[^}]*\}", "", text)) == []


def test_the_readme_types_no_speed() -> None:
    """What it says of tokens a second or of times stands in the file."""
    assert UNIT.findall(results.PART.sub("", PAGES[0].read_text("utf-8"))) == []


def test_the_readmes_figures_stand_with_the_benchmarks() -> None:
    """Its one table shows Dovetail and its peers side by side, and no figure that the benchmarks page lacks."""
    rows = [line for line in DATA["pages"]["readme"] if line.startswith("|")][2:]
    assert len(rows) == 5
    for row in rows:
        names = re.findall(r"\{([^}]*)\}", row)
        assert [name.startswith("peer-") for name in names] == [False, True] * 2
        assert [name for name in names if name not in str(DATA["pages"]["one-gpu"])] == []


SAID = {"of", "model", "device", "date", "prompts", "kernel_cache", "prefix_cache", "sampling", "tokens_per_event"}
SAID |= {"command", "load"}


def test_measurements_state_their_conditions() -> None:
    """Each has a figure of numbers, and says how it was measured, and of a peer by whom."""
    assert len(LOADS) > 200
    for run, load in LOADS:
        own = {**DATA["runs"][run], **DATA["runs"][run][load]}
        assert [key for key in SAID if own.get(key) in (None, "")] == [], (run, load)
        assert own["of"] == "Dovetail" or own["source"], (run, load)
        figures = [value for key, value in DATA["runs"][run][load].items() if key not in {*SAID, "note", "source"}]
        flat = [one for value in figures for one in (value.values() if isinstance(value, dict) else [value])]
        numbers = [number for one in flat for number in (one if isinstance(one, list) else [one])]
        assert numbers, (run, load)
        assert all(type(number) in (int, float) for number in numbers), (run, load)


def test_fields_are_figures_ranges_ratios_and_dashes() -> None:
    """Repeated runs are a range, a ratio is of their means, and what is not there is a dash or the next choice."""

    def filled(text: str) -> str:
        return results.part("p", RUNS, {"p": [text]})

    assert filled("{a.x.speed} {a.x.speed:.2f} {a.x.us.16}") == "1,234.5 1234.50 2"
    assert filled("{a.x.again} {a.x.again / a.x.us.16:.1f}") == "10 to 30 10.0"
    assert filled("{b.x.speed or a.x.us.16} {b.c.d or -}") == "2 –"
    assert filled("| a | {b.c.d or -} | |\n| b | {a.x.us.16} |") == "| b | 2 |"
    assert filled("{a.x.us.16}\n{conditions}") == "2\n*Measured:* M: Dovetail; prompts text."
    for wrong in ("{a.x.sped}", "{a.x.us}", "{a.x}", "{b.x.y or a.x.us.17}"):
        with pytest.raises(KeyError, match="no such figure"):
            filled(wrong)


def test_one_command_records_and_writes_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """README and docs have the new figure and its date; requests that failed are refused, and nothing is written."""
    (tmp_path / "docs").mkdir()
    for path in (*PAGES, FILE):
        (tmp_path / path.relative_to(ROOT)).write_text(path.read_text("utf-8"), "utf-8")
    row = {"workload": {"name": "single", "concurrency": 1, "request_rate": None, "input_len": [36, 36],
                        "output_len": [512, 512]}, "num_failed": 0, "sampling": "greedy", "output_tok_s": 98765.4,
           "ttft_ms": {"p50": 1.0, "p99": 2.0}}  # fmt: skip
    row |= dict.fromkeys(("decode_tok_s", "prompt_tok_s", "floor_tok_s", "of_floor", "since_ready_s"))
    report: dict[str, Any] = {"server": {"model": "Qwen2.5-0.5B"}, "time": "2026-12-01T01:02:03", "workloads": [row]}
    out = tmp_path / "out.json"
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["results.py", str(out), "--run", "qwen25-05b-empty", "--device", "one H200"])
    out.write_text(json.dumps(report))
    results.main()
    for page in (tmp_path / "README.md", tmp_path / "docs/benchmarks-gpu.md"):
        assert "98,765" in page.read_text("utf-8")
        assert "1 December 2026" in page.read_text("utf-8")
    assert "README.md: written" in capsys.readouterr().out
    before = (tmp_path / "docs/results.json").read_text("utf-8")
    row["num_failed"] = 1
    out.write_text(json.dumps(report))
    with pytest.raises(ValueError, match="single: requests failed"):
        results.main()
    assert (tmp_path / "docs/results.json").read_text("utf-8") == before


def test_the_file_is_as_it_would_be_written() -> None:
    """So that recording changes the lines of what was recorded, and no other."""
    assert results.dump(DATA) + "\n" == FILE.read_text("utf-8")
