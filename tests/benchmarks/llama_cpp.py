"""Decode on CPU against llama.cpp, in turns in one run: `python tests/benchmarks/llama_cpp.py --peer PYTHON`.

PYTHON is an interpreter with llama-cpp-python, in an environment of its own, built from source for this machine:

    CMAKE_ARGS=-DGGML_NATIVE=ON PYTHON -m pip install --no-binary llama-cpp-python llama-cpp-python

The checkpoint is made here: the shapes of Qwen2.5-0.5B, random weights, no tokenizer. Dovetail reads it in bf16 or
packs it while it loads (`--quantization`); llama.cpp reads the same weights from a GGUF file written with `gguf`.
Its embeddings, which are the output head too, are Q8_0 in both quantised files, as `llama-quantize` stores tied ones of
this width; ours stay bfloat16, but `--head int8` packs the head of quantised weights. `--no-head` cuts the vocabulary
to 1,024 tokens, which leaves the layers to compare.

Our threads wait at barriers as they do when serving, without spinning, unless the environment says otherwise: with
`GOMP_SPINCOUNT=30000` they spin for about a millisecond first, which pays on a machine that does nothing else.

On a machine that does other work, threads that wait for each other measure that work. `--processor-time` counts what
one thread of each process computes instead.

`--kernels cpu cpu-int8,cpu` measures several choices of kernel sets, each a side of its own in the same rounds.

A round is one greedy reply of each side, one after the other, then 16 streams of each. Printed are medians, and the
median of the rounds' ratios with the least and the largest.
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
import time
from pathlib import Path
from typing import Any, Protocol

from dovetail.base.process_limits import ENGINE_ENVIRONMENT

os.environ.update({**ENGINE_ENVIRONMENT, **os.environ})  # before torch is imported

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from dovetail.messages import SamplerParams, Submit
from dovetail_server.bench.latency import BareEngine
from dovetail_testing.engine import make_core, make_plans
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
PROMPT_LEN, PEER = 16, "llama.cpp"
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


class Side(Protocol):
    """What decodes."""

    def step_s(self, prompts: list[list[int]], num_new: int) -> float:
        """Return the seconds of a step in which all prompts' requests decode."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Ours:
    """Our engine in a process of its own, as it serves."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._engine = BareEngine(*make_plans(folder, **settings))
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._engine.client.start())

    def step_s(self, prompts: list[list[int]], num_new: int) -> float:
        """Return the seconds of a step in which all prompts' requests decode."""
        params = SamplerParams(max_tokens=num_new, temperature=0, ignore_eos=True)
        found = self._loop.run_until_complete(self._engine.run(prompts, params)).decode_step_s
        if found is None:
            raise SystemExit("no step in which all requests decoded: ask for more tokens")
        return found

    def close(self) -> None:
        """Stop the engine."""
        self._loop.run_until_complete(self._engine.client.close())
        self._loop.close()


class OursHere:
    """Our engine's core in this process: what it computes, in processor time."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._core, self._num = make_core(folder, **settings), 0

    def step_s(self, prompts: list[list[int]], num_new: int) -> float:
        """See `Side.step_s`: the mean of all steps but those with the prompts and the last ones."""
        params = SamplerParams(max_tokens=num_new, temperature=0, ignore_eos=True)
        for prompt in prompts:
            self._num += 1
            self._core.handle(Submit(rid=str(self._num), handle=self._num, prompt_ids=prompt, params=params))
        done = 0
        while done < len(prompts):
            done += sum(len(delta.ids) > 0 for delta in self._core.step().deltas)
        started, steps = time.process_time(), num_new - 3
        for _ in range(steps):
            self._core.step()
        took = time.process_time() - started
        while self._core.has_work:
            self._core.step()
        return took / steps

    def close(self) -> None:
        """End it."""
        self._core.close()


class Theirs:
    """llama.cpp in a process of its own, under another interpreter.

    It waits as OpenMP does by default, spinning for some milliseconds: it has a barrier behind each operation.
    """

    def __init__(self, python: Path, path: Path, threads: int, clock: str) -> None:
        self._clock = clock
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

    def step_s(self, prompts: list[list[int]], num_new: int) -> float:
        """See `Side.step_s`."""
        if self._process.stdin:
            asked = {"prompts": prompts, "num_new": num_new, "clock": self._clock}
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        return float(self._read()["step_s"])

    def close(self) -> None:
        """End its input, and wait."""
        self._process.communicate()


def compare(kind: str, folder: Path, config: dict[str, Any], args: argparse.Namespace) -> tuple[list[list[str]], str]:
    """Return rows of the table, one of each choice of kernel sets, and what llama.cpp says of itself."""
    quantization, stored = KINDS[kind]
    path = write_gguf(folder, config, stored)
    threads = 1 if args.processor_time else args.threads
    theirs = Theirs(args.peer, path, threads, "process_time" if args.processor_time else "perf_counter")
    settings = {"dtype": "bfloat16", "quantization": quantization, "num_threads": threads, "disable_radix_cache": True}
    if quantization is not None:
        settings["options"] = {quantization: {"head": args.head}}
    make: Any = OursHere if args.processor_time else Ours
    sides: dict[str, Side] = {each: make(folder, settings | {"kernels": each.split(",")}) for each in args.kernels}
    sides[PEER] = theirs
    prompts = torch.randint(config["vocab_size"], (16, PROMPT_LEN)).tolist()
    times: dict[tuple[str, int], list[float]] = {}
    for turn in range(args.rounds + 1):
        steps = 5 if turn == 0 else args.num_new  # the first turn warms up
        for num in (1, 16):
            for name, side in sides.items():
                times.setdefault((name, num), []).append(side.step_s(prompts[:num], steps))
    about = f"llama-cpp-python {theirs.about['version']}: {theirs.about['system']}"
    for side in sides.values():
        side.close()
    path.unlink()
    rows = []
    for name in args.kernels:
        rows.append([f"{kind}, {stored.name}" if name == "auto" else f"{kind} by {name}, {stored.name}"])
        for num in (1, 16):
            own, other = (times[side, num][1:] for side in (name, PEER))
            ratios = [b / a for a, b in zip(own, other, strict=True)]
            rows[-1] += [f"{num / statistics.median(each):.1f}" for each in (own, other)]
            rows[-1].append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return rows, about


def main() -> int:
    """Measure each kind and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-new", type=int, default=48, help="tokens of a reply")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--head", choices=("model", "int8"), default="model", help="of quantised weights of ours")
    parser.add_argument("--kernels", nargs="*", default=["auto"], help="sets of ours, as serve takes them")
    parser.add_argument("--processor-time", action="store_true", help="of one thread, for busy machines")
    parser.add_argument("--no-head", action="store_true", help="a vocabulary of 1,024 tokens")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    config = CONFIG_05B | ({"vocab_size": 1024} if args.no_head else {})
    clock = "processor time of 1 thread" if args.processor_time else f"{args.threads} threads"
    table = Table(title=f"Decode, tok/s, {clock}, torch {torch.__version__}")
    sides = ("ours", "llama.cpp", "ratio (min to max)")
    for name in ("ours, theirs", *sides, *(f"16: {side}" for side in sides)):
        table.add_column(name, justify="left" if name == "ours, theirs" else "right")
    about = ""
    with tempfile.TemporaryDirectory() as scratch:
        make_checkpoint(Path(scratch), config)
        for kind in args.kinds:
            rows, about = compare(kind, Path(scratch), config, args)
            for row in rows:
                table.add_row(*row)
    Console(width=110).print(table)
    print(about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
