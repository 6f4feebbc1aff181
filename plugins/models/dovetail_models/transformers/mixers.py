"""Layers of transformers that fold tokens into a state: they get each request's state as a cache of one layer.

Such a layer (Gated DeltaNet, Mamba 2, a short convolution) owns a convolution over time, and asks the cache that its
`forward` is given for the convolution's last inputs and for what is kept beyond them.

n requests, t tokens of each, H hidden size, C channels, K taps.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.cache import CacheTensor
from dovetail.sdk.layers.recurrent import State, recur

PARAMETERS = ("cache", "cache_params", "past_key_values")
"""What `forward` calls the cache: the first since transformers 5.24."""
DELTA_CHUNK = 64
"""Tokens that Gated DeltaNet folds in at once; other layers say it (`chunk_size`)."""
LEAST_FOLDED = 128
"""Tokens that other layers are called for at least: with 64, prompts take up to 1.14 times as long as at once."""


def cache_parameter(module: nn.Module) -> str | None:
    """Return what a mixer's `forward` calls its cache; None of other modules."""
    if not any(isinstance(child, nn.Conv1d) for child in module.children()):
        return None
    names = inspect.signature(module.forward).parameters
    return next((name for name in PARAMETERS if name in names), None)


def interval(module: nn.Module, state: tuple[CacheTensor, ...]) -> int:
    """Return how many tokens a mixer folds in at once: copies of its state stand between these."""
    if all(tensor.name.startswith("conv") for tensor in state):
        return 1
    return folded(module)


def folded(module: nn.Module) -> int:
    """Return the multiple of a mixer's chunk that it is called for."""
    chunk = getattr(module, "chunk_size", None)
    return DELTA_CHUNK if chunk is None else whole_chunks(LEAST_FOLDED, int(chunk))


def whole_chunks(num_tokens: int, chunk: int) -> int:
    """Return the least multiple of a chunk that has so many tokens."""
    return chunk * -(-num_tokens // chunk)


class LayerCache:
    """What a mixer takes for the whole model's cache."""

    def __init__(self, state: State) -> None:
        self.state = {name: tensor.clone() for name, tensor in state.items()}  # some layers write in place

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs `[n, C, K]`, None at the beginning of a request."""
        return self.state.get(f"conv{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the rest of the state, None at the beginning of a request."""
        return self.state.get(f"state{state_idx}")

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Append inputs `[n, C, t]`; return them behind the last ones."""
        name = f"conv{state_idx}"
        full = torch.cat((self.state[name], conv_states), dim=-1)
        self.state[name] = full[..., -self.state[name].shape[-1] :]
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Replace the rest of the state."""
        self.state[f"state{state_idx}"] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """A request's state is zeros before its first token."""
        return True

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        """Nothing is taken back."""
        return False


class EmptyCache(LayerCache):
    """Of a request that begins; notes what a mixer keeps."""

    def __init__(self) -> None:
        super().__init__({})
        self.found: dict[str, CacheTensor] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        taps = conv_states.shape[-1] if conv_kernel_size is None else int(conv_kernel_size)
        self.found[f"conv{state_idx}"] = CacheTensor(f"conv{state_idx}", (*conv_states.shape[1:-1], taps))
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        wide = "float32" if recurrent_states.dtype == torch.float32 else None
        name = f"state{state_idx}"
        self.found[name] = CacheTensor(name, tuple(recurrent_states.shape[1:]), wide)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False


def fold_requests(module: nn.Module, parameter: str, index: int, batch: Callable[[], ForwardBatch]) -> None:
    """Let a mixer run over a step's tokens: `[1, T, H]` to `[1, T, H]`, each request from its own state.

    Mamba 2 is called for one chunk of its at a time, of `LEAST_FOLDED` tokens at least: its sums are the same with any.
    Given several, transformers makes their states of products of all their decays, so that a state's last bits depend
    on where a prompt was cut, and a copy differed from what was cold.
    Nemotron-H's mixer (32 heads, 8 groups, states of 128, one core) takes 0.94, 0.81 and 0.58 of the time that it takes
    at once for 300, 1,024 and 4,096 tokens, and 1.12, 1.07 and 0.60 where its config has chunks of 64 instead of the
    128 of all that are published. So copies are kept.

    Args:
        module: The mixer; its `forward` is replaced.
        parameter: What that calls the cache.
        index: The layer's number.
        batch: Returns the step's batch.
    """
    inner = module.forward
    chunk, length = getattr(module, "chunk_size", None), folded(module)

    def fold(inputs: Tensor, state: State) -> tuple[Tensor, State]:
        outputs = []
        for piece in torch.split(inputs, inputs.shape[1] if chunk is None else length, dim=1):
            if chunk is not None:  # what is missing to a chunk is computed, too: no more than the model would
                module.chunk_size = whole_chunks(piece.shape[1], int(chunk))  # type: ignore[assignment]
            cache = LayerCache(state)
            outputs.append(inner(piece, **{parameter: cache}))
            state = cache.state
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), state

    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return recur(index, hidden_states[0], batch(), fold)[None]

    module.forward = forward


def bound_steps(module: nn.Module) -> None:
    """Bound a Mamba 2 mixer's time steps while it decodes, too.

    Transformers bounds them in prompts alone (Nemotron-H, Zamba 2), and so gives two answers to one text. What is
    bounded here is what the steps are made of, before their bias and softplus; in a prompt that changes nothing.
    """
    least, most = getattr(module, "time_step_limit", None) or (0.0, math.inf)
    if least <= 0.0 and most == math.inf:
        return

    def bound(_: nn.Module, given: Any, out: Tensor) -> Tensor:
        bias: Any = module.dt_bias
        low, high = (torch.tensor(limit, dtype=torch.float32) for limit in (max(least, 1e-30), most))
        low, high = (x.expm1().log().to(out.device) - bias.float() if x.isfinite() else x for x in (low, high))
        rest, steps = torch.split(out, [out.shape[-1] - len(bias), len(bias)], dim=-1)
        return torch.cat((rest, steps.float().clamp(low, high).to(out.dtype)), dim=-1)

    module.in_proj.register_forward_hook(bound)  # type: ignore[union-attr]
