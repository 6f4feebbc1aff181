"""Time to the first token with and without a cached prefix: `python tests/benchmarks/prefix.py [--json FILE]`.

A prompt is a prefix of 2,048 tokens and 32 more. Cold prompts each have a prefix of their own; warm ones share one that
was computed before. The two take turns, so that a noisy machine slows both; the engine runs in a process of its own, as
it serves, over random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the engine process does

from dovetail.base.settings import EngineSettings
from dovetail.messages import SamplerParams, Submit
from dovetail.plugins import Registry, make_plan
from dovetail_server.supervision.engine_process import ProcessClient

BASE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "vocab_size": 151936,
}
SHAPES: dict[str, dict[str, Any]] = {
    "60m": {
        "hidden_size": 320,
        "intermediate_size": 1280,
        "num_hidden_layers": 8,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}
"""The second has the shapes of Qwen2.5-0.5B."""


async def measure(folder: Path, prefix_len: int, rounds: int, device: str) -> list[tuple[float, float]]:
    """Return (cold, warm) seconds to the first token of each round."""
    hf = json.loads((folder / "config.json").read_text())
    plan = make_plan(
        Registry.scan(), model=hf["architectures"][0], attention_backend="auto", device=device, checkpoint="dummy"
    )
    settings = EngineSettings(model_path=str(folder), load_format="dummy", device=device)  # type: ignore[arg-type]
    client = ProcessClient(settings, plan, log_level="warning")
    await client.start()
    rng, count = random.Random(0), 0

    def tokens(num: int) -> list[int]:
        return [rng.randrange(hf["vocab_size"]) for _ in range(num)]

    async def first_token(prompt: list[int]) -> tuple[float, int]:
        nonlocal count
        count += 1
        started, seconds, cached = time.perf_counter(), 0.0, 0
        params = SamplerParams(max_tokens=2, temperature=0, ignore_eos=True)
        async for delta in client.submit(Submit(rid=str(count), prompt_ids=prompt, params=params)):
            seconds, cached = seconds or time.perf_counter() - started, delta.cached_tokens
        return seconds, cached

    shared = tokens(prefix_len)
    await first_token(shared + tokens(32))
    found = []
    for _ in range(rounds):
        (cold, none), (warm, cached) = (
            await first_token(tokens(prefix_len + 32)),
            await first_token(shared + tokens(32)),
        )
        if none or cached != prefix_len:
            raise RuntimeError(f"{none} tokens of a cold prompt were cached, and {cached} of a warm one")
        found.append((cold, warm))
    await client.close()
    return found


def main() -> int:
    """Parse flags, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--prefix", type=int, default=2048, help="tokens, a multiple of the page size")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = []
    for name, shape in SHAPES.items():
        if args.shape in (name, "all"):
            with tempfile.TemporaryDirectory() as scratch:
                (Path(scratch) / "config.json").write_text(json.dumps({**BASE, **shape}))
                pairs = asyncio.run(measure(Path(scratch), args.prefix, args.rounds, args.device))
            ratios = [cold / warm for cold, warm in pairs]
            cold, warm = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
            rows.append({"shape": name, "cold_ms": cold, "warm_ms": warm, "ratios": ratios})
            print(
                f"{name}: {args.prefix} + 32 tokens, first token after {cold:.1f} ms cold, {warm:.1f} ms with the "
                f"prefix cached: {statistics.median(ratios):.1f} times as fast ({min(ratios):.1f} to {max(ratios):.1f})"
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
