"""What a rank does with names before it reads weights: `python tests/benchmarks/large_names.py [deepseek-v3 kimi-k2]`.

Headers are made up from the published sizes (`large_shapes.py`), of 90,000 and 208,000 tensors; neither files nor
memory are needed. Seconds of processor time for what becomes of each tensor, which matrices are packed, and the places.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from large_shapes import NUM_RANKS, SHAPES

from dovetail.contracts.checkpoint import TensorHeader
from dovetail.contracts.layers import BuildContext, Parallel
from dovetail.plugins import Registry
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.runtime.checkpoint.files import Checkpoint
from dovetail.runtime.checkpoint.quantization import convert, factory_of, widths_of
from dovetail.runtime.checkpoint.weight_match import match_weights
from dovetail.runtime.checkpoint.weights import model_layers
from dovetail_testing.targets import target_for

FOLDER = Path("made-up")
MODELS = ("deepseek-v3", "kimi-k2")


def matrices(config: Mapping[str, Any]) -> Iterator[tuple[str, int, int, bool]]:
    """Name, outputs and inputs of every matrix that may be packed, and whether it is an expert's."""
    hidden, heads, inner = config["hidden_size"], config["num_attention_heads"], config["moe_intermediate_size"]
    low, row, turned = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, wide = config["qk_nope_head_dim"], config["v_head_dim"]

    def gated(name: str, width: int, *, is_expert: bool = False) -> Iterator[tuple[str, int, int, bool]]:
        yield from ((f"{name}.{half}_proj", width, hidden, is_expert) for half in ("gate", "up"))
        yield f"{name}.down_proj", hidden, width, is_expert

    for layer in range(config["num_hidden_layers"]):
        at, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        yield f"{at}.q_a_proj", low, hidden, False
        yield f"{at}.q_b_proj", heads * (nope + turned), low, False
        yield f"{at}.kv_a_proj_with_mqa", row + turned, hidden, False
        yield f"{at}.kv_b_proj", heads * (nope + wide), row, False
        yield f"{at}.o_proj", hidden, heads * wide, False
        if layer < config["first_k_dense_replace"]:
            yield from gated(mlp, config["intermediate_size"])
            continue
        yield from gated(f"{mlp}.shared_experts", inner)
        for expert in range(config["n_routed_experts"]):
            yield from gated(f"{mlp}.experts.{expert}", inner, is_expert=True)


def vectors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type of every other tensor."""
    hidden, experts = config["hidden_size"], config["n_routed_experts"]
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", (config["vocab_size"], hidden), "BF16"
    yield "model.norm.weight", (hidden,), "BF16"
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield from ((f"{at}.{name}_layernorm.weight", (hidden,), "BF16") for name in ("input", "post_attention"))
        yield f"{at}.self_attn.q_a_layernorm.weight", (config["q_lora_rank"],), "BF16"
        yield f"{at}.self_attn.kv_a_layernorm.weight", (config["kv_lora_rank"],), "BF16"
        if layer >= config["first_k_dense_replace"]:
            yield f"{at}.mlp.gate.weight", (experts, hidden), "BF16"
            yield f"{at}.mlp.gate.e_score_correction_bias", (experts,), "F32"


def headers(config: Mapping[str, Any]) -> list[TensorHeader]:
    """The headers of a checkpoint, as published."""
    found = [TensorHeader(name, FOLDER, shape, dtype) for name, shape, dtype in vectors(config)]
    is_fp8 = config["quantization_config"]["quant_method"] == "fp8"
    for name, num_out, num_in, is_expert in matrices(config):
        parts: tuple[tuple[str, tuple[int, ...], str], ...] = (("weight", (num_out, num_in), "BF16"),)
        if is_fp8:
            scales = -(-num_out // 128), -(-num_in // 128)
            parts = ("weight", (num_out, num_in), "F8_E4M3"), ("weight_scale_inv", scales, "F32")
        elif is_expert:
            parts = (
                ("weight_packed", (num_out, num_in // 8), "I32"),
                ("weight_scale", (num_out, num_in // 32), "BF16"),
                ("weight_shape", (2,), "I64"),
            )
        found += [TensorHeader(f"{name}.{suffix}", FOLDER, shape, dtype) for suffix, shape, dtype in parts]
    return found


def measure(config: Mapping[str, Any], ranks: int) -> dict[str, float]:
    """Seconds of processor time that a rank's start spends on a model's names, by what it does; and tensors, places."""
    registry, method = Registry.scan(), config["quantization_config"]
    model, chosen = (
        import_planned(as_planned(registry.resolve(kind, which)))
        for kind, which in (("model", config["architectures"][0]), ("quantization", method["quant_method"]))
    )
    facts, seconds = model.config_from_hf(config), {}
    rules, plain = model.weight_map(facts), Checkpoint(FOLDER, headers(config))

    def timed(what: str, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        made = work()
        seconds[what] = time.process_time() - began
        return made

    target, widths = target_for("bfloat16", "cuda"), widths_of(model, facts)
    read = timed("conversions", lambda: convert(plain, chosen, method, rules, widths, target))
    factory = timed("packed matrices", lambda: factory_of(chosen, config, rules, read.headers))
    parallel = Parallel(size=ranks, all_reduce=lambda share: share)
    ctx = BuildContext(device=torch.device("meta"), dtype=torch.bfloat16, factory=factory, parallel=parallel)
    built = timed("building it without memory", lambda: model.build(facts, ctx))
    moves = timed("places", lambda: match_weights(model_layers(built), rules, read.headers, read.folder))
    return {"tensors": len(plain.headers), "moves": len(moves)} | seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all if not given")
    wanted = parser.parse_args().models or MODELS
    if unknown := set(wanted) - set(MODELS):
        parser.error(f"{', '.join(unknown)}: possible: {', '.join(MODELS)}")
    for name in wanted:
        found = measure(SHAPES[name], NUM_RANKS[name])
        shown = ", ".join(f"{what} {took:.1f} s" for what, took in found.items() if what not in ("tensors", "moves"))
        print(f"{name}: {found['tensors']:,.0f} tensors; {shown}", flush=True)


if __name__ == "__main__":
    main()
