"""Take what `dovetail bench serve --json FILE` wrote into `docs/results.toml`, with the conditions that it tells."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

from results import HEADER, NOT_MEANT, NOT_RECORDED, OURS, ResultsError

SUITE_FLAGS = {"standard": "", "user": "-user"}
KERNEL_NAMES = {"empty": "-empty", "full": "-full", NOT_RECORDED: "", NOT_MEANT: ""}


@dataclass(frozen=True, slots=True)
class Given:
    """What the caller says that a file cannot, or says otherwise."""

    model: str | None = None
    device: str | None = None
    kernel_cache: str | None = None
    run: str | None = None
    source: str | None = None


def record(runs: dict[str, Any], files: list[Path], given: Given) -> list[str]:
    """Put the figures of files into the runs; returns the names of the measurements.

    A load that was there is replaced, others of its run stay with their dates. Files of one run are repeated runs:
    their figures become lists.

    Raises:
        ResultsError: A file is not of `dovetail bench serve`, lacks a condition, or had failed requests.
    """
    found: dict[str, tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]] = {}
    for file in files:
        report = read(file)
        common = common_of(report, given, file)
        name = given.run or name_of(report, common)
        if slug(name) != name:
            raise ResultsError(
                f"--run {name!r}: give small letters, digits and hyphens, such as {slug(name) or 'a-run'}"
            )
        _, loads = found.setdefault(name, (common, {}))
        if found[name][0] != common:
            raise ResultsError(f"{file}: would be {name}, too, under other conditions; record it alone with --run NAME")
        for load, values in loads_of(report, file):
            loads.setdefault(load, []).append(values)
    for name, (common, loads) in found.items():
        put(runs, name, common, {load: together(values) for load, values in loads.items()})
    return [f"{name}.{load}" for name, (_, loads) in found.items() for load in loads]


def read(file: Path) -> dict[str, Any]:
    """Read a file and check that it is of the benchmark.

    Raises:
        ResultsError: It is not.
    """
    try:
        report = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{file}: {error}; give what `dovetail bench serve --json FILE` wrote") from None
    needed = {"server", "options", "workloads", "time"}
    if not isinstance(report, dict) or not needed <= report.keys() or "suite" not in report["options"]:
        raise ResultsError(f"{file}: not written by `dovetail bench serve --json` of this version")
    return report


def common_of(report: Mapping[str, Any], given: Given, file: Path) -> dict[str, Any]:
    """Return what all loads of a file have in common.

    Raises:
        ResultsError: The device is not known.
    """
    server, options, start = report["server"], report["options"], report["start"]
    device = given.device or device_of(server)
    if device is None:
        raise ResultsError(f"{file}: does not tell the device; give --device 'one H200'")
    is_ours = server["kind"] == "dovetail"
    kernels = (start or {}).get("kernel_cache") or (NOT_MEANT if server.get("device") == "cpu" else NOT_RECORDED)
    found = {
        "of": OURS if is_ours else f"{server['kind']} {server['version'] or ''}".strip(),
        "model": given.model or Path(server["model"]).name,
        "device": device,
        "command": command_of(options, started=start is not None),
        "prompts": {"text": "text", "ids": "token ids"}.get(options["prompts"], options["prompts"]),
        "kernel_cache": given.kernel_cache or kernels,
    }
    if not is_ours:
        found["source"] = given.source or "measured here"
    if start is not None:
        found["note"] = "the first load right after ready"
    return found


def device_of(server: Mapping[str, Any]) -> str | None:
    """Return the device in words, where the file tells."""
    name, num = server.get("device_name"), server.get("num_devices")
    if not name or not num:
        return None
    return f"{'one' if num == 1 else num} {name.removeprefix('NVIDIA ')}"


def command_of(options: Mapping[str, Any], *, started: bool) -> str:
    """Return the command that measures this again, without paths of a machine."""
    words = ["dovetail bench serve", "--model-path DIR" if started else "--base-url URL"]
    words += [f"--suite {options['suite']}"] if options["suite"] else []
    words += ["--prompts ids"] if options["prompts"] == "ids" else []
    words += [f"-- {shlex.join(without_paths(options['serve_flags']))}"] if options["serve_flags"] else []
    return " ".join(words)


def without_paths(flags: list[str]) -> list[str]:
    """Return flags whose values that are paths say PATH."""
    return [re.sub(r"(^|=)[./~][^=]*/.*", r"\1PATH", flag) for flag in flags]


def name_of(report: Mapping[str, Any], common: Mapping[str, Any]) -> str:
    """Name a run by what tells it from others: model, suite, kernel cache, prompts, flags."""
    flags = re.sub(r"--load-format[ =]dummy", "", " ".join(without_paths(report["options"]["serve_flags"])))
    parts = "" if common["of"] == OURS else f"{report['server']['kind']}-"
    parts += slug(common["model"]) + SUITE_FLAGS.get(report["options"]["suite"], "-load")
    parts += KERNEL_NAMES.get(common["kernel_cache"], "-partly")
    parts += "" if common["prompts"] == "text" else f"-{slug(common['prompts'])}"
    return f"{parts}-{slug(flags)}" if slug(flags) else parts


def slug(text: str) -> str:
    """Return text as a part of a name: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower().replace(".", "")).strip("-")


def loads_of(report: Mapping[str, Any], file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each load's name with its own conditions and figures.

    Raises:
        ResultsError: Requests of it failed.
    """
    day = datetime.fromisoformat(report["time"]).date()
    rates = {each["workload"]["name"]: each["output_tok_s"] for each in report["workloads"]}
    if report["start"] is not None:
        figures = {key: rounded(report["start"][key]) for key in ("ready_s", "first_answer_s")}
        figures["pool_tokens"] = report["server"]["engine"]["max_total_tokens"]
        nothing = dict.fromkeys(("prompts", "prefix_cache", "sampling", "tokens_per_event"), NOT_MEANT)
        yield "start", {"date": day, "load": "a start", **nothing, **figures}
    for each in report["workloads"]:
        workload = each["workload"]
        if each["num_failed"]:
            raise ResultsError(f"{file}: {workload['name']}: {each['num_failed']} requests failed; measure it again")
        own = {
            "date": day,
            "load": load_text(workload),
            "prefix_cache": found_text(each["cached_tokens"] / max(1, each["prompt_tokens"])),
            "sampling": each["sampling"],
            "tokens_per_event": rounded(each["tokens_per_event"]) if workload["stream"] else NOT_MEANT,
        }
        yield workload["name"], own | figures_of(each, rates)


def figures_of(each: Mapping[str, Any], rates: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of one workload that pages show."""
    first, gap = each["ttft_ms"] or {}, each["gap_ms"] or {}
    found = {
        "output_tok_s": each["output_tok_s"],
        "first_token_ms": first.get("p50"),
        "first_token_p99_ms": first.get("p99"),
        "gap_p99_ms": gap.get("p99"),
        "decode_tok_s": each["decode_tok_s"],
        "prompt_tok_s": each["prompt_tok_s"],
        "floor_tok_s": each["floor_tok_s"],
        "of_floor": each["of_floor"],
        "since_ready_s": each["since_ready_s"],
    }
    beside = rates.get(each["workload"]["beside"])
    if beside:
        found["of_greedy" if each["workload"]["beside"].startswith("greedy") else "of_later"] = (
            each["output_tok_s"] / beside
        )
    return {key: rounded(value) for key, value in found.items() if value is not None}


def load_text(workload: Mapping[str, Any]) -> str:
    """Say in words what was sent."""
    streams, rate = workload["concurrency"], workload["request_rate"]
    pace = "one stream" if streams == 1 else f"{streams} streams" if streams else f"{rate:g} requests a second"
    prefix = f"a shared prefix of {workload['shared_prefix_len']:,} and " if workload["shared_prefix_len"] else ""
    whole = "" if workload["stream"] else ", whole replies"
    return f"{pace}, {prefix}{span(workload['input_len'])} in, {span(workload['output_len'])} out{whole}"


def found_text(share: float) -> str:
    """Say how much of the prompts the prefix cache had."""
    return f"{share:.0%} of prompts found" if share >= 0.005 else "nothing found"


def span(lengths: list[int]) -> str:
    """Write a range of lengths."""
    low, high = lengths
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def rounded(value: float) -> float:
    """Keep what a measurement can tell: whole numbers from 100 on, else one or two digits behind the point."""
    return round(value) if value >= 100 else round(value, 1) if value >= 10 else round(value, 2)


def together(values: list[dict[str, Any]]) -> dict[str, Any]:
    """Make one load of repeated ones: figures become lists, conditions that differ are joined."""
    if len(values) == 1:
        return values[0]
    found: dict[str, Any] = {}
    for key in values[0]:
        each = [one[key] for one in values if key in one]
        if key == "date":
            found[key] = max(each)
        elif isinstance(each[0], str) or key == "tokens_per_event":
            found[key] = each[0] if len(set(each)) == 1 else " and ".join(dict.fromkeys(map(str, each)))
        else:
            found[key] = each
    return found


def put(runs: dict[str, Any], name: str, common: Mapping[str, Any], loads: Mapping[str, Any]) -> None:
    """Put loads into a run; those that stay keep the conditions that they were measured under."""
    old = runs.get(name, {})
    before = {key: value for key, value in old.items() if not isinstance(value, Mapping)}
    kept = {load: own for load, own in old.items() if isinstance(own, Mapping)}
    changed = {key: value for key, value in before.items() if common.get(key) != value}
    runs[name] = {**common, **{load: loads.get(load, {**changed, **own}) for load, own in kept.items()}, **loads}


def dump(runs: Mapping[str, Any]) -> str:
    """Write runs as they stand in the file: a table a load, a line a value."""
    blocks = []
    for name, run in runs.items():
        plain = {key: value for key, value in run.items() if not isinstance(value, Mapping)}
        blocks.append(block(name, plain))
        blocks += [block(f"{name}.{load}", own) for load, own in run.items() if isinstance(own, Mapping)]
    return HEADER + "\n".join(blocks)


def block(name: str, values: Mapping[str, Any]) -> str:
    """Write one table."""
    return "\n".join([f"[{name}]", *(f"{key} = {toml(value)}" for key, value in values.items()), ""])


def toml(value: Any) -> str:
    """Write a value in TOML: text as in JSON, which TOML reads alike but for DEL."""
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
