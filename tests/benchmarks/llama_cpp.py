"""Decode on CPU against llama.cpp, in turns in one run: `python tests/benchmarks/llama_cpp.py --peer PYTHON`.

PYTHON is an interpreter with llama-cpp-python, in an environment of its own, built from source for this machine:

    CMAKE_ARGS=-DGGML_NATIVE=ON PYTHON -m pip install --no-binary llama-cpp-python llama-cpp-python

The checkpoint is made here: the shapes of Qwen2.5-0.5B, random weights, no tokenizer. Dovetail reads it in bf16 or
packs it while it loads (`--quantization`); llama.cpp reads the same weights from a GGUF file written with `gguf`.
Its embeddings, which are the output head too, are Q8_0 in both quantised files, as `llama-quantize` stores tied ones of
this width; ours stay bfloat16. `--no-head` cuts the vocabulary to 1,024 tokens, which leaves the layers to compare.

Our threads wait at barriers as they do when serving, without spinning, unless the environment says otherwise: with
`GOMP_SPINCOUNT=30000` they spin for about a millisecond first, which pays on a machine that does nothing else.

A round is one greedy reply of each side, one after the other, then one of 16 streams of ours. Printed are medians, and
the median of the rounds' ratios with the least and the largest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the engine process has it

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from dovetail.messages import SamplerParams
from dovetail_server.bench.engine import BareEngine
from dovetail_testing.engine import make_plans
from engine import CONFIG_05B

KINDS = {"bf16": (None, Type.BF16), "int8": ("int8", Type.Q8_0), "int4": ("int4", Type.Q4_0)}
"""Our `--quantization`, and llama.cpp's type of a matrix."""
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""llama.cpp's names of what a layer has."""
PROMPT_LEN = 16
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""How OpenMP's threads wait. Set, they are ours; llama.cpp keeps OpenMP's defaults."""


def make_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Write `config.json` and random bfloat16 weights in transformers' names."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    torch.manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns) * 0.02).bfloat16()

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv)):
            tensors[f"{at}self_attn.{name}.weight"] = matrix(rows, hidden)
            tensors[f"{at}self_attn.{name}.bias"] = torch.zeros(rows, dtype=torch.bfloat16)
        tensors[f"{at}self_attn.o_proj.weight"] = matrix(hidden, hidden)
        tensors[f"{at}mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[f"{at}mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[f"{at}mlp.down_proj.weight"] = matrix(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def gguf_name(name: str) -> str:
    """Return what llama.cpp calls a tensor."""
    path, _, suffix = name.removeprefix("model.").rpartition(".")
    if path == "embed_tokens":
        return f"token_embd.{suffix}"
    if path == "norm":
        return f"output_norm.{suffix}"
    _, layer, module = path.split(".", 2)
    return f"blk.{layer}.{NAMES[module]}.{suffix}"


def write_gguf(folder: Path, config: dict[str, Any], kind: Type) -> Path:
    """Write the checkpoint of a folder as a GGUF file whose matrices are of a type; vectors are F32."""
    path = folder / f"{kind.name}.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, tensor in load_file(folder / "model.safetensors").items():
        numbers = tensor.float().numpy()
        if tensor.dim() == 1:
            writer.add_tensor(gguf_name(name), numbers)
            continue
        stored = Type.Q8_0 if kind != Type.BF16 and "embed_tokens" in name else kind
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Ours:
    """Our engine in a process of its own, as it serves."""

    def __init__(self, folder: Path, quantization: str | None, threads: int) -> None:
        settings, plan = make_plans(
            folder, dtype="bfloat16", quantization=quantization, num_threads=threads, disable_radix_cache=True
        )
        self._engine = BareEngine(settings, plan)
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._engine.start())

    def step_s(self, prompts: list[list[int]], num_new: int) -> float:
        """Return the seconds of a step in which all prompts' requests decode."""
        params = SamplerParams(max_tokens=num_new, temperature=0, ignore_eos=True)
        found = self._loop.run_until_complete(self._engine.run(prompts, params)).decode_step_s
        if found is None:
            raise SystemExit("no step in which all requests decoded: ask for more tokens")
        return found

    def close(self) -> None:
        """Stop the engine."""
        self._loop.run_until_complete(self._engine.close())
        self._loop.close()


class Theirs:
    """llama.cpp in a process of its own, under another interpreter.

    It waits as OpenMP does by default, spinning for some milliseconds: it has a barrier behind each operation.
    """

    def __init__(self, python: Path, path: Path, threads: int) -> None:
        command = [python, "-P", Path(__file__).with_name("llama_cpp_peer.py"), path, str(threads)]
        env = {name: value for name, value in os.environ.items() if name not in WAITING}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        self.about = self._read()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise SystemExit("the peer ended: what it printed says why")
        found: dict[str, Any] = json.loads(line)
        return found

    def step_s(self, prompt: list[int], num_new: int) -> float:
        """Return the mean seconds of a decode step of one stream."""
        if self._process.stdin:
            self._process.stdin.write(json.dumps({"prompt": prompt, "num_new": num_new}) + "\n")
            self._process.stdin.flush()
        return float(self._read()["step_s"])

    def close(self) -> None:
        """End its input, and wait."""
        self._process.communicate()


def compare(kind: str, folder: Path, config: dict[str, Any], args: argparse.Namespace) -> tuple[list[str], str]:
    """Return a row of the table, and what llama.cpp says of itself."""
    quantization, stored = KINDS[kind]
    path = write_gguf(folder, config, stored)
    theirs, ours = Theirs(args.peer, path, args.threads), Ours(folder, quantization, args.threads)
    prompts = torch.randint(config["vocab_size"], (16, PROMPT_LEN)).tolist()
    one, many, other = [], [], []
    for turn in range(args.rounds + 1):
        steps = 4 if turn == 0 else args.num_new  # the first turn warms up
        took = ours.step_s(prompts[:1], steps), theirs.step_s(prompts[0], steps), ours.step_s(prompts, steps)
        if turn:
            for times, seconds in zip((one, other, many), took, strict=True):
                times.append(seconds)
    about = f"llama-cpp-python {theirs.about['version']}: {theirs.about['system']}"
    theirs.close()
    ours.close()
    path.unlink()
    ratios = [b / a for a, b in zip(one, other, strict=True)]
    row = [f"{1 / statistics.median(one):.1f}", f"{1 / statistics.median(other):.1f}"]
    row.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return [f"{kind}, {stored.name}", *row, f"{16 / statistics.median(many):.1f}"], about


def main() -> int:
    """Measure each kind and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-new", type=int, default=48, help="tokens of a reply")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-head", action="store_true", help="a vocabulary of 1,024 tokens")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    config = CONFIG_05B | ({"vocab_size": 1024} if args.no_head else {})
    table = Table(title=f"Decode, tok/s, {args.threads} threads, torch {torch.__version__}")
    for name in ("ours, theirs", "ours", "llama.cpp", "ratio (min to max)", "ours, 16 streams"):
        table.add_column(name, justify="left" if name == "ours, theirs" else "right")
    about = ""
    with tempfile.TemporaryDirectory() as scratch:
        make_checkpoint(Path(scratch), config)
        for kind in args.kinds:
            row, about = compare(kind, Path(scratch), config, args)
            table.add_row(*row)
    Console(width=110).print(table)
    print(about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
