"""Decode steps of models for four and eight GPUs, simulated: `python tests/benchmarks/large_steps.py`.

The simulation counts what a rank reads in a step from the published sizes (`large_shapes.py`) and samples at random
which experts a step needs. Its times were measured on four H200 (docs/benchmarks-large-models.md, `large_runs.py`):

- reading at 4.20 TB/s, an H200's own copy, or `--bandwidth`;
- an all-reduce with the addition and the norm behind it, for 1 to 256 rows of 4,096 numbers. Extrapolated to more
  ranks: the least that it takes grows by 0.9 us a rank, as it did from two to four; the rest grows with the bytes that
  a rank sends;
- every other launch, and the bandwidth that experts are read at: fitted to the six engines that ran there, which they
  explain within 8 % at one stream and at 64.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from large_shapes import NUM_RANKS, SHAPES, write_shape
from rich.console import Console
from rich.table import Table

SUM_WIDTH = 4096
OWNERS_BYTES = 256 << 10
"""From which on more than two ranks add a row once (`kernels/triton/peer_sum.py`)."""
STREAMS = (1, 64)
OTHER_LAUNCHES = 18
"""Of a step of one stream, beside its layers and all-reduces: the head, sampling, small copies."""
CONTEXT = {1: 292, 64: 640}
"""Tokens that a stream has in the middle of the standard suite's `single` and `c64`."""
DRAWS = 200


@dataclass(frozen=True)
class Times:
    """What the parts of a step take.

    Attributes:
        bandwidth: Bytes a second.
        sum_us: An all-reduce, by rows of 4,096 numbers of 16 bits.
        ranks: Over so many.
        rank_us: What each further rank adds to the least of these.
        launch_us: A launch beside reading, by streams. 64 streams launch up to twice as many kernels as are counted.
        experts_share: Of the bandwidth, that experts are read at, by streams.
    """

    bandwidth: float = 4.20e12
    sum_us: Mapping[int, float] = field(default_factory=lambda: {1: 5.1, 4: 5.2, 16: 6.9, 64: 20.9, 256: 45.8})
    ranks: int = 4
    rank_us: float = 0.9
    launch_us: Mapping[int, float] = field(default_factory=lambda: {1: 2.7, 64: 4.3})
    experts_share: Mapping[int, float] = field(default_factory=lambda: {1: 0.56, 64: 0.50})


PAPER = Times()


@dataclass(frozen=True)
class Held:
    """Bytes that one rank holds of a model; all ranks have as many.

    `near_token` is the part of a token's cache in layers that look back `window` tokens.

    Attributes:
        num_params: Weights of the whole model, in numbers.
        embedding: Of which a step reads a few rows.
        always: What every step reads: attention, norms, routers, shared experts, dense layers, the output head.
        expert: This rank's part of one expert that it has: a share by width, or all of it.
        num_experts: How many of a layer it has.
        num_sparse: Layers with experts.
        cache_token: Keys and values of a token.
    """

    num_params: int
    embedding: float
    always: float
    expert: float
    num_experts: int
    num_sparse: int
    cache_token: int
    near_token: int = 0
    window: int = 0

    @property
    def weights(self) -> float:
        """All of them."""
        return self.embedding + self.always + self.expert * self.num_experts * self.num_sparse

    def cached(self, context: int) -> int:
        """What a stream of so many tokens reads of its keys and values."""
        return context * (self.cache_token - self.near_token) + min(context, self.window) * self.near_token


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts of a layer; 0: there are none."""
    keys = ("n_routed_experts", "num_experts", "num_local_experts")
    return int(next((config[key] for key in keys if key in config), 0))


def is_divided(config: Mapping[str, Any], ranks: int, *, whole: bool) -> bool:
    """Whether ranks can have whole experts, or shares of their width: no cut may go through a scale's inputs."""
    method = config.get("quantization_config", {}).get("quant_method")
    unit = {"fp8": 128, "mxfp4": 32}.get(method, 1)
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    return (whole or inner // ranks % unit == 0) if num_experts(config) else not whole


def stored(config: Mapping[str, Any], *, is_expert: bool) -> Callable[[int, int], float]:
    """Return what a matrix of so many outputs and inputs takes, as it lies in memory on a GPU."""
    quantised = config.get("quantization_config", {})
    method, form = quantised.get("quant_method"), quantised.get("format")
    if method == "fp8":  # scales of blocks are kept by row, as kernels read them
        return lambda num_out, num_in: num_out * num_in + 4 * num_out * num_in / 128
    if form == "float-quantized":
        return lambda num_out, num_in: num_out * num_in + 4 * num_out
    if form == "pack-quantized" and is_expert:
        return lambda num_out, num_in: num_out * num_in / 2 + 2 * num_out * num_in / 32
    if method == "mxfp4" and is_expert:  # with a bias in bfloat16
        return lambda num_out, num_in: num_out * num_in / 2 + num_out * num_in / 32 + 2 * num_out
    return lambda num_out, num_in: 2 * num_out * num_in


def attention(config: Mapping[str, Any], ranks: int) -> tuple[int, float, int]:
    """Weights of a layer's attention: in numbers of the whole model, in bytes on a rank; and its cache of a token."""
    of, hidden, heads = stored(config, is_expert=False), config["hidden_size"], config["num_attention_heads"]
    mine = heads // ranks
    if "kv_lora_rank" in config:
        row, low = config["kv_lora_rank"], config["q_lora_rank"]
        nope, turned, wide = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
        numbers = low * hidden + heads * (nope + turned) * low + (row + turned) * hidden
        numbers += heads * (nope + wide) * row + hidden * heads * wide + low + row
        taken = of(low, hidden) + of(mine * (nope + turned), low) + of(row + turned, hidden)
        taken += 2 * mine * (nope + wide) * row + of(hidden, mine * wide) + 2 * (low + row)
        return numbers, taken, 2 * (row + turned)
    keys, width = config["num_key_value_heads"], config["head_dim"]
    own = max(1, keys // ranks)
    is_normed = config.get("use_qk_norm", config["model_type"] == "qwen3_moe")
    numbers = 2 * (heads + keys) * width * hidden
    taken = of((mine + 2 * own) * width, hidden) + of(hidden, mine * width)
    if is_normed:  # two vectors in the checkpoint, one for each head in memory
        numbers += 2 * width
        taken += 2 * (mine + own) * width
    if config["attention_bias"]:
        numbers += (heads + 2 * keys) * width
        taken += 2 * (mine + 2 * own) * width
    if "sliding_window" in config:  # gpt-oss: a bias behind attention, and a sink for each head
        numbers += hidden + heads
        taken += 2 * hidden + 4 * mine
    return numbers, taken, 2 * 2 * own * width


def held(config: Mapping[str, Any], ranks: int, *, whole: bool) -> Held:
    """Count what a rank holds of a model.

    Args:
        config: Its `config.json`.
        ranks: How many there are.
        whole: Whether they have whole experts each, or a share of the width of every one.
    """
    of, of_expert = stored(config, is_expert=False), stored(config, is_expert=True)
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    experts = num_experts(config)
    first = config.get("first_k_dense_replace", 0) if experts else layers
    inner, dense = config.get("moe_intermediate_size", config["intermediate_size"]) if experts else 0, 0.0
    biased = int("sliding_window" in config)
    shared, sparse = inner * config.get("n_shared_experts", 0), layers - first
    of_attention, taken, cache = attention(config, ranks)

    def gated(of: Callable[[int, int], float], width: int) -> float:
        return of(2 * width, hidden) + of(hidden, width) if width else 0.0

    numbers = layers * (of_attention + 2 * hidden) + 2 * vocab * hidden + hidden
    numbers += sparse * (hidden * (experts + 3 * inner * experts + 3 * shared))
    numbers += sparse * biased * experts * (1 + 2 * inner + hidden)
    always = layers * (taken + 4 * hidden) + 2 * hidden
    always += sparse * (2 * experts * (hidden + biased) + gated(of, shared // ranks))
    if first:
        numbers += first * 3 * hidden * config["intermediate_size"]
        dense = first * gated(of, config["intermediate_size"] // ranks)
    table = 2.0 * -(-vocab // ranks) * hidden
    return Held(
        num_params=numbers,
        embedding=table,
        always=always + dense + table,
        expert=gated(of_expert, inner if whole else inner // ranks),
        num_experts=experts // ranks if whole else experts,
        num_sparse=sparse,
        cache_token=layers * cache,
        near_token=cache * config.get("layer_types", []).count("sliding_attention"),
        window=config.get("sliding_window", 0),
    )


def chosen(config: Mapping[str, Any], rng: random.Random) -> list[int]:
    """Draw the experts of a token: of the best groups only, where there are groups."""
    experts = num_experts(config)
    groups, best = config.get("n_group", 1), config.get("topk_group", 1)
    each = experts // groups
    allowed = [group * each + index for group in rng.sample(range(groups), best) for index in range(each)]
    return rng.sample(allowed, config["num_experts_per_tok"])


def experts_read(config: Mapping[str, Any], ranks: int, streams: int) -> tuple[float, float, float]:
    """Experts of a layer that a step needs.

    Returns:
        All of them; those of the rank that has most where each has some that stand side by side, as ours do; and where
        they are dealt out in turn.
    """
    rng, experts = random.Random(streams), num_experts(config)
    if not experts:
        return 0.0, 0.0, 0.0
    each, total, most, dealt = experts // ranks, 0, 0, 0
    for _ in range(DRAWS):
        needed = {expert for _ in range(streams) for expert in chosen(config, rng)}
        total += len(needed)
        most += max(Counter(expert // each for expert in needed).values())
        dealt += max(Counter(expert % ranks for expert in needed).values())
    return total / DRAWS, most / DRAWS, dealt / DRAWS


def launches(config: Mapping[str, Any]) -> int:
    """Count the launches of a step of one stream without its all-reduces; profiles have as many, or 10 more."""
    of_attention = 8 if "kv_lora_rank" in config else 3
    experts, layers = num_experts(config), int(config["num_hidden_layers"])
    dense = int(config.get("first_k_dense_replace", 0)) if experts else layers
    sparse = 3 + 3 * bool(config.get("n_shared_experts"))  # router and two; two shared ones and an addition
    sparse += stored(config, is_expert=True)(64, 64) < 64 * 64  # integers of the rows, for words of four bits
    return layers * of_attention + dense * 2 + (layers - dense) * sparse + OTHER_LAUNCHES


def sum_us(rows: int, width: int, ranks: int, times: Times = PAPER) -> float:
    """Return what an all-reduce takes: between the measured sizes on a line, for more ranks by what each sends."""
    size = rows * width / SUM_WIDTH
    known = sorted(times.sum_us)
    at = next((n for n, end in enumerate(known[1:]) if size <= end), len(known) - 2)
    low, high = known[at], known[at + 1]
    slope = (times.sum_us[high] - times.sum_us[low]) / (high - low)
    least = times.sum_us[known[0]]
    grown = max(0.0, times.sum_us[low] + slope * (size - low) - least)
    least += times.rank_us * (ranks - times.ranks)
    if ranks > 2 and 2 * rows * width >= OWNERS_BYTES:
        return least + grown * (1 - 1 / ranks) / (1 - 1 / times.ranks)
    return least + grown * (ranks - 1) / (times.ranks - 1)


def step(config: Mapping[str, Any], ranks: int, streams: int, *, whole: bool, times: Times = PAPER) -> dict[str, float]:
    """What a step of so many streams takes, in microseconds, and what that comes to.

    `floor` is what an even share of all reads takes, `reads` those of the rank that reads most; `bound` is the share of
    the floor that these and the sums leave, and `guess` with all else that a step has.
    """
    one, layers = held(config, ranks, whole=whole), config["num_hidden_layers"]
    needed, most, dealt = experts_read(config, ranks, streams)
    expert = 1e6 * one.num_sparse * one.expert / times.bandwidth
    others = 1e6 * (one.always + streams * one.cached(CONTEXT[streams])) / times.bandwidth
    floor = others + expert * (needed / ranks if whole else needed)
    experts = expert * (most if whole else needed)
    reads = others + experts
    sums = (2 * layers + 1) * sum_us(streams, config["hidden_size"], ranks, times)
    num_launches = launches(config)
    beside = num_launches * times.launch_us[streams]
    guess = others + experts / times.experts_share[streams] + sums + beside
    return {
        "floor_us": floor, "others_us": others, "reads_us": reads, "sums_us": sums, "beside_us": beside,
        "launches": num_launches, "guess_us": guess,
        "floor_tok_s": 1e6 * streams / floor, "guess_tok_s": 1e6 * streams / guess,
        "sums_share": sums / (reads + sums), "bound": floor / (reads + sums), "guess": floor / guess,
        "uneven": most * ranks / needed if whole else 1.0, "dealt": dealt * ranks / needed if whole else 1.0,
    }  # fmt: skip


def measured_parts(found: Mapping[str, Any]) -> Times:
    """Return bandwidth and sums as `large_runs.py` has written them; what it did not measure is as on paper."""
    rows = [row for row in found.get("sums", {}).get("rows", ()) if row["KB"] == row["rows"] * SUM_WIDTH * 2 / 1024]
    times = replace(PAPER, bandwidth=found["copy"].get("bytes_per_s", PAPER.bandwidth))
    if len(rows) < 2:
        return times
    return replace(times, sum_us={row["rows"]: row["norm_us"] for row in rows}, ranks=found["ranks"])


def measured(found: Mapping[str, Any]) -> Times:
    """Return those, and what fits best to the engines that ran: a launch, and the share that experts are read at.

    The fit makes relative errors of all steps least in squares. With fewer than three steps, or steps that do not tell
    both apart, both are as on paper.
    """
    times = measured_parts(found)
    for streams in STREAMS:
        parts, left = [], []
        for at, one in found["steps"].items():
            kind, name, *ways = at.split(":")
            if kind != "serve" or f"tok_s_{streams}" not in one:
                continue
            took = 1e6 * streams / one[f"tok_s_{streams}"]
            paper = step(SHAPES[name], found["ranks"], streams, whole="whole" in ways, times=times)
            parts.append([(paper["reads_us"] - paper["others_us"]) / took, paper["launches"] / took])
            left.append(1 - (paper["others_us"] + paper["sums_us"]) / took)
        if len(parts) < 3 or np.linalg.matrix_rank(parts) < 2:
            continue
        (slower, launch), *_ = np.linalg.lstsq(np.array(parts), np.array(left), rcond=None)
        times = replace(
            times,
            launch_us={**times.launch_us, streams: float(launch)},
            experts_share={**times.experts_share, streams: float(1 / slower)},
        )
    return times


def rows(times: Times = PAPER, ranks: Mapping[str, int] = NUM_RANKS) -> list[dict[str, Any]]:
    """Every shape, by width and with whole experts, at one stream and at 64."""
    found = []
    for name, config in SHAPES.items():
        for whole in (whole for whole in (False, True) if is_divided(config, ranks[name], whole=whole)):
            one = held(config, ranks[name], whole=whole)
            found.append(
                {
                    "model": name, "ranks": ranks[name], "experts": "whole" if whole else "by width",
                    "weights_gib": one.weights / 2**30, "cache_kib": one.cache_token / 1024,
                    "steps": {num: step(config, ranks[name], num, whole=whole, times=times) for num in STREAMS},
                }
            )  # fmt: skip
    return found


def show(found: list[dict[str, Any]], times: Times) -> None:
    """Print a table."""
    parts = f"{times.bandwidth / 1e12:.2f} TB/s; sums over {times.ranks} ranks: {dict(times.sum_us)} us; "
    parts += f"a launch: {dict(times.launch_us)} us; experts at {dict(times.experts_share)} of the bandwidth"
    table = Table(title="on paper, from: " + parts)
    names = {"floor_tok_s": "floor", "sums_share": "sums", "uneven": "uneven", "dealt": "dealt", "bound": "bound"}
    names |= {"guess_tok_s": "guess", "guess": "of floor"}
    for name in ("model", "ranks", "experts", "GiB", "KiB/token"):
        table.add_column(name)
    for num in STREAMS:
        for shown in names.values():
            table.add_column(f"{num}: {shown}")
    for row in found:
        cells = [
            row["model"],
            str(row["ranks"]),
            row["experts"],
            f"{row['weights_gib']:.2f}",
            f"{row['cache_kib']:.1f}",
        ]
        for one in row["steps"].values():
            cells += [f"{one[name]:,.0f}" if name.endswith("tok_s") else f"{one[name]:.2f}" for name in names]
        table.add_row(*cells)
    Console(width=200).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, help="write a folder with each shape's config.json, for `dovetail plan`")
    parser.add_argument("--bandwidth", type=float, help="bytes a second of a GPU's memory")
    parser.add_argument("--measured", type=Path, help="results.json of large_runs.py, from which times are taken")
    parser.add_argument("--ranks", type=int, help="as many for all shapes")
    wish = parser.parse_args()
    for name in SHAPES if wish.write is not None else ():
        print(write_shape(wish.write / name, name))
    times = PAPER if wish.measured is None else measured(json.loads(wish.measured.read_text()))
    times = times if wish.bandwidth is None else replace(times, bandwidth=wish.bandwidth)
    found = rows(times, NUM_RANKS if wish.ranks is None else dict.fromkeys(SHAPES, wish.ranks))
    show(found, times)
    if wish.json is not None:
        wish.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
