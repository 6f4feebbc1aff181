"""What a step and CUDA graphs need of a device's memory, estimated. No torch here.

- *Activations*: T tokens of the widest half of a decoder layer (`layers/transformer.py`): input and residual `2 T H`,
  and either gate and up, the activated gate, the product and the output `T (4 I + H)` (3 I where that is fused), or the
  projections, their rotated copy, the attended heads and the output `T (2 (Hq + 2 Hk) D + Hq D + H)`. T is the chunk
  plus one token per row. A recurrent layer that folds a chunk holds more: eight times in float32 what of each token
  goes into a state of Hs heads, each K by V: `8 Hs (K + V)`. Gated DeltaNet of transformers holds 7.1 times that. One
  with kernels of its own (`layers/mixer.py`) holds its inputs before and behind a convolution over P channels, and
  gates, what is read and what is made of it, `2 P + 3 Hs V`; and of each piece of 64 tokens and each head two squares
  `[64, 64]` and four numbers a token in float32. R prompts have up to 2 R pieces beside those of whole ones.
- *States*: of a recurrent layer, those of the R rows that decode, six times (`layers/recurrent.py`): gathered, four
  while the layer makes their successors (measured), and what the next layer gathers while they are written. A layer
  with kernels of its own gathers none.
- *Sampling*: R rows of logits, one for each place where a token is drawn, in the model's dtype and six float32 copies
  (`runtime/sampling/sampler.py`, `sdk/draws.py`: the logits, their adjusted copy, scores, the race, its
  noise), and 5 bytes per token of the vocabulary for each request with penalties (`runtime/device/penalties.py`).
- *Images*: the tower's output that is kept, or that of one image where it is more; that of the images of a chunk once
  more; and what the tower holds while it encodes the largest image, as its model says (`VisionPart.patch_numbers`).
  Images of a step are encoded one after another.
- *CUDA graphs*: what the largest captured step needs, states too, once more, for graphs share a pool of their own; the
  logits that each batch size keeps, and prefills together; and an allowance for what the driver keeps of each graph,
  which is a guess: the table of a started engine says what was really taken.

T tokens, R rows, H hidden, I intermediate, Hq and Hk query and KV heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dovetail.contracts.cache import DTYPE_BYTES, CacheGroup, CacheTensor, Recurrent
from dovetail.contracts.config import LayerSpec, ModelConfig, VisionPart
from dovetail.messages.step import MAX_IMAGE_BYTES, PrefillGraph

SAMPLER_COPIES = 6
STATE_COPIES = 6
FOLD_COPIES = 8
PIECE_BYTES = 4 * (2 * 64 * 64 + 4 * 64)
"""Of a head, while a piece of a prompt is folded."""
GRAPH_ROWS = 256
"""Rows of the largest batch that is captured."""
BUCKET_SUM = 7
"""The rows of all captured batch sizes together, as a multiple of the largest."""
NUM_DECODE_GRAPHS = 69
"""16 batch sizes, 7 of them again for common prefixes, with two ways to sample each."""
GRAPH_ALLOWANCE = 4 << 20
TOWER_WIDTHS = 16
"""Numbers that a tower holds of a patch, as a multiple of its width, where its model does not say."""


def group_token_bytes(group: CacheGroup, item_bytes: int) -> int:
    """Bytes that the layers of a group keep of one token, or of one request where they are recurrent."""
    return len(group.writers) * _state_bytes(group.tensors, item_bytes)


def _state_bytes(tensors: Sequence[CacheTensor], item_bytes: int) -> int:
    return sum(math.prod(t.shape) * (item_bytes if t.dtype is None else DTYPE_BYTES[t.dtype]) for t in tensors)


def activation_bytes(config: ModelConfig, item_bytes: int, tokens: int) -> int:
    """Estimate what a step of so many tokens needs at its peak; see the top of this file."""
    attention = max((_attention_width(spec) for spec in config.layers), default=0)
    folded = max((_token_fold_bytes(spec, item_bytes) for spec in config.layers), default=0)
    half = max(item_bytes * max(4 * config.intermediate_size, attention), folded)
    return tokens * (3 * item_bytes * config.hidden_size + half)


def fold_bytes(config: ModelConfig, item_bytes: int, rows: int, prompts: int) -> int:
    """Estimate what a recurrent layer needs beside its states, for rows that decode and prompts: see the top."""
    gathered = (spec.state for spec in config.layers if not _is_in_place(spec))
    largest = max((_state_bytes(state, item_bytes) for state in gathered), default=0)
    heads = max((_num_heads(spec) for spec in config.layers if _is_in_place(spec)), default=0)
    return max(rows * STATE_COPIES * largest, prompts * 2 * PIECE_BYTES * heads)


def _is_in_place(spec: LayerSpec) -> bool:
    return isinstance(spec.reach, Recurrent) and spec.reach.in_place


def _num_heads(spec: LayerSpec) -> int:
    return sum(tensor.shape[0] for tensor in spec.state if len(tensor.shape) == 3)


def _token_fold_bytes(spec: LayerSpec, item_bytes: int) -> int:
    """What a recurrent layer holds of a token, with a state `[Hs, K, V]`; see the top of this file."""
    shapes = [tensor.shape for tensor in spec.state if len(tensor.shape) == 3]
    if not _is_in_place(spec):
        return 4 * FOLD_COPIES * sum(heads * (keys + values) for heads, keys, values in shapes)
    channels = sum(tensor.shape[-1] for tensor in spec.state if len(tensor.shape) == 2)
    wide = 2 * channels + 3 * sum(heads * values for heads, _, values in shapes)
    return item_bytes * wide + PIECE_BYTES * _num_heads(spec) // 64


def _attention_width(spec: LayerSpec) -> int:
    """Numbers per token of projections, their rotated copy and the attended heads; see the top of this file."""
    keys = spec.num_qo_heads + spec.num_kv_heads
    return 2 * (keys * spec.qk_dim + spec.num_kv_heads * spec.v_dim) + spec.num_qo_heads * spec.v_dim


def image_token_bytes(config: ModelConfig, item_bytes: int) -> int:
    """Bytes of the tower's output for a token of an image; 0: the model reads text only."""
    return 0 if config.vision is None else (1 + config.vision.num_added) * config.hidden_size * item_bytes


def image_bytes(config: ModelConfig, item_bytes: int, patches: int, tokens: int) -> int:
    """Estimate what images need, of so many patches each, in a chunk of so many tokens; see the top of this file."""
    if (seen := config.vision) is None:
        return 0
    of_token = image_token_bytes(config, item_bytes)
    kept = max(MAX_IMAGE_BYTES, patches // seen.patches_per_token * of_token)
    return kept + tokens * of_token + tower_bytes(seen, item_bytes, patches)


def tower_bytes(seen: VisionPart, item_bytes: int, patches: int) -> int:
    """Estimate what the vision tower holds at its peak for an image of so many patches; see the top of this file."""
    own = patches * (seen.patch_numbers or TOWER_WIDTHS * seen.width)
    return item_bytes * (own + min(patches, seen.piece_patches) * seen.piece_numbers)


def sampling_bytes(config: ModelConfig, item_bytes: int, rows: int) -> int:
    """Estimate what sampling so many rows needs; see the top of this file."""
    return rows * config.vocab_size * (item_bytes + 4 * SAMPLER_COPIES)


def graph_bytes(
    config: ModelConfig, item_bytes: int, max_running_requests: int, prefills: Sequence[PrefillGraph]
) -> int:
    """Estimate what CUDA graphs keep; see the top of this file."""
    rows = min(GRAPH_ROWS, max_running_requests)
    kept = (BUCKET_SUM * rows + max(size.chunks for size in prefills)) * config.vocab_size * item_bytes
    longest = max(size.tokens for size in prefills)
    pool = activation_bytes(config, item_bytes, longest) + sampling_bytes(config, item_bytes, rows)
    pool += fold_bytes(config, item_bytes, rows, max(size.chunks for size in prefills))
    return kept + pool + (NUM_DECODE_GRAPHS + len(prefills)) * GRAPH_ALLOWANCE


def step_bytes(config: ModelConfig, item_bytes: int, tokens: int, rows: int, places: int) -> int:
    """Estimate what a step needs: so many tokens of so many requests, with `places` where a token is drawn."""
    sampling = sampling_bytes(config, item_bytes, places) + 5 * rows * config.vocab_size  # counts for penalties
    return activation_bytes(config, item_bytes, tokens) + fold_bytes(config, item_bytes, rows, rows) + sampling
