"""The price of `--batch-invariant`.

    python tests/benchmarks/batch_invariance.py [MODEL] [--device cuda] [--quantization fp8] [--streams 1 64]

Engines with and without it, one after the other and then again, in this process: greedy replies of 128 tokens to
prompts of 200 token ids, warm. A line gives tokens a second of both rounds, the prompts' part included.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from dovetail.demo import MODEL_DIR
from dovetail.messages import SamplerParams, Submit
from dovetail_testing.engine import collect, make_client, tokens

PROMPT, NEW = 200, 128


async def rates(args: argparse.Namespace, *, invariant: bool) -> dict[int, float]:
    """Tokens a second by number of streams; prompts differ, so that nothing is cached."""
    client = make_client(
        args.model, device=args.device, dtype=args.dtype, max_total_tokens=None, batch_invariant=invariant,
        load_format=args.load_format, quantization=args.quantization, mem_fraction_static=0.4,
        disable_compile_ahead=False, disable_radix_cache=True,
    )  # fmt: skip
    await client.start()
    params, found = SamplerParams(temperature=0, max_tokens=NEW, ignore_eos=True), {}
    try:
        for num in (min(args.streams), *args.streams):  # the first time is for warming up
            submits = [
                Submit(
                    rid=f"{num}-{i}-{time.time()}",
                    prompt_ids=[5 + (7 * i + j) % 150 for j in range(PROMPT)],
                    params=params,
                )
                for i in range(num)
            ]
            started = time.perf_counter()
            replies = await asyncio.gather(*(collect(client, submit) for submit in submits))
            found[num] = sum(len(tokens(reply)) for reply in replies) / (time.perf_counter() - started)
    finally:
        await client.close()
    return found


def main() -> None:
    """One line for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=MODEL_DIR)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    args = parser.parse_args()
    rounds = [asyncio.run(rates(args, invariant=invariant)) for invariant in (False, True, False, True)]
    for num in args.streams:
        plain, same = ([found[num] for found in rounds[start::2]] for start in (0, 1))
        shown = [" and ".join(f"{rate:.0f}" for rate in each) for each in (plain, same)]
        print(f"{num} streams: {shown[0]} tok/s, batch-invariant {shown[1]}: {max(same) / max(plain):.2f}", flush=True)


if __name__ == "__main__":
    main()
