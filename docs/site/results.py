"""Write the measured figures of README and docs from `docs/results.json`: `make results`, ARGS="--help" for recording.

The file holds `runs`, conditions and figures of what was measured, and `pages`, the lines of each part of a page. In
those, `{run.load.figure}` is a figure, `{a or b or -}` the first that there is, `{a / b:.2f}` a ratio in a format of
Python's, `{dates}` the days of Dovetail's figures so far, `{conditions}` how all of them were measured.
"""

from __future__ import annotations

import argparse
import json
import re
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PART = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- results end -->)", re.DOTALL)
HOW = {"of": "{}", "device": "{}", "date": "{}", "prompts": "prompts {}", "kernel_cache": "kernel cache {}"}
HOW |= {"command": "command `{}`", "source": "{}", "note": "{}"}
"""The conditions that a page states; `prefix_cache`, `sampling` and `tokens_per_event` of each load are in the file."""
NOT_MEANT = "does not apply"
SHOWN = "output_tok_s decode_tok_s prompt_tok_s floor_tok_s of_floor since_ready_s"
FIRST = {"first_token_ms": "p50", "first_token_p99_ms": "p99"}
DASH = "\N{EN DASH}"


def write(value: Any, form: str = "") -> str:
    """Write a figure: the least and the largest of repeated ones."""
    if isinstance(value, list):
        return " to ".join(dict.fromkeys(write(end(value), form) for end in (min, max)))
    if isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", value):
        return f"{date.fromisoformat(value):%-d %B %Y}"
    return format(value, form or ",") if isinstance(value, int | float) else str(value)


def conditions(used: dict[str, dict[str, Any]]) -> str:
    """Say how loads were measured, a line for each way, with its models where there are several ways."""
    ways: dict[str, list[str]] = {}
    loads = [name.split(".")[0] for name, one in used.items() if one["prompts"] != NOT_MEANT]
    for name, one in used.items():
        if one["prompts"] != NOT_MEANT or name.split(".")[0] not in loads:  # a start is told by the loads behind it
            said = [text.format(write(one[key])) for key, text in HOW.items() if one.get(key, NOT_MEANT) != NOT_MEANT]
            ways.setdefault("; ".join(said), []).append(one["model"])
    lines = [f"{', '.join(dict.fromkeys(models))}: {way}." for way, models in ways.items()]
    return f"*Measured:* {lines[0]}" if len(lines) == 1 else "*Measured:*\n\n" + "\n".join(f"- {x}" for x in lines)


def part(name: str, runs: dict[str, Any], pages: dict[str, list[str]]) -> str:
    """Fill one part of a page. A row of a table that has only dashes is left out.

    Raises:
        KeyError: A field names no figure.
    """
    used: dict[str, dict[str, Any]] = {}

    def look(reference: str) -> Any:
        run, load, *keys = reference.strip().split(".")
        value: Any = runs.get(run, {}).get(load) and {**runs[run], **runs[run][load]}
        if value:
            used[f"{run}.{load}"] = value
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return None if isinstance(value, dict) else value

    def fill(field: re.Match[str]) -> str:
        body, _, form = field[1].partition(":")
        if body == "conditions":
            return conditions(used)
        if body == "dates":
            return write([one["date"] for one in used.values() if one["of"] == "Dovetail"])
        for option in body.split(" or "):
            parts = [DASH] if option == "-" else [look(each) for each in option.split(" / ")]
            if None not in parts:
                means = [sum(x) / len(x) if isinstance(x, list) else x for x in parts]
                return write(means[0] / means[1] if len(parts) == 2 else parts[0], form)
        raise KeyError(f"docs/results.json: page {name}: {field[0]}: no such figure")

    lines = re.sub(r"\{([^{}]+)\}", fill, "\n".join(pages[name])).split("\n")
    return "\n".join(
        line for line in lines if not re.fullmatch(rf"\|[^|]+(\|[ {DASH}/]+)+\|", line) or DASH not in line
    )


def written(text: str, data: dict[str, Any]) -> str:
    """Return a page with all its parts written anew."""
    return PART.sub(lambda found: f"{found[1]}\n{part(found[2], **data)}\n\n{found[4]}", text)


def record(runs: dict[str, Any], name: str, files: list[Path], common: dict[str, str]) -> None:
    """Take what `dovetail bench serve --json FILE` found into a run; several files are repeated runs.

    Raises:
        ValueError: Requests failed.
    """
    reports = [json.loads(file.read_text("utf-8")) for file in files]
    run = runs.setdefault(name, {**dict.fromkeys(list(HOW)[:6], "not recorded"), "of": "Dovetail"})
    run |= {"model": Path(reports[0]["server"]["model"]).name, "date": reports[0]["time"][:10], **common}
    for rows in zip(*(report["workloads"] for report in reports), strict=True):
        kind = rows[0]["workload"]
        if any(row["num_failed"] for row in rows):
            raise ValueError(f"{kind['name']}: requests failed; measure it again")
        found = {key: [round(row[key], 2) for row in rows] for key in SHOWN.split() if rows[0][key] is not None}
        found |= {key: [row["ttft_ms"][p] for row in rows] for key, p in FIRST.items() if rows[0]["ttft_ms"]}
        load = f"{kind['concurrency'] or kind['request_rate']} at once, {kind['input_len']} in"
        run[kind["name"]] = {"load": f"{load}, {kind['output_len']} out", "sampling": rows[0]["sampling"], **found}


def dump(value: Any, depth: int = 0) -> str:
    """Write the file: a line for each condition, load and line of a page."""
    if depth == 3 or not isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    rows = [f"{json.dumps(key)}: {dump(value[key], depth + 1)}" for key in value] if isinstance(value, dict) else []
    rows, (start, end) = (rows, "{}") if rows else ([dump(row, depth + 1) for row in value], "[]")
    return f"{start}\n" + ",\n".join(f"{' ' * (depth + 1)}{row}" for row in rows) + f"\n{' ' * depth}{end}"


def main() -> None:
    """Record what is given, and write every page whose figures differ."""
    parser = argparse.ArgumentParser(description="Write the figures of README and docs from docs/results.json.")
    parser.add_argument("files", nargs="*", type=Path, metavar="JSON", help="of `dovetail bench serve`, repeated runs")
    parser.add_argument("--run", help="the run that they are recorded as")
    for key in HOW:
        parser.add_argument(f"--{key.replace('_', '-')}", help=f"a condition of the run: {key}")
    args = vars(parser.parse_args())
    files, run, file = args.pop("files"), args.pop("run"), ROOT / "docs/results.json"
    if bool(files) != bool(run):
        parser.error("give JSON files and --run NAME together")
    data = json.loads(file.read_text("utf-8"))
    if run:
        record(data["runs"], run, files, {key: value for key, value in args.items() if value})
    texts = {file: dump(data) + "\n"}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        texts[page] = written(page.read_text("utf-8"), data)
    for path, text in texts.items():
        if text != path.read_text("utf-8"):
            path.write_text(text, "utf-8")
            print(f"{path.relative_to(ROOT)}: written")


if __name__ == "__main__":
    main()
