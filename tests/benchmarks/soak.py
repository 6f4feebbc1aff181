"""A server under mixed work for a long time: every answer is looked at, and what its two processes hold is watched.

    make soak                       an hour
    SOAK_S=600 make soak            ten minutes
    python tests/benchmarks/soak.py --seconds 600 --clients 6 --kill-every 180
    python tests/benchmarks/soak.py --kill-every 0 --rate 5 --samples rss.csv

Streams, stop strings with colliding identifiers, clients that leave, tools, schemas that are new, stored responses,
messages, uploads, hostile bodies, and batches at the same time. After a warm-up (a quarter of the time) the memory,
open files and threads of the server and each of its processes must stay level, and the engine's memory within what its
memory table printed at the start, and the cache of grammars. "Own" memory is what comes from no file; each engine is
first made to touch all of its pool, whose memory comes into being with its first use. Exit code 1 if an answer was
wrong or something grew. In the first half of the time the engine is ended with SIGKILL every `--kill-every` seconds,
which must cost the streams that run nothing; the one that is there in the end is looked at for growth, the others did
not live long enough to be warm.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import requests
from batches import Server, command_of, status_kib
from soak_load import Visit

SAMPLE_S = 2.0
WARM = 0.25
"""The part of the time that is warm-up."""
MAX_GROWTH, MAX_GROWTH_KIB = 0.05, 8 << 10
"""Between the first and the last third after it, by which memory may differ; half an hour's worth of noise."""
MAX_MORE = 4
"""By which open files and threads may."""
GRAMMAR_KIB = 32 << 10
"""The cache of compiled grammars, by its flag."""
BESIDE_KIB = 64 << 10
"""What the allocator keeps."""


@dataclass
class Watch:
    """What a process held over time."""

    name: str
    pid: int
    began: str = ""
    is_gone: bool = False
    times: list[float] = field(default_factory=list)
    values: dict[str, list[int]] = field(default_factory=lambda: {"KiB": [], "own KiB": [], "files": [], "threads": []})

    def __post_init__(self) -> None:
        self.began = began_at(self.pid)

    def sample(self) -> None:
        try:
            if began_at(self.pid) != self.began:
                self.is_gone = True  # another process may have its number
                return
            found = {
                "KiB": status_kib(self.pid, "VmRSS"),
                "own KiB": status_kib(self.pid, "RssAnon"),
                "files": len(os.listdir(f"/proc/{self.pid}/fd")),
                "threads": status_kib(self.pid, "Threads"),
            }
        except (OSError, StopIteration):
            return
        self.times.append(time.monotonic())
        for name, value in found.items():
            self.values[name].append(value)

    def thirds(self, name: str, warm_until: float) -> tuple[float, float, float]:
        """Return the median of the first and of the last third after warm-up, and the slope per hour."""
        pairs = zip(self.times, self.values[name], strict=True)
        points = [(at, value) for at, value in pairs if at >= warm_until]
        if len(points) < 6:
            return 0.0, 0.0, 0.0
        third = len(points) // 3
        first, last = (statistics.median(v for _, v in part) for part in (points[:third], points[-third:]))
        slope = statistics.linear_regression(*zip(*points, strict=True)).slope * 3600
        return first, last, slope


def began_at(pid: int) -> str:
    """Return when a process began, in the system's count; the empty string if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def role_of(command: bytes) -> str:
    """Return what a process is by its command line: the last part of its module's name."""
    found = re.search(rb"\x00-m\x00(?:[\w.]*\.)?(\w+)", command)
    return "process" if found is None else found[1].decode().removesuffix("_main")


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    try:
        tasks = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
        children = [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:
        return []
    return [found for child in children for found in (child, *descendants(child))]


def table_kib(log: Path) -> int:
    """Return what the memory table planned for the KV cache and activations."""
    units = {"KiB": 1, "MiB": 1 << 10, "GiB": 1 << 20}
    text = log.read_text(errors="replace")
    found = re.findall(r"^ (?:KV cache|activations)\s+([\d.,]+) (KiB|MiB|GiB)", text, re.MULTILINE)
    found = found[:2]  # every engine prints one
    if len(found) != 2:
        raise RuntimeError("the server printed no memory table")
    return int(sum(float(number.replace(",", "")) * units[unit] for number, unit in found))


class Soak:
    """One run."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.log: Path = arguments.log or folder / "server.log"
        flags = ["--max-total-tokens", str(arguments.kv_tokens), "--grammar-cache-bytes", str(GRAMMAR_KIB << 10)]
        self.server = Server(folder / "storage", arguments.port, *flags, log=self.log)
        self.server.wait()
        self.num_kills = 0
        self.is_over = threading.Event()
        self.watches = [Watch("server", self.server.process.pid), Watch("engine", self.server.engine_pids()[0])]
        for watch in self.watches:
            watch.sample()
        self.ready_kib = self.watches[1].values["own KiB"][0]

    def run(self) -> list[Visit]:
        """Let the clients work, and watch."""
        arguments = self.arguments
        self.began = time.monotonic()
        end = self.began + arguments.seconds
        self.filler = Visit(self.server.base, arguments.port, 1000)
        every_s = (arguments.clients + 1) / arguments.rate if arguments.rate else 0.0
        visits = [Visit(self.server.base, arguments.port, seed, every_s) for seed in range(arguments.clients + 1)]
        works = [(visit.run_until if at else visit.batches_until) for at, visit in enumerate(visits)]
        threads = [threading.Thread(target=work, args=(end,)) for work in works]
        for thread in threads:
            thread.start()
        fills = [self.fill()]
        killed = self.began
        while any(thread.is_alive() for thread in threads):
            time.sleep(SAMPLE_S)
            if self.server.process.poll() is not None:
                print(f"the server ended with code {self.server.process.returncode}")
                break
            if (
                arguments.kill_every
                and end - time.monotonic() > arguments.seconds / 2
                and time.monotonic() - killed > arguments.kill_every
            ):
                killed = time.monotonic()
                self.kill_engine()
                fills.append(self.fill())
            self.sample()
        for thread in [*threads, *fills]:
            thread.join(60)
        return [*visits, self.filler]

    def sample(self) -> None:
        """Look at all processes, and watch those that are new."""
        for watch in self.watches:
            watch.sample()
        known = {watch.pid for watch in self.watches if not watch.is_gone}
        for pid in descendants(self.server.process.pid):
            if pid not in known and (command := command_of(pid)):
                self.watches.append(Watch(role_of(command), pid))

    def fill(self) -> threading.Thread:
        """Warm the engine up while the clients work."""
        tokens = self.arguments.kv_tokens * 3 // 2
        thread = threading.Thread(target=self.filler.fill, args=(tokens,), daemon=True)
        thread.start()
        return thread

    def kill_engine(self) -> None:
        """End the engine; the next one is watched from its own beginning."""
        ended = self.server.engine_pids()
        for pid in ended:
            os.kill(pid, signal.SIGKILL)
            self.num_kills += 1
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = [pid for pid in self.server.engine_pids() if pid not in ended]
            if found:
                self.watches.append(Watch("engine", found[0]))
                return
            time.sleep(0.2)

    def judge(self, visits: list[Visit]) -> list[str]:
        """Show the tables; return what was wrong."""
        found = [problem for visit in visits for problem in visit.problems]
        done = sum((visit.done for visit in visits), Counter[str]())
        for name, count in done.most_common():
            longest = max(visit.longest.get(name, 0.0) for visit in visits)
            print(f"  {count:>7,} {name}, {longest:.1f} s at most")
        waited = sum(visit.told_to_wait for visit in visits)
        print(f"  {waited:>7,} times told to try again")
        print(f"  {self.num_kills:>7,} kills of the engine")
        print(f"  {len(found):>7,} wrong answers")
        found += self.judge_watches()
        if self.server.process.poll() is None:
            ready = requests.get(self.server.base + "/readyz", timeout=30)
            stats = requests.get(self.server.base + "/get_server_info", timeout=30)
            if ready.status_code != 200 or stats.status_code != 200:
                found.append(f"in the end the server is not ready: {ready.text}")
        else:
            found.append("the server ended")
        deaths = re.findall(r"Background task .* died.*", self.log.read_text(errors="replace"))
        return found + deaths

    def judge_watches(self) -> list[str]:
        found = []
        print(f"{'process':>12} {'':>8} {'first third':>12} {'last third':>12} {'per hour':>12}")
        for watch in self.watches:
            if not watch.times:
                continue
            warm_until = watch.times[0] + WARM * (watch.times[-1] - watch.times[0])
            is_long = watch.times[-1] - watch.times[0] >= self.arguments.seconds * 0.4
            for name in watch.values:
                first, last, slope = watch.thirds(name, warm_until)
                print(f"{watch.name:>12} {name:>8} {first:>12,.0f} {last:>12,.0f} {slope:>+12,.0f}")
                more = first * MAX_GROWTH + MAX_GROWTH_KIB if "KiB" in name else MAX_MORE
                if is_long and last - first > more:
                    found.append(f"{watch.name}: {name} grew from {first:,.0f} to {last:,.0f}")
        limit = self.ready_kib + table_kib(self.log) + GRAMMAR_KIB + BESIDE_KIB
        most = max(max(watch.values["own KiB"], default=0) for watch in self.watches if watch.name == "engine")
        print(f"the engine's own memory was at most {most:,} KiB, {self.ready_kib:,} when ready; allowed {limit:,}")
        return found if most <= limit else [*found, f"engine: {most:,} KiB is beyond the memory table's {limit:,}"]

    def write_samples(self, path: Path) -> None:
        """Write what was seen of each process, a line a sample."""
        with path.open("w", encoding="utf-8") as lines:
            print("process,pid,seconds", *self.watches[0].values, sep=",", file=lines)
            for watch in self.watches:
                for at, *values in zip(watch.times, *watch.values.values(), strict=True):
                    print(watch.name, watch.pid, round(at - self.began), *values, sep=",", file=lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Mixed work for a long time.")
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_S", "3600")))
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--kill-every", type=float, default=180.0, help="seconds between kills of the engine; 0: none")
    parser.add_argument("--rate", type=float, default=0.0, help="visits a second of all clients; 0: as many as go")
    parser.add_argument("--samples", type=Path, help="file for all samples, as CSV")
    parser.add_argument("--kv-tokens", type=int, default=16_384)
    parser.add_argument("--port", type=int, default=30931)
    parser.add_argument("--log", type=Path, help="where the server's log stays; without it the last lines are shown")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(arguments, Path(folder))
        try:
            found = soak.judge(soak.run())
            if arguments.samples:
                soak.write_samples(arguments.samples)
        finally:
            soak.server.kill()
        for text in found[:40]:
            print(f"WRONG: {text}")
        if found:
            print(*soak.log.read_text(errors="replace").splitlines()[-30:], sep="\n")
    print(f"{arguments.seconds:g} s: " + ("all well" if not found else f"{len(found)} things were wrong"))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
