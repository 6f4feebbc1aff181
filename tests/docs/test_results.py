"""Measured figures of README and docs come from one file, with their conditions; a benchmark's JSON updates both."""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import record_results
import results
import write_results
from record_results import Given, dump, record
from results import CONDITIONS, FILE, NOT_MEANT, PART, Filler, Results, ResultsError, with_parts

from dovetail_server.bench.drive import Seen
from dovetail_server.bench.figures import figures_of
from dovetail_server.bench.floor import Bandwidth, Floor
from dovetail_server.bench.jobs import Record
from dovetail_server.bench.options import ServeOptions
from dovetail_server.bench.serve import Start, as_report
from dovetail_server.bench.target import Target
from dovetail_server.bench.workloads import SUITES, Workload, sampling_text
from dovetail_server.kernel_cache import CacheLook

ROOT = Path(__file__).parents[2]
PAGES = write_results.pages()
TEMPLATES = sorted(results.TEMPLATES.glob("*.md"))
UNIT = re.compile(r"\d[\d,.]*\s*(?:tok/s|tokens a second|µs\b|ms\b)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_say_what_the_file_says(page: Path) -> None:
    """A part that was changed by hand, or a file that was changed without `make results`, is found."""
    text = page.read_text("utf-8")
    assert with_parts(text, Results.read()) == text, "run `make results`"
    assert len(PART.findall(text)) == text.count("<!-- results: ")


def test_every_template_is_a_part_of_a_page_once() -> None:
    """None is forgotten, none is there twice."""
    names = [match[2] for page in PAGES for match in PART.finditer(page.read_text("utf-8"))]
    assert sorted(names) == sorted(path.stem for path in TEMPLATES)
    assert ROOT / "README.md" in PAGES


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_no_figure_is_typed_into_a_template(template: Path) -> None:
    """Cells of its tables have digits in fields only, and how they were measured stands below, or where it says."""
    text = template.read_text("utf-8")
    assert "\n{conditions" in text or (template.stem == "readme" and "](docs/benchmarks.md#figures-of-one-gpu)" in text)
    body = [line for line in text.splitlines() if line.startswith("|")][2:]
    cells = [cell for line in body for cell in re.sub(r"\{[^}]*\}", "", line).strip("|").split("|")[1:]]
    assert [cell for cell in cells if re.search(r"\d", cell)] == []
    assert UNIT.findall(re.sub(r"\{[^}]*\}", "", text)) == []


def test_the_readme_types_no_speed() -> None:
    """What it says of tokens a second or of times stands in the file."""
    assert UNIT.findall(PART.sub("", (ROOT / "README.md").read_text("utf-8"))) == []


def test_conditions_of_the_readmes_figures_stand_with_the_benchmarks() -> None:
    """Its one table shows Dovetail and its peers side by side, and no figure that the benchmarks page lacks."""
    readme, benchmarks = ((results.TEMPLATES / f"{name}.md").read_text("utf-8") for name in ("readme", "one-gpu"))
    rows = [line for line in readme.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 5
    for row in rows:
        ours, peers, *more = re.findall(r"\{([^}]*)\}", row)
        assert [name.startswith("peer-") for name in (ours, peers, *more)] == [False, True] * 2
        assert [name for name in (ours, peers, *more) if name not in benchmarks] == []


def test_the_file_is_as_it_would_be_written() -> None:
    """So that recording changes the lines of what was recorded, and no other."""
    text = FILE.read_text("utf-8")
    assert dump(tomllib.loads(text)) == text


def test_all_measurements_state_their_conditions() -> None:
    """Every one of the file, and there are many."""
    found = Results.read().by_name.values()
    assert len(found) > 200
    assert all(set(CONDITIONS) <= measurement.conditions.keys() for measurement in found)


RUN: dict[str, Any] = {**dict.fromkeys(CONDITIONS, "x"), "of": "Dovetail", "load": "one stream"}


def one(**own: Any) -> dict[str, Any]:
    """A run with one load that differs from `RUN`."""
    return {"a": {**{key: value for key, value in RUN.items() if key != "load"}, "single": {"load": "one"} | own}}


@pytest.mark.parametrize(
    ("runs", "part"),
    [
        (one(speed=1, sampling=""), "a.single: says nothing of sampling"),
        (one(speed=1, of="vLLM"), "say in 'source'"),
        (one(), "has no figure"),
        (one(speed="fast"), "speed = 'fast' is neither a condition nor a figure"),
        (one(speed=[]), "speed = "),
        (one(speed={"1": "x"}), "speed = "),
        (one(speed=True), "speed = True"),
        (one(speed=1, sampeling="greedy"), "sampeling = 'greedy' is neither a condition nor a figure"),
    ],
)
def test_a_measurement_that_lacks_something_is_refused(runs: dict[str, Any], part: str) -> None:
    """With its name, and what is wrong."""
    with pytest.raises(ResultsError, match=re.escape(part)):
        Results.of(runs)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_no_condition_can_be_left_out(condition: str) -> None:
    """Each by itself."""
    run = {key: value for key, value in RUN.items() if key != condition}
    with pytest.raises(ResultsError, match=f"says nothing of {condition}"):
        Results.of({"a": {**run, "single": {"speed": 1}}})


def filled(template: str, runs: Mapping[str, Any]) -> str:
    """A template's text, filled."""
    return Filler(Results.of(runs), "test").fill(template)


def test_fields_are_figures_ranges_ratios_and_dashes() -> None:
    """Repeated runs are a range, a ratio is of their means, and what is not there is a dash or the next choice."""
    runs = one(speed=1234.5, again=[30, 10], rows={"16": 2})
    assert filled("{a.single.speed} {a.single.speed:.2f} {a.single.rows.16}", runs) == "1,234.5 1234.50 2"
    assert filled("{a.single.again} {a.single.again / a.single.rows.16:.1f}", runs) == "10 to 30 10.0"
    assert filled("{b.single.speed or a.single.rows.16} {b.c.d or -} {a.single.load}", runs) == "2 – one"
    for wrong in ("{a.single.sped}", "{a.single.rows}", "{a.single}", "{b.x.y or a.single.rows.17}"):
        with pytest.raises(ResultsError, match="no such figure"):
            filled(wrong, runs)


def test_dates_are_those_of_one_programs_figures() -> None:
    """The first and the last day; a figure whose day is not known is no answer."""
    days = [{**RUN, "date": datetime.date(2026, 12, day)} for day in (3, 1)]
    runs = {name: {**run, "single": {"load": "one", "speed": 1}} for name, run in zip("ab", days, strict=True)}
    runs["c"] = one(speed=1, of="vLLM", source="x")["a"]
    found = filled("{a.single.speed}{b.single.speed}{c.single.speed} {dates of Dovetail}", runs)
    assert found == "111 1 December 2026 to 3 December 2026"
    with pytest.raises(ResultsError, match="not every figure has a day"):
        filled("{a.single.speed}{c.single.speed} {dates of vLLM}", runs)


def test_a_line_without_a_figure_is_left_out() -> None:
    """Where nothing of it was measured; titles and blanks stay."""
    lines = {"| a | – | – |": True, "| a | – / – | |": True, "| a | – | 1 |": False, "| **a** | | |": False, "–": False}
    assert {line: results.is_empty(line) for line in lines} == lines


def test_conditions_are_told_once_where_they_are_common() -> None:
    """What differs gets a line each, with models or loads; what each load found is a range."""
    common = {**RUN, "model": "M", "prefix_cache": "nothing found", "sampling": "greedy"}
    del common["load"]
    runs = {
        "a": {
            **common,
            "c16": {"load": "16", "speed": 1, "tokens_per_event": 1.0},
            "c64": {"load": "64", "speed": 2, "tokens_per_event": 1.5, "prefix_cache": "98 % of prompts found"},
            "start": {"load": "a start", "speed": 3, "prompts": NOT_MEANT, "sampling": NOT_MEANT},
        },
        "b": {**common, "model": "N", "prompts": "ids", "c16": {"load": "16", "speed": 4, "tokens_per_event": 1.0}},
    }
    lead, _, first, second = filled(
        "{a.c16.speed}{a.c64.speed}{a.start.speed}{b.c16.speed}{conditions without command}", runs
    ).splitlines()
    assert lead.endswith("*Measured:* Dovetail; x; x; kernel cache x; greedy.")
    assert first == (
        "- M: prompts x; prefix cache nothing found, `c64` 98 % of prompts found; tokens per event 1.0, `c64` 1.5, "
        "`start` x"
    )
    assert second == "- N: prompts ids; prefix cache nothing found; tokens per event 1.0"


TARGET = Target(
    base_url="http://127.0.0.1:1",
    model="models/Qwen3-0.6B",
    kind="dovetail",
    is_local=True,
    version="1",
    device="cuda",
    num_devices=1,
    defaults={"top_k": 20},
    engine={"max_total_tokens": 4096},
)
FLOOR = Floor(facts=None, bandwidth=Bandwidth(bytes_per_s=1e9, origin="test", device="NVIDIA H200"))
START = Start(ready_s=6.04, first_answer_s=7.26, ready_at=0.0, cache=CacheLook(None, frozenset()))


def report(
    *names: str, suite: str = "standard", target: Target = TARGET, start: Start | None = START, **options: Any
) -> dict[str, Any]:
    """What the benchmark writes of some workloads whose requests all take 2 s."""
    given = ServeOptions(workloads=(), seed=1, suite=suite, **options)
    found = []
    for workload in (w for w in SUITES[suite] if w.name in names):
        each = figures_of(workload, Seen(records(workload), 1, 0.1), FLOOR, [4] * workload.num_prompts)
        sampling = sampling_text(workload, 0.0, target.defaults)
        found.append(replace(each, sampling=sampling, since_ready_s=None if start is None else 5.0))
    return as_report(target, FLOOR, start, given, found) | {"time": "2026-12-01T03:04:05+00:00"}


def records(workload: Workload) -> list[Record]:
    """Answers of 4 tokens each, the first after half a second; half of the prompt was cached."""
    return [
        Record(index=i, start=10.0, first=10.5, last=12.0, end=12.0, prompt_tokens=8, completion_tokens=4,
               cached_tokens=4, num_events=4, tokens_at_first=1, gaps=[0.5] * 3, gap_tokens=[1] * 3)
        for i in range(workload.num_prompts)
    ]  # fmt: skip


def recorded(tmp_path: Path, runs: dict[str, Any], *reports: dict[str, Any], **given: str) -> list[str]:
    """Record reports as files; the file that they make is readable and stays as it is."""
    files = []
    for number, each in enumerate(reports):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(each))
    names = record(runs, files, Given(**given))
    Results.of(runs)
    assert tomllib.loads(dump(runs)) == runs
    return names


def test_a_file_of_the_benchmark_is_recorded_with_its_conditions(tmp_path: Path) -> None:
    """All that a reader asks of a figure is in the file; nothing is typed."""
    runs: dict[str, Any] = {}
    flags = ("--load-format", "dummy")
    names = recorded(tmp_path, runs, report("single", "c64", "many", serve_flags=flags))
    assert names == [f"qwen3-06b-empty.{load}" for load in ("start", "single", "c64", "many")]
    single = Results.of(runs).by_name["qwen3-06b-empty.single"]
    assert {key: str(value) for key, value in single.conditions.items()} == {
        "of": "Dovetail",
        "model": "Qwen3-0.6B",
        "device": "one H200",
        "date": "2026-12-01",
        "prompts": "text",
        "kernel_cache": "empty",
        "prefix_cache": "50% of prompts found",
        "sampling": "greedy",
        "tokens_per_event": "1.0",
        "command": "dovetail bench serve --model-path DIR --suite standard -- --load-format dummy",
        "load": "one stream, 36 in, 512 out",
        "note": "the first load right after ready",
    }
    assert single.figures["output_tok_s"] == 10.0
    assert single.figures["first_token_ms"] == 500
    assert single.figures["since_ready_s"] == 5.0
    start = runs["qwen3-06b-empty"]["start"]
    assert (start["ready_s"], start["first_answer_s"], start["pool_tokens"]) == (6.04, 7.26, 4096)
    assert runs["qwen3-06b-empty"]["many"]["tokens_per_event"] == NOT_MEANT
    assert runs["qwen3-06b-empty"]["many"]["load"].endswith("whole replies")


def test_shares_of_the_user_suite_are_recorded(tmp_path: Path) -> None:
    """With how each was sampled, the model's own settings included."""
    runs: dict[str, Any] = {}
    recorded(tmp_path, runs, report("greedy-1", "penalties-1", "first", "later", suite="user"))
    run = runs["qwen3-06b-user-empty"]
    assert run["penalties-1"]["of_greedy"] == 1.0
    assert run["first"]["of_later"] == 1.0
    assert run["penalties-1"]["sampling"] == (
        "temperature 0.7, top-p 0.9, frequency penalty 0.5, presence penalty 0.5, top-k 20 of the model's own"
    )


def test_another_state_is_another_run(tmp_path: Path) -> None:
    """Kernel cache, prompts, flags, suite and maker are in a run's name; paths of a machine are nowhere."""
    runs: dict[str, Any] = {}
    peer = replace(TARGET, kind="vllm", version="0.25.1", device=None, num_devices=None)
    given = {"device": "one H200"}
    for each, more in (
        (report("single", sends_text=False), {}),
        (report("single"), {"kernel_cache": "full"}),
        (report("single", serve_flags=("--tp", "2", "--kv-cache-dtype=fp8", "--chat-template", "/home/x/y.txt")), {}),
        (report("single", start=None), {}),
        (report("single", target=peer, start=None), {}),
        (report("single", target=peer, start=None), {"run": "peer-x", "source": "somebody"}),
    ):
        recorded(tmp_path, runs, each, **given, **more)
    assert list(runs) == [
        "qwen3-06b-empty-token-ids",
        "qwen3-06b-full",
        "qwen3-06b-empty-tp-2-kv-cache-dtype-fp8-chat-template-path",
        "qwen3-06b",
        "vllm-qwen3-06b",
        "peer-x",
    ]
    assert "/home" not in dump(runs)
    assert runs["peer-x"]["of"] == "vllm 0.25.1"
    assert (runs["vllm-qwen3-06b"]["source"], runs["peer-x"]["source"]) == ("measured here", "somebody")
    assert runs["qwen3-06b"]["kernel_cache"] == results.NOT_RECORDED


def test_a_load_is_replaced_and_others_keep_what_they_were_measured_under(tmp_path: Path) -> None:
    """A later run of a few loads does not make the others younger."""
    runs: dict[str, Any] = {}
    recorded(tmp_path, runs, report("single", "c64", start=None), kernel_cache="full")
    runs["qwen3-06b-full"] |= {"device": "one H100", "source": "somebody"}
    recorded(
        tmp_path, runs, report("c64", "c16", start=None) | {"time": "2026-12-24T00:00:00+00:00"}, kernel_cache="full"
    )
    found = Results.of(runs).by_name
    assert [(name, str(each.conditions["date"]), each.conditions["device"]) for name, each in found.items()] == [
        ("qwen3-06b-full.single", "2026-12-01", "one H100"),
        ("qwen3-06b-full.c64", "2026-12-24", "one H200"),
        ("qwen3-06b-full.c16", "2026-12-24", "one H200"),
    ]
    assert found["qwen3-06b-full.single"].conditions["source"] == "somebody"
    assert "source" not in found["qwen3-06b-full.c64"].conditions


def test_repeated_runs_stand_beside_each_other(tmp_path: Path) -> None:
    """Two files of one run, with all their figures."""
    runs: dict[str, Any] = {}
    first, second = report("single"), report("single")
    second["workloads"][0]["output_tok_s"] = 12.34
    recorded(tmp_path, runs, first, second)
    assert runs["qwen3-06b-empty"]["single"]["output_tok_s"] == [10.0, 12.3]
    assert runs["qwen3-06b-empty"]["single"]["sampling"] == "greedy"


def broken(key: str, value: Any) -> dict[str, Any]:
    """A report with something wrong."""
    found = report("single")
    place = found["workloads"][0] if key == "num_failed" else found["server"] if key == "device_name" else found
    place[key] = value
    return found


@pytest.mark.parametrize(
    ("each", "part"),
    [
        (broken("num_failed", 2), "2 requests failed"),
        (broken("device_name", None), "--device"),
        (broken("options", {}), "not written by"),
        ({"rows": []}, "not written by"),
        ([], "not written by"),
    ],
)
def test_what_cannot_be_recorded_is_refused(tmp_path: Path, each: Any, part: str) -> None:
    """Before anything is written."""
    with pytest.raises(ResultsError, match=part):
        recorded(tmp_path, {}, each)


def fails(text: str, found: Results) -> str:
    """Stands in for a page that shows what is not there."""
    raise ResultsError("no such figure")


def test_one_command_records_and_writes_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """README and docs have the new figure and its date; what is wrong is one line, exit code 2, and changes nothing."""
    (tmp_path / "docs").mkdir()
    for page in PAGES:
        place = tmp_path / page.relative_to(ROOT)
        place.write_text(page.read_text("utf-8"), "utf-8")
    file, out = tmp_path / "docs/results.toml", tmp_path / "out.json"
    file.write_text(FILE.read_text("utf-8"), "utf-8")
    measured = report("single", serve_flags=("--load-format", "dummy"))
    measured["workloads"][0]["output_tok_s"] = 98765.4
    out.write_text(json.dumps(measured))
    monkeypatch.setattr(write_results, "ROOT", tmp_path)
    monkeypatch.setattr(write_results, "FILE", file)

    def run(*argv: str) -> int:
        monkeypatch.setattr("sys.argv", ["write_results.py", *argv])
        return write_results.main()

    assert run(str(out), "--model", "Qwen2.5-0.5B") == 0
    for page in (tmp_path / "README.md", tmp_path / "docs/benchmarks.md"):
        assert "98,765" in page.read_text("utf-8")
        assert "1 December 2026" in page.read_text("utf-8")
    assert "README.md: written" in capsys.readouterr().out
    before = file.read_text("utf-8")
    out.write_text(json.dumps(report("single", serve_flags=("--load-format", "dummy"))))
    monkeypatch.setattr(write_results, "with_parts", fails)
    assert run(str(out)) == 2
    monkeypatch.undo()
    assert file.read_text("utf-8") == before
    monkeypatch.setattr(write_results, "FILE", file)
    out.write_text("{")
    assert run(str(out)) == 2
    assert run("--device", "x") == 2
    assert capsys.readouterr().err.count("\n") == 3
    assert file.read_text("utf-8") == before


def test_texts_of_toml_are_written_as_they_are() -> None:
    """Quotes, line ends, other letters and key names come back."""
    text = 'a "b" \\ \n \t \u00b5 \x7f'
    runs = {"a-b": {"x": text, "y": {"load": text, "us": {"16": 1.5, "a b": [1, 2]}}}}
    assert tomllib.loads(record_results.dump(runs)) == runs
