"""What twenty tiny models say, to the last bit: `python tests/guards/bits.py [MODEL …]`.

Random checkpoints in float32 on one thread of the CPU, greedy requests with their log probabilities, each in seven
ways: whole, from the prefix cache, in chunks over small pages, after a retraction, on two ranks in this process, with
drafts, and with a grammar. A line has digests of the tokens and of the bits of their log probabilities.

Bits of floating-point sums are a machine's own, so `bits.json` has digests of tokens, and log probabilities to four
places, which hold within `CLOSE` on any CPU. A way that says what `whole` says is recorded as that. Tokens that a
rounding error could change are not asked for: of some prompts those stand where the second token is farthest behind.
`--changed [REV]` compares all bits with those of another commit, on this machine; `--write` records what is found,
which signs it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).parents[1]
for folder in ("executor", "engine", "models", "server", "guards"):
    sys.path.insert(0, str(TESTS / folder))

MODELS = [
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "minimax_m2", "glm4_moe",
    "cohere2", "deepseek_v2", "deepseek_v3", "gemma2", "gemma3_text", "gpt_oss", "granite", "olmo2", "phi3",
    "llama4_text",
]  # fmt: skip
RECORD = Path(__file__).with_name("bits.json")
VOCAB, KNOWN = 300, 256
"""Rows of the embedding; ids of the byte tokenizer, of which prompts are made."""
NUM_NEW = 16
CLOSE, NUM_SEEDS = 5e-4, 24
USUAL: dict[str, Any] = {"num_threads": 1, "page_size": 4, "max_running_requests": 8, "max_total_tokens": 2048}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "hit": {},
    "chunked": {"page_size": 3, "chunked_prefill_size": 7},
    "retracted": {"max_running_requests": 5},
    "two ranks": {"tensor_parallel_size": 2},
    "drafts": {"speculator": "ngram"},
    "grammar": {"grammar_backend": "llguidance"},
}
"""Settings of the engine of each way."""
GRAMMAR = "([a-m]{2,5} ?)+[n-z]"
INTRUDER = 30, 6
"""Tokens of the prompt that background requests are retracted for, and the step in which it comes."""


@dataclass
class Said:
    """Tokens of each reply and their log probabilities, and how an engine came to them."""

    ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    apart: float = 9.0
    """Least distance between the two most likely tokens."""
    num_cached: int = 0
    num_retractions: int = 0

    def digests(self) -> tuple[str, str]:
        """Return digests of the tokens, and of the bits of the log probabilities."""
        numbers = [value for row in self.logprobs for value in row]
        return digest(json.dumps(self.ids).encode()), digest(struct.pack(f"<{len(numbers)}d", *numbers))

    def is_close(self, other: Said) -> bool:
        """Return whether another says the same, within what machines may differ by."""
        return self.ids == other.ids and all(
            len(ours) == len(theirs) and all(abs(a - b) <= CLOSE for a, b in zip(ours, theirs, strict=True))
            for ours, theirs in zip(self.logprobs, other.logprobs, strict=True)
        )


def digest(data: bytes) -> str:
    """Return a short digest."""
    return hashlib.sha256(data).hexdigest()[:12]


def prompts(seed: int) -> list[list[int]]:
    """Return prompts of mixed lengths, two with a common beginning."""
    rng = random.Random(seed)
    made = [[rng.randrange(KNOWN) for _ in range(length)] for length in (9, 14, 30, 41)]
    return [*made, made[2][:21] + [rng.randrange(KNOWN) for _ in range(9)]]


def answer(core: Any, asked: Sequence[Sequence[int]], way: str) -> Said:
    """Have an engine answer prompts, all at once; with a grammar one by one, as it is not known when one is ready."""
    if way == "grammar":
        each = [ask(core, [prompt], way) for prompt in asked]
        return Said([one.ids[0] for one in each], [one.logprobs[0] for one in each], min(one.apart for one in each))
    return ask(core, asked, way)


def ask(core: Any, asked: Sequence[Sequence[int]], way: str) -> Said:
    """Have an engine answer prompts at once.

    Raises:
        RuntimeError: A request did not come to its end.
    """
    from dovetail.messages import BACKGROUND, GrammarOption, SamplerParams, Submit

    params = SamplerParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=way != "grammar", logprobs=2)
    options = (GrammarOption(backend="llguidance", kind="regex", source=GRAMMAR),) if way == "grammar" else ()
    said, first = Said([[] for _ in asked], [[] for _ in asked]), core.step_count * 100 + 1
    for place, prompt in enumerate(asked):
        priority = BACKGROUND if way == "retracted" else 0
        core.handle(
            Submit(
                rid="", handle=first + place, prompt_ids=list(prompt), params=params, grammar=options, priority=priority
            )
        )
    num_steps = 0
    while core.has_work:
        if way == "retracted" and num_steps == INTRUDER[1]:
            short = SamplerParams(max_tokens=1, temperature=0.0)
            core.handle(Submit(rid="", handle=first + 99, prompt_ids=[1] * INTRUDER[0], params=short))
        for delta in core.step().deltas:
            if delta.handle != first + 99:
                note(said, delta, delta.handle - first)
        num_steps += 1
    return said


def note(said: Said, delta: Any, place: int) -> None:
    """Add what one step brought.

    Raises:
        RuntimeError: It ended the request before its time.
    """
    if delta.finish is not None and delta.finish.reason not in ("length", "stop"):
        raise RuntimeError(f"a request ended with {delta.finish}")
    said.ids[place] += delta.ids
    for one in delta.logprobs or ():
        said.logprobs[place].append(one.logprob)
        said.apart = min(said.apart, one.top[0].logprob - one.top[1].logprob)
    if delta.finish is not None:
        said.num_cached += delta.cached_tokens
        said.num_retractions += delta.num_retractions


@contextmanager
def engines() -> Iterator[None]:
    """Have engines start in a moment: plugins are looked for once, and further ranks are threads."""
    from rank_engines import ThreadFollower

    from dovetail.client import launch
    from dovetail.executor.group import GroupExecutor
    from dovetail.plugins import Registry

    def grouped(settings: Any, plugins: Any, limit_s: float) -> GroupExecutor:
        return GroupExecutor(settings, plugins, ThreadFollower, limit_s)

    with (
        mock.patch.object(Registry, "scan", return_value=Registry.scan()),
        mock.patch.object(launch, "GroupExecutor", grouped),
    ):
        yield


def make(folder: Path, kind: str) -> None:
    """Write a checkpoint with a tokenizer of bytes."""
    import families
    from server_tiny import write_model

    write_model(folder)
    families.make_checkpoint(folder, kind, vocab_size=VOCAB)


def measure(kind: str, seed: int | None = None) -> tuple[int, dict[str, Said]]:
    """Return what a model says in each way, and the seed of its prompts; without one the best.

    Raises:
        RuntimeError: A way was not taken: nothing was cached, or retracted.
    """
    found: dict[str, Said] = {}
    with tempfile.TemporaryDirectory() as name, engines():
        folder = Path(name)
        make(folder, kind)
        if seed is None:
            with engine(folder, "whole") as core:
                seed = max(range(NUM_SEEDS), key=lambda at: ask(core, prompts(at), "whole").apart)
        for way in WAYS:
            with engine(folder, way) as core:
                if way == "hit":
                    ask(core, prompts(seed), way)
                found[way] = answer(core, prompts(seed), way)
    if found["hit"].num_cached <= found["whole"].num_cached or not found["retracted"].num_retractions:
        raise RuntimeError(f"{kind}: nothing was taken from the cache, or nothing retracted")
    return seed, found


@contextmanager
def engine(folder: Path, way: str) -> Iterator[Any]:
    """Yield an engine with the settings of a way."""
    from dovetail_testing.engine import make_core

    core = make_core(folder, **{**USUAL, **WAYS[way]})
    try:
        yield core
    finally:
        core.close()


def environment() -> dict[str, str]:
    """Return the versions that make the weights."""
    import torch
    import transformers

    return {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}


def to_record(seed: int, found: dict[str, Said]) -> dict[str, Any]:
    """Return what is recorded of a model."""
    rows: dict[str, Any] = {"seed": seed}
    for way, said in found.items():
        if way != "whole" and said.is_close(found["whole"]):
            rows[way] = "as whole"
        else:
            logprobs = [[round(value, 4) for value in row] for row in said.logprobs]
            rows[way] = {"ids": digest(json.dumps(said.ids).encode()), "logprobs": logprobs}
    return rows


def line_of(kind: str, way: str, said: Said) -> str:
    """Return what is printed; with a grammar tokens alone, as how many a step takes depends on when masks are ready."""
    tokens, bits = said.digests()
    return f"{kind}, {way}: tokens {tokens}" + ("" if way == "grammar" else f", bits {bits}")


def write(models: dict[str, Any]) -> None:
    """Record what models say, a line for each."""
    rows = ",\n".join(f"  {json.dumps(kind)}: {json.dumps(models[kind])}" for kind in MODELS if kind in models)
    text = f'{{\n "environment": {json.dumps(environment())},\n "models": {{\n{rows}\n }}\n}}\n'
    RECORD.write_text(text, "utf-8")


def differing(record: dict[str, Any], found: dict[str, Said]) -> list[str]:
    """Return the ways that say something else than is on record."""
    return [
        way
        for way, said in found.items()
        if not holds(record["whole"] if record[way] == "as whole" else record[way], said)
    ]


def holds(record: dict[str, Any], said: Said) -> bool:
    """Return whether tokens are those on record, and log probabilities close to them."""
    return record["ids"] == said.digests()[0] and said.is_close(Said(said.ids, record["logprobs"]))


def main() -> int:
    """Print the digests, or what differs, or record; exit code 1 where something differs."""
    from revisions import show_changes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="of those in this file; all if not given")
    parser.add_argument("--changed", nargs="?", const="", metavar="REV", help="print what differs from a commit")
    parser.add_argument("--write", action="store_true", help="record what is found")
    args = parser.parse_args()
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {"models": {}}
    lines = []
    for kind in args.models or MODELS:
        seed, found = measure(kind, None if args.write else record["models"][kind]["seed"])
        record["models"][kind] = to_record(seed, found)
        lines += [line_of(kind, way, said) for way, said in found.items()]
    if args.write:
        write(record["models"])
    elif args.changed is not None:
        return show_changes(args.changed, [Path(__file__).name, *args.models], lines)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
