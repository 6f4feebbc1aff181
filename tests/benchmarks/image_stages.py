"""Where the time of one request with an image goes, stage by stage, from its first byte to its first token.

    python tests/benchmarks/image_stages.py                                  # a tiny model on the CPU
    python tests/benchmarks/image_stages.py --config DIR --device cuda       # a folder with config.json
    python tests/benchmarks/image_stages.py --against ../older               # another checkout, taking turns

A real server answers one request at a time, each with a new image as a `data:` URL: a photograph or a screenshot, as
PNG or JPEG. Functions that `stage_marks/sitecustomize.py` names note when they ran, in all of the server's processes.
A stage is shown below the one that it is part of, with medians: when it begins and ends after the request was sent, its
processor time, and its page faults. Requests with as many text tokens have a table, too. With `--against`, ratios are
those of medians, of this checkout to the other; each round asks both servers for the same. With `--wait`, tower and
prefill end when a GPU has computed them: that shows what each takes there, but nothing overlaps.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from image_serving import SMALL, Server, write_model
from PIL import Image, ImageDraw
from serving import packages_of, search_path

MARKS = Path(__file__).parent / "stage_marks"
PAUSE_S = 0.3
"""Between requests: what a server does behind a reply is no part of the next request."""
LEAST_MS = 0.5
"""Shorter stages have no ratios."""
KINDS = [f"{what} {form}" for what in ("photograph", "screenshot") for form in ("PNG", "JPEG")]
WORDS = ["agents", "read", "their", "own", "screenshots", "of", "1,024", "pages", "again", "today"]


@dataclass(frozen=True)
class Mark:
    """A stage that ran; seconds by the clock of all processes."""

    pid: str
    stage: str
    began: float
    ended: float
    cpu_s: float
    faults: int


class Marked:
    """A server whose stages are noted."""

    def __init__(
        self, stack: contextlib.ExitStack, tree: Path | None, config: dict[str, Any], device: str, *, waits: bool
    ) -> None:
        self.name = "this" if tree is None else tree.resolve().name
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._folder, self._read = scratch / "stages", dict[str, int]()
        self._folder.mkdir()
        path = search_path(MARKS, *([] if tree is None else packages_of(tree)))
        added = {"PYTHONPATH": path, "DOVETAIL_STAGES": str(self._folder)}
        if waits:
            added["DOVETAIL_STAGES_WAIT"] = "1"
        with mock.patch.dict(os.environ, added):
            self.server = Server(write_model(scratch / "model", config), device, ["--context-length", "8192"])
        stack.callback(self.server.close)
        self.server.wait()

    def ask(self, messages: list[dict[str, Any]]) -> tuple[float, float, dict[str, Any], list[Mark]]:
        """Return when a request was sent, how long it took, its usage, and the stages that ran for it."""
        time.sleep(PAUSE_S)
        self._new()
        sent = time.monotonic()
        took, usage = self.server.ask(messages)
        ended = time.monotonic()
        time.sleep(PAUSE_S)
        return sent, took, usage, [mark for mark in self._new() if mark.ended > sent and mark.began < ended]

    def _new(self) -> list[Mark]:
        found = []
        for path in self._folder.iterdir():
            with path.open("rb") as file:
                file.seek(self._read.get(path.name, 0))
                found += [Mark(path.name, *json.loads(line)) for line in file]
                self._read[path.name] = file.tell()
        return found


def photograph(side: int, rng: np.random.Generator) -> Image.Image:
    """Return noise at every scale, the larger the stronger, as nature has it."""
    found = np.zeros((side, side, 3))
    for num in (4, 16, 64, 256, side):
        grains = Image.fromarray(rng.integers(0, 256, (num, num, 3), np.uint8))
        found += (np.asarray(grains.resize((side, side)), np.float64) - 128) * num**-0.5
    return Image.fromarray(np.clip(found + 128, 0, 255).astype(np.uint8))


def screenshot(side: int, rng: np.random.Generator) -> Image.Image:
    """Return windows of text."""
    image = Image.new("RGB", (side, side), (246, 247, 249))
    draw = ImageDraw.Draw(image)
    for at in range(6):
        x, y = (int(v) for v in rng.integers(0, side * 3 // 4, 2))
        colour = tuple(rng.integers(90, 200, 3).tolist())
        draw.rectangle((x, y, x + side // 2, y + side // 3), (255, 255, 255), colour, 2)
        draw.rectangle((x, y, x + side // 2, y + 24), colour)
        for line in range(side // 3 // 14 - 2):
            words = f"{at}.{line} " + " ".join(rng.choice(WORDS, side // 90))
            draw.text((x + 8, y + 30 + 14 * line), words, (20, 20, 30))
    return image


def conversation(kind: str, side: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Return a conversation with one new image of a kind, such as `photograph JPEG`."""
    what, form = kind.split()
    file = io.BytesIO()
    {"photograph": photograph, "screenshot": screenshot}[what](side, rng).save(file, form, quality=90)  # PNG has none
    url = f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def nested(marks: list[Mark]) -> dict[str, Mark]:
    """Return the marks of a request by where they stand: the stages of their process that they are part of, and theirs.

    Those of one stage at one place become one mark: begin of the first, end of the last, sums of the rest.
    """
    found: dict[str, Mark] = {}
    for pid in {mark.pid for mark in marks}:
        stack: list[Mark] = []
        for mark in sorted((m for m in marks if m.pid == pid), key=lambda m: (m.began, -m.ended)):
            while stack and stack[-1].ended < mark.ended:
                stack.pop()
            stack.append(mark)
            path = " / ".join(each.stage for each in stack)
            if (has := found.get(path)) is not None:
                mark = Mark(pid, mark.stage, has.began, mark.ended, has.cpu_s + mark.cpu_s, has.faults + mark.faults)
            found[path] = mark
    return found


class Table:
    """What stages took, of all rounds."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        self.took: list[float] = []

    def add(self, sent: float, took: float, _usage: dict[str, Any], marks: list[Mark]) -> None:
        """Take those of one request."""
        self.took.append(took * 1e3)
        for path, mark in nested(marks).items():
            if mark.began >= sent:
                times = ((mark.began - sent) * 1e3, (mark.ended - sent) * 1e3)
                self._rows[path].append((*times, mark.cpu_s * 1e3, float(mark.faults)))

    def medians(self) -> dict[str, list[float]]:
        """Return begin, end, processor time (all ms) and faults of each stage that most requests had, in order."""
        usual = {path: rows for path, rows in self._rows.items() if 2 * len(rows) > len(self.took)}
        found = {
            path: [statistics.median(column) for column in zip(*rows, strict=True)] for path, rows in usual.items()
        }
        return dict(sorted(found.items(), key=lambda item: (item[1][0], -item[1][1])))


def show(kind: str, names: list[str], tables: list[Table]) -> None:
    """Print a table for each server, and ratios where there are two."""
    for name, table in zip(names, tables, strict=True):
        print(f"\n{kind}, {name}: p50 {statistics.median(table.took):.1f} ms")
        print(f"{'stage':44} {'from':>8} {'to':>8} {'wall':>8} {'cpu':>8} {'faults':>7}")
        for path, (began, ended, cpu, faults) in table.medians().items():
            *above, stage = path.split(" / ")
            times = f"{began:8.2f} {ended:8.2f} {ended - began:8.2f} {cpu:8.2f}"
            print(f"{'  ' * len(above) + stage:44} {times} {faults:7.0f}")
    if len(tables) == 2:
        mine, other = (table.medians() for table in tables)
        print(f"\n{kind}: {names[0]} to {names[1]}")
        ratio = statistics.median(tables[0].took) / statistics.median(tables[1].took)
        print(f"{'request':44} {ratio:6.3f}")
        for path in mine:
            if path in other and other[path][1] - other[path][0] > LEAST_MS:
                wall = (mine[path][1] - mine[path][0]) / (other[path][1] - other[path][0])
                cpu = f"{mine[path][2] / other[path][2]:6.3f} cpu" if other[path][2] > LEAST_MS else ""
                print(f"{path.rsplit(' / ', 1)[-1]:44} {wall:6.3f} wall {cpu}")


def main() -> int:
    """Serve, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a folder with config.json. Default: a tiny model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--side", type=int, default=1024, help="pixels of an image's side")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    config = SMALL if given.config is None else json.loads((given.config / "config.json").read_text())
    rng = np.random.default_rng(given.seed)
    with contextlib.ExitStack() as stack:
        trees = [None] if given.against is None else [None, given.against]
        servers = [Marked(stack, tree, config, given.device, waits=given.wait) for tree in trees]
        names = [server.name for server in servers]
        for kind in given.kinds:
            tables, texts = ([Table() for _ in servers] for _ in range(2))
            for round_ in range(-2, given.rounds):
                asked = conversation(kind, given.side, rng)
                text = ""
                order = range(len(servers))
                for at in order if round_ % 2 else reversed(order):
                    image = servers[at].ask(asked)
                    num = image[2]["prompt_tokens_details"]["image_tokens"]
                    text = text or "".join(rng.choice(list("abcdefgh"), num))
                    of_text = servers[at].ask([{"role": "user", "content": text}])
                    if round_ >= 0:  # the first have kernels and graphs of these sizes made
                        tables[at].add(*image)
                        texts[at].add(*of_text)
            show(kind, names, tables)
            show(f"as many tokens of text as {kind}", names, texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
