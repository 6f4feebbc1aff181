"""What a cache in 8 bits loses: `python tests/benchmarks/cache_loss.py [TEXT …]`.

Two tables. Attention over random keys and values, some of whose channels are larger, against the same in float64 of
what was not rounded. And the demo model, or `--model DIR`, over texts, by default of its own: its log probabilities
with the cache in 8 bits against those with the cache in its own dtype. All tokens see rounded keys and values.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from dovetail import LLM, SamplingParams
from dovetail.contracts.attention import AttentionLayer
from dovetail.contracts.config import dense_layers
from dovetail.sdk.cache import DTYPES, rounded
from dovetail_testing.conformance.attention_reference import attend

BEGINNINGS = ("Once upon a time", "The capital of", "The days of the week are", "A cat", "One plus two", "My friend")
SHAPES = ((64, 14, 2), (128, 32, 8), (256, 8, 4))
LENGTH, QUERIES = 1024, 64


def of_attention() -> None:
    """Print the relative error of attention over random numbers."""
    print("| head dim, outliers | bfloat16 | int8 | fp8 |\n|---|---|---|---|")
    for dim, heads, kv_heads in SHAPES:
        for outliers in (1, 20):
            torch.manual_seed(0)
            factors = torch.where(torch.arange(dim) % 32 == 5, float(outliers), 1.0)
            q = torch.randn(QUERIES, heads, dim) / factors
            k, v = (torch.randn(LENGTH, kv_heads, dim) * factor for factor in (factors, 1.0))
            spec = dense_layers(1, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim)[0]
            layer = AttentionLayer.of(spec)
            want = attend(q, k, v, layer)
            errors = []
            for dtype in (None, *DTYPES.values()):
                some = (x.bfloat16().float() if dtype is None else rounded(x, dtype) for x in (k, v))
                errors.append(float((attend(q, *some, layer) - want).norm() / want.norm()))
            print(f"| {dim}, {outliers}x | " + " | ".join(f"{error:.2%}" for error in errors) + " |")


def drawn(model: str | None) -> list[str]:
    """Return texts that the model draws itself."""
    with LLM(model, max_total_tokens=16384) as llm:
        params = [SamplingParams(temperature=1, max_tokens=400, seed=seed, ignore_eos=True) for seed in range(4)]
        asked = [(text, one) for text in BEGINNINGS for one in params]
        replies = llm.generate([text for text, _ in asked], [one for _, one in asked])
    return [text + reply.text for (text, _), reply in zip(asked, replies, strict=True)]


def log_probs(texts: list[str], model: str | None, name: str) -> list[float]:
    """Return the log probability of each token of the texts, the first ones left out."""
    found: list[float] = []
    with LLM(model, kv_cache_dtype=name, max_total_tokens=16384) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        for reply in llm.generate(texts, params):
            found += [token.logprob for token in reply.prompt_logprobs or () if token.logprob is not None]
    return found


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="*", help="files; if none are given, texts that the model draws")
    parser.add_argument("--model")
    parser.add_argument("--characters", type=int, default=4000, help="of each text")
    args = parser.parse_args()
    of_attention()
    texts = [Path(text).read_text("utf-8")[: args.characters] for text in args.texts] or drawn(args.model)
    base = log_probs(texts, args.model, "auto")
    print(f"\n| cache | perplexity over {len(base):,} tokens | mean change of a log probability |\n|---|---|---|")
    for name in ("auto", "int8", "fp8"):
        found = base if name == "auto" else log_probs(texts, args.model, name)
        change = sum(abs(a - b) for a, b in zip(base, found, strict=True)) / len(base)
        print(f"| {name} | {math.exp(-sum(found) / len(found)):.3f} | {change:.4f} |")


if __name__ == "__main__":
    main()
