"""What states in fewer bits lose: `python tests/benchmarks/state_loss.py`.

Tiny random models of Qwen3.5, dense and with experts, whose decays are weak as those of trained models are, over 3,000
random tokens: the mean change of a token's log probability against states in float32. Prompts are folded in pieces of
64 tokens and rounded behind each; with `--batch-invariant` behind each token, as where tokens are decoded.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from pathlib import Path

from dovetail.messages import SamplerParams
from dovetail_testing.engine import generate

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from delta_models import make_delta

LENGTH = 3000


def main() -> None:
    """Print a line for each dtype."""
    rng = random.Random(9)
    prompt = [rng.randrange(5, 130) for _ in range(LENGTH)]
    params = SamplerParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    for kind in ("qwen3_5_text", "qwen3_5_moe_text"):
        with tempfile.TemporaryDirectory() as name:
            make_delta(folder := Path(name), kind, max_position_embeddings=2 * LENGTH)
            for where, is_apart in (("piece", False), ("token", True)):

                def log_probs(dtype: str, *, apart: bool = is_apart, model: Path = folder) -> list[float]:
                    found = generate(model, [prompt], params, state_dtype=dtype, batch_invariant=apart)[0]
                    return [one.logprob or 0.0 for delta in found for one in delta.prompt_logprobs or ()]

                want = log_probs("float32")
                for dtype in ("float16", "bfloat16"):
                    off = [abs(a - b) for a, b in zip(log_probs(dtype), want, strict=True)]
                    print(f"{kind}, rounded behind each {where}, {dtype}: {statistics.mean(off):.6f}", flush=True)


if __name__ == "__main__":
    main()
