"""Captured decode steps of a Llama-3.1-8B with random weights, plain and quantised; see `main`.

A GPU: `python tests/benchmarks/quant_steps.py`. Printed for each number of rows: microseconds a step, tokens/s.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from skinny import step_us

from dovetail_testing.engine import make_core

DEVICE = "cuda"
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def main() -> None:
    """Measure each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="*", default=["none", "fp8", "int4"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 16, 64])
    parser.add_argument("--seconds", type=float, default=240, help="no further way is started after so long")
    args = parser.parse_args()
    until = time.perf_counter() + args.seconds
    for way in args.ways:
        begin = time.perf_counter()
        if begin > until:
            print(f"{way}: no time left")
            continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
            settings: dict[str, Any] = {"quantization": way} if way != "none" else {}
            settings |= {"device": DEVICE, "dtype": "bfloat16", "load_format": "dummy", "max_total_tokens": 20_000}
            core = make_core(Path(folder), **settings, max_running_requests=max(args.rows))
        took = time.perf_counter() - begin
        times = {rows: step_us(core, rows) for rows in args.rows}
        line = ", ".join(f"{rows} rows {us:.0f} us ({rows / us * 1e6:.0f} tok/s)" for rows, us in times.items())
        print(f"{way}: {line}; started in {took:.0f} s, {torch.cuda.memory_allocated() / 1e9:.1f} GB", flush=True)
        core.close()
        del core
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
