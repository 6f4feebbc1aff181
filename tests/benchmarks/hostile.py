"""Hostile grammars over HTTP, one after the other, beside four streams of a running server.

    python tests/benchmarks/hostile.py [--rest 60] [--only NAME…]

Prints each answer's time and outcome, what the grammars added to the neighbours' gaps between tokens at p99, and the
memory of the server's processes before and after. Gaps on a machine that others use say little: run it on a quiet one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

NUM_STREAMS = 4
QUIET_S = 15.0
KV_TOKENS, FILLING = 8192, 1500
"""Of the server's KV pool, which is filled before memory is looked at: else the streams' own pages would count."""
TIMEOUT_S = 60.0
ORDINARY: list[dict[str, Any]] = [
    {"json_schema": '{"type": "object"}'},
    {"json_schema": '{"properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}'},
    {"regex": "[ab]{3}", "grammar_backend": "outlines"},
    {"regex": "[ab]{3}"},
    {"ebnf": 'root ::= "a" | "b" root'},
    {"ebnf": 'root ::= "a" | "b" root', "grammar_backend": "xgrammar"},
]
"""What a server with structured outputs has met before memory is looked at: each loads a library, or a part of one."""
FORMATS = ["uri", "iri", "email", "regex", "date-time"]


def regexes() -> Iterator[tuple[str, str]]:
    """Automata that grow, and matchers that go back."""
    yield from {
        "ambiguous end": "[ab]*a[ab]{20}",
        "ambiguous end, long": "[ab]*a[ab]{400}",
        "nested plus": "(x+x+)+y",
        "nested stars": "((a*)*)*b",
        "long repetition": "a{100000}",
        "product of repetitions": "(((a{0,60}b){0,60}c){0,60}d){0,60}",
        "many alternatives": "|".join(f"word{i}x" for i in range(20000)),
        "long literal": "a" * 300_000,
        "classes": "".join(f"[a-z{i}]" for i in range(10)) * 2000,
        "optional chain": "a?" * 2000 + "a" * 2000,
        "dots": ".*" * 300 + "x",
        "deep groups": "(" * 5000 + "a" + ")" * 5000,
        "look-ahead": "(?=.*a)(?=.*b)(?=.*c)[a-z]{0,2000}",
        "back reference": r"(a+)\1{50}",
        "unicode classes": r"\p{L}{1,3000}",
        "overlapping words": "(" + "|".join(f"a{{{i}}}b?" for i in range(1, 200)) + "){1,50}",
        "empty loops": "(|a|(|b)*)*" * 40,
        "not closed": "(((",
    }.items()


def schemas() -> Iterator[tuple[str, Any]]:
    """Schemas that are wide, deep, circular, contradictory, or wide only once they are read."""
    strings = {"type": "string"}
    yield from {
        "properties": {"properties": {f"p{i}": strings for i in range(10_000)}},
        "required properties": {
            "properties": {f"p{i}": strings for i in range(8_000)},
            "required": [f"p{i}" for i in range(8_000)],
            "additionalProperties": False,
        },
        "enum": {"enum": [f"v{i}" for i in range(50_000)]},
        "enum with prefixes": {"enum": ["a" * i for i in range(900)]},
        "enum of objects": {"enum": [{"k": i, "v": [i]} for i in range(10_000)]},
        "too deep": nested(300),
        "deep": nested(60),
        "circle": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        "circle of two": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "circle of arrays": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        "chain": {
            "$ref": "#/$defs/d0",
            "$defs": {"d5000": {}} | {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)},
        },
        "bomb of references": {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(12)} | {"d12": strings},
        },
        "bomb of options": {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(12)} | {"d12": strings},
        },
        "product of options": {
            "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(40)]
        },
        "oneOf, wide": {"oneOf": [{"properties": {f"k{i}": strings}, "required": [f"k{i}"]} for i in range(400)]},
        "anyOf, wide": {"anyOf": [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in range(3000)]},
        "multipleOf": {"type": "integer", "multipleOf": 1_000_003},
        "multipleOf, prime": {"type": "integer", "multipleOf": 5_000_011},
        "multipleOf, small": {"type": "number", "multipleOf": 1e-9},
        "bounds": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
        "length": {"type": "string", "maxLength": 10_000_000},
        "lengths": {
            "properties": {f"p{i}": {"type": "string", "minLength": 999, "maxLength": 99999} for i in range(60)}
        },
        "items": {"type": "array", "items": strings, "minItems": 100_000},
        "items of items": {"type": "array", "minItems": 500, "items": {"type": "array", "minItems": 500, "items": {}}},
        "unsatisfiable": {"type": "object", "required": ["a"], "properties": {"a": False}},
        "contradiction": {"allOf": [{"type": "string"}, {"type": "integer"}]},
        "pattern": {"type": "string", "pattern": "^(a|aa)+$"},
        "pattern, growing": {"type": "string", "pattern": "[ab]*a[ab]{18}$"},
        "patterns": {"properties": {f"p{i}": {"pattern": f"^([a-z]{{1,{i + 1}}}-?)*$"} for i in range(200)}},
        "pattern properties": {"patternProperties": {f"^[a-z]*{i}[a-z]*$": {"const": i} for i in range(40)}},
        "property names": {"propertyNames": {"pattern": "^(a|b|ab)*$"}, "minProperties": 50},
        "counts": {"properties": {f"p{i}": strings for i in range(300)}, "minProperties": 150, "maxProperties": 151},
        "differing items": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 1000},
        "differing items, few": {
            "items": {"enum": list(range(30))},
            "type": "array",
            "uniqueItems": True,
            "minItems": 30,
        },
        "differing items behind options": differing(12),
        "nots": {"allOf": [{"not": {"required": [f"p{i}", f"q{i}"]}} for i in range(200)]},
        "conditions": {
            "allOf": [{"if": {"properties": {"a": {"const": i}}}, "then": {"required": [f"b{i}"]}} for i in range(300)]
        },
        "dependents": {"dependentRequired": {f"p{i}": [f"p{(i * 7) % 300}"] for i in range(300)}},
        "unevaluated": {"allOf": [{"properties": {f"p{i}": {}}} for i in range(200)], "unevaluatedProperties": False},
        "long names": {"properties": {"n" * 40_000 + str(i): {} for i in range(10)}},
        "escapes": {"properties": {'\\"\n' * 2000: {}}, "required": ['\\"\n' * 2000]},
        "numbers": {"enum": [10**i for i in range(300)]},
        "formats": {"properties": {f"p{i}": {"type": "string", "format": name} for i, name in enumerate(FORMATS * 60)}},
    }.items()


def nested(depth: int) -> Any:
    """Arrays of arrays."""
    made: Any = {"type": "string"}
    for _ in range(depth):
        made = {"type": "array", "items": made}
    return made


def differing(depth: int) -> Any:
    """Arrays in arrays whose items differ, behind options at each level."""
    made: Any = {"type": "boolean"}
    for _ in range(depth):
        made = {"anyOf": [made, {"type": "array", "uniqueItems": True, "items": made}, {"type": "null"}]}
        if len(json.dumps(made)) > 200_000:
            break
    return made


def grammars() -> Iterator[tuple[str, str]]:
    """GBNF and Lark."""
    yield from {
        "left recursion": "root ::= root root | root root root | 'x'".replace("'", '"'),
        "ambiguous": 'root ::= a a a a\na ::= "" | "x" a | a "x" | a a',
        "rules": "root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1} | "b"' for i in range(5000)) + '\nr5000 ::= "c"',
        "options": "root ::= " + " | ".join(f'"w{i}"' for i in range(20_000)),
        "repetition": 'root ::= ("a" | "ab"){0,20000}',
        "empty": 'root ::= ("" | "")*',
        "no rule": "root ::= nothing",
        "deep": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000,
        "lark repetition": 'start: (("a"~0..100)~0..100)~0..100',
        "lark terminals": "start: /[a-z]*/ " * 1 + "\n" + "\n".join(f"T{i}: /[a-z]{{1,{i + 1}}}/" for i in range(500)),
        "lark ambiguous": 'start: x x x\nx: "a"* | "a"* x',
    }.items()


def bodies() -> dict[str, dict[str, Any]]:
    """Requests by name."""
    found: dict[str, dict[str, Any]] = {f"regex, {name}": {"regex": source} for name, source in regexes()}
    found |= {f"json, {name}": {"json_schema": json.dumps(source)} for name, source in schemas()}
    found |= {f"grammar, {name}": {"ebnf": source} for name, source in grammars()}
    parameters: dict[str, Any] = {"properties": {f"p{i}": {} for i in range(3000)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    found["choice, many"] = {"structured_outputs": {"choice": [f"c{i}" for i in range(40_000)]}}
    found["tool, properties"] = {"tools": [tool], "tool_choice": "required"}
    tags = [
        {"begin": f"<t{i}>", "content": {"type": "json_schema", "json_schema": {}}, "end": "<"} for i in range(1500)
    ]
    tag = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<"], "tags": tags}}
    found["structural, tags"] = {"response_format": tag}
    many = {"type": "repeat", "content": {"type": "regex", "pattern": "a{0,500}b"}, "min": 0, "max": 2000}
    found["structural, repeat"] = {"response_format": {"type": "structural_tag", "format": many}}
    return found


class Server:
    """`dovetail serve` with the demo model."""

    def __init__(self, port: int) -> None:
        code = "import sys; from dovetail_server.cli import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "serve", "--port", str(port), "--device", "cpu"]
        command += ["--max-total-tokens", str(KV_TOKENS)]
        self.base = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def memory_mb(self) -> float:
        """Memory of the server and all that it started; a page that several share counts once."""
        return sum(_memory_mb(pid) for pid in _tree(self.process.pid))

    def processes(self) -> str:
        """What each of its processes takes."""
        return ", ".join(f"{pid}: {_memory_mb(pid):.0f}" for pid in _tree(self.process.pid))

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()


def _tree(pid: int) -> list[int]:
    found, left = [], [pid]
    while left:
        pid = left.pop()
        found.append(pid)
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                left += map(int, path.read_text().split())
    return found


def _memory_mb(pid: int) -> float:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024
    return 0.0


class Load:
    """The neighbours' streams."""

    def __init__(self, base: str, session: aiohttp.ClientSession) -> None:
        self._base, self._session = base, session
        self.gaps: list[float] = []
        self.failures = 0

    async def stream(self) -> None:
        """Generate without end, noting the time between tokens."""
        body = {"prompt": "Count:", "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 1.0}
        while True:
            last = None
            async with self._session.post(f"{self._base}/v1/completions", json=body) as reply:
                self.failures += reply.status != 200
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            self.gaps.append(now - last)
                        last = now

    async def fill(self) -> None:
        """Have every page of the KV pool written once."""
        for number in range(2 * KV_TOKENS // FILLING):
            body = {"prompt": [(number * 7 + i) % 250 for i in range(FILLING)], "max_tokens": 1}
            async with self._session.post(f"{self._base}/v1/completions", json=body) as reply:
                self.failures += reply.status != 200

    async def hostile(self, fields: dict[str, Any]) -> tuple[float, str]:
        """Send one; returns the time of its answer, and what it was."""
        body = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 24, "temperature": 1.0, **fields}
        began = time.perf_counter()
        try:
            url = f"{self._base}/v1/chat/completions"
            async with self._session.post(url, json=body, timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as reply:
                made = await reply.json()
                outcome = f"{reply.status}"
                if reply.status == 200:
                    outcome += f" {made['choices'][0].get('structured_output', {}).get('enforcement')}"
                else:
                    outcome += f" {made['error'].get('code')}"
        except (TimeoutError, aiohttp.ClientError) as error:
            outcome = type(error).__name__
        return time.perf_counter() - began, outcome


def p99_ms(gaps: list[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return statistics.quantiles(gaps, n=100)[98] * 1e3 if len(gaps) > 1 else 0.0


async def run(server: Server, rest_s: float, only: list[str]) -> None:
    """Measure; prints the table."""
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            with suppress(aiohttp.ClientError):
                if (await session.get(f"{server.base}/health")).status == 200:
                    break
            await asyncio.sleep(0.2)
        else:
            sys.exit("hostile.py: the server did not start within two minutes")
        load = Load(server.base, session)
        for fields in ORDINARY:
            await load.hostile(fields)
        await load.fill()
        before, processes = server.memory_mb(), server.processes()
        tasks = [asyncio.create_task(load.stream()) for _ in range(NUM_STREAMS)]
        await asyncio.sleep(QUIET_S)
        quiet, load.gaps = p99_ms(load.gaps), []
        answers = {}
        for name, fields in bodies().items():
            if not only or any(text in name for text in only):
                answers[name] = await load.hostile(fields)
                print(f"{answers[name][0]:7.2f} s  {answers[name][1]:32} {name}", flush=True)
        loaded = p99_ms(load.gaps)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        at_once = server.memory_mb()
        await asyncio.sleep(rest_s)
        print(f"{len(answers)} kinds; slowest answer {max(seconds for seconds, _ in answers.values()):.2f} s; ", end="")
        print(f"{sum(seconds > 6 for seconds, _ in answers.values())} over 6 s; failed streams {load.failures}")
        print(f"gaps of the neighbours at p99: {quiet:.1f} ms, then {loaded:.1f} ms: {loaded - quiet:+.1f} ms")
        after = server.memory_mb()
        memory = f"{before:.0f} MB, {at_once:.0f} MB at the end, {after:.0f} MB after {rest_s:.0f} s"
        print(f"memory: {memory}: {after - before:+.0f} MB")
        print(f"by process, before: {processes}; after: {server.processes()}")


def main() -> None:
    """Start a server and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=18734)
    parser.add_argument("--rest", type=float, default=60.0, help="seconds until memory is looked at again")
    parser.add_argument("--only", nargs="*", default=[], help="names, or parts of them")
    arguments = parser.parse_args()
    server = Server(arguments.port)
    try:
        asyncio.run(run(server, arguments.rest, arguments.only))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
