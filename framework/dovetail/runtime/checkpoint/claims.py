"""Holds the sizes that a checkpoint claims against bounds and against the tensors of its files.

`config.json` and the head of a GGUF file may claim any size in a few bytes, and each reaches an allocation, a
`range()` or a loop. `check_claims` reads the parsed file alone, before torch is imported; `check_params` counts what a
plugin made of it, before a layer is built. What the numbers mean to each other is checked in `config_numbers.py`.
Does not import torch.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from dovetail.contracts.errors import ModelError

MAX_LAYERS = 10_000
"""No checkpoint has a tenth of it; specs of so many are made within a second."""
MAX_TOKENS = 1 << 28
"""Maximum of a context, a window or a chunk: 25 times the longest context that is published."""
MAX_WIDTH = 1 << 24
"""Maximum of a width or a count where no file says what there is (dummy weights): 64 times the largest vocabulary."""
FREE_WIDTH = 1 << 16
"""A width up to this needs no tensor as long as itself: not every size is an axis of one."""
MAX_INTEGER = (1 << 31) - 1
"""Maximum of any other whole number."""
MAX_DEPTH = 32
SLACK = 2
"""How often the parameters of a config may exceed the numbers in its files. A plugin that gives no count is estimated
as a dense decoder with its own output head and a gated MLP, at most twice of what such a model has."""

_SIZES = (
    "hidden_size intermediate_size moe_intermediate_size shared_expert_intermediate_size vocab_size type_vocab_size"
)
_DIMS = "head_dim global_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank"
_HEADS = "num_attention_heads num_key_value_heads num_global_key_value_heads num_hidden_layers num_labels"
_EXPERTS = "num_experts num_local_experts n_routed_experts n_shared_experts num_experts_per_tok"
_GROUPS = "num_shared_experts num_experts_per_token n_group num_expert_group topk_group"
_DELTA = "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"
_KIMI = "linear_num_heads linear_head_dim short_conv_kernel_size mamba_num_heads mamba_head_dim n_groups"
_MAMBA = "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_conv ssm_state_size conv_kernel state_size conv_L_cache"
_LENGTHS = "max_position_embeddings sliding_window attention_chunk_size"
WHOLE = frozenset(f"{_SIZES} {_DIMS} {_HEADS} {_EXPERTS} {_GROUPS} {_DELTA} {_KIMI} {_MAMBA} {_LENGTHS}".split())
"""Sizes that are whole numbers, lists of them, or null, whichever plugin reads them."""
LAYERS = re.compile(r"num_(hidden_|decoder_)?layers|n_layers?")
TOKENS = re.compile(r".*(position_embeddings|_window|chunk_size|context_length|window_size)|n_positions|n_ctx")
WIDTH = re.compile(r"(.*_)?(size|dim|rank|heads?|experts|per_tok|labels|embd|inner|d_model|d_ff|d_state|groups?|topk)")
FREE = re.compile(r".*(_ids?|_index|seed|_max_length)|max_length")
"""Whole numbers of any size: nothing is made of that size."""
OTHER_PARTS = ("vision_config", "audio_config", "video_config")
"""Parts of a model of several kinds of input, of which only the text is served."""
_UNREAD = frozenset((*OTHER_PARTS, "quantization_config", "compression_config"))
"""Parts whose sizes are no layer's: what is not served, and how weights are stored."""


class CheckpointContents(NamedTuple):
    """What the files of a checkpoint hold, at most.

    Attributes:
        num_layers: Layers that tensors are numbered by, in all lists of them (two stacks, or blocks of layers).
        longest: The longest row or column of a matrix, in numbers.
        num_numbers: All numbers of all tensors.
    """

    num_layers: int
    longest: int
    num_numbers: int


def held(tensors: Iterable[tuple[str, tuple[int, ...], int]]) -> CheckpointContents:
    """Sum up what files hold.

    Args:
        tensors: Name, shape and numbers that each unit of the shape holds at most (more than one where packed).
    """
    layers: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    longest = total = 0
    for name, shape, each in tensors:
        parts = name.split(".")
        for index, part in enumerate(parts):
            if part.isdecimal():
                numbers = tuple(other for other in parts[: index + 1] if other.isdecimal())
                layers[".".join("#" if other.isdecimal() else other for other in parts[:index])].add(numbers)
        size = math.prod(shape) * each
        total += size
        longest = max(longest, size // max(1, min(shape, default=1)), *shape)
    side_by_side = sum(len(numbers) for prefix, numbers in layers.items() if "#" not in prefix)
    return CheckpointContents(max(side_by_side, max(map(len, layers.values()), default=0)), longest, total)


def check_claims(hf: Mapping[str, Any], files: CheckpointContents | None = None) -> None:
    """Check each number of a config before anything is made of it.

    Args:
        hf: The parsed `config.json`, or what stands for it.
        files: What its files hold; None: they are not read.

    Raises:
        ModelError: A number is no whole number where one belongs, or beyond its bound; it is named.
    """
    for path, value in _leaves(hf):
        if isinstance(value, float) and math.isnan(value):
            raise ModelError(f"config.json: {'.'.join(path)} is not a number (NaN); correct the file")
        if value is None or value is False or not _UNREAD.isdisjoint(path):
            continue  # false is what some files write for none: it is 0
        key, name = path[-1], ".".join(path)
        if key in WHOLE and (type(value) is not int or (value < 0 and not TOKENS.fullmatch(key))):
            raise ModelError(f"config.json: {name} = {_short(value)}; give a whole number, 0 or more")
        if type(value) is int and not FREE.fullmatch(key):
            # Of a part that is no text part (a decoder of audio codes) the checkpoint need not hold layers.
            _check_bound(name, key, value, files, has_layers=len(path) == 1 or "text_config" in path)
    text = hf.get("text_config")
    for part, scope in (("", hf), ("text_config.", text if isinstance(text, Mapping) else {})):
        heads, dim = scope.get("num_attention_heads"), scope.get("head_dim")
        if type(heads) is int and type(dim) is int:
            _check_width(f"{part}num_attention_heads x {part}head_dim", heads * dim, files)


def _check_bound(path: str, key: str, value: int, files: CheckpointContents | None, *, has_layers: bool) -> None:
    if LAYERS.fullmatch(key):
        if not 1 <= value <= MAX_LAYERS:
            raise ModelError(f"config.json: {path} = {value}; a model has from 1 to {MAX_LAYERS:,} layers")
        if has_layers and files is not None and value > files.num_layers:
            raise ModelError(
                f"config.json: {path} = {value}, and the weights are of {files.num_layers} layers; finish the "
                "download, or correct the file; a model that runs the same layers several times is not supported"
            )
    elif TOKENS.fullmatch(key):
        if value > MAX_TOKENS:
            raise ModelError(f"config.json: {path} = {value}; at most {MAX_TOKENS:,} tokens are possible")
    elif WIDTH.fullmatch(key):
        _check_width(path, value, files)
    elif abs(value) > MAX_INTEGER:
        raise ModelError(f"config.json: {path} = {_short(value)}; at most {MAX_INTEGER:,} is possible")


def _check_width(path: str, value: int, files: CheckpointContents | None) -> None:
    most = MAX_WIDTH if files is None else max(FREE_WIDTH, files.longest)
    if value > most:
        known = "" if files is None else f", and the longest axis of a tensor is {files.longest:,}"
        raise ModelError(f"config.json: {path} = {_short(value)}{known}; at most {most:,} is possible here")


def _leaves(hf: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield keys from the outermost in, and the value, of each number, text, null and empty list or mapping.

    Items of a list have its keys.

    Raises:
        ModelError: It is nested too deeply.
    """
    waiting: list[tuple[tuple[str, ...], int, Any]] = [((), 0, hf)]
    while waiting:
        path, depth, value = waiting.pop()
        if depth > MAX_DEPTH:
            raise ModelError(f"config.json: {path[0]} is nested deeper than {MAX_DEPTH} levels")
        items = value.items() if isinstance(value, Mapping) else (("", item) for item in value)
        for key, inner in items:
            where = (*path, str(key)) if key else path
            if inner and isinstance(inner, (Mapping, list, tuple)):
                waiting.append((where, depth + 1, inner))
            else:
                yield where or ("",), inner


def check_params(num: int, files: CheckpointContents) -> None:
    """Check that a model has no more parameters than its files hold.

    Args:
        num: The model's parameters.
        files: What its files hold.

    Raises:
        ModelError: It has.
    """
    if num > SLACK * files.num_numbers:
        raise ModelError(
            f"config.json: it describes a model of {num:,} parameters, and the weights hold {files.num_numbers:,} "
            "numbers; finish the download, or correct the file"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
