"""Finds out what a model keeps of its tokens, by calling it once on the meta device: nothing is computed or stored.

Every attention layer of transformers ends in a function that is chosen by name (`attn_implementation`), and masks are
made by another one of that name. Those of the probe write down what they are given. A layer that is left out has
another way to look back, and cannot be served.

T tokens, Hq and Hk query and KV heads, D and Dv widths of a key and of a value head.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from dovetail.contracts.cache import FULL, Chunk, Full, Reach, Recurrent, Window
from dovetail.contracts.config import LayerSpec
from dovetail_models.transformers.mixers import EmptyCache, cache_parameter, interval

# Keeps transformers to its own code for layers that fold tokens into a state.
#
# Where one of these packages happens to be installed, transformers calls its kernels instead: other sums in another
# order, and states that are written in place. The same model would give other answers on another machine, and copies of
# states would not be what their requests computed.

PACKAGES = ("fla", "mamba_ssm", "causal_conv1d")
"""Those that transformers looks for when it imports a model's code."""


@contextmanager
def reference_only() -> Iterator[None]:
    """Inside, none of these packages can be imported: a model whose code is imported here does without them."""
    imported = {name: sys.modules.get(name) for name in PACKAGES}
    sys.modules.update(dict.fromkeys(PACKAGES))  # type: ignore[arg-type]  # None: there is no such module
    try:
        yield
    finally:
        for name, module in imported.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


logger = logging.getLogger(__name__)

NAME = "dovetail-probe"
NUM_TOKENS = 307
"""More than a compressed attention takes together, and no multiple of anything."""
ON_HOST = "meta tensor"
"""In what torch says of code that reads a tensor on the host."""
QUIET = frozenset({"moe", "mlp", "dense", "sparse"})
"""Types of layers that look at one token at a time."""
KNOWN = QUIET | {"full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv", "hybrid"}
"""Types of layers; of others (indexed, compressed) a call does not show all that they keep."""
UNDERSTOOD = frozenset(
    {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "cache_position"}
    | {"output_attentions", "use_cache", "output_router_logits", "deterministic", "layer_idx"}
)
"""What an attention function may be given: it is served, or changes nothing where no gradient is asked for."""


TWICE = "it attends more than once in a layer for each token, and the cache holds a layer's keys once"
AHEAD = "it makes masks under which tokens attend to later ones, as encoders and decoders of encoders' outputs do"


@dataclass(frozen=True, slots=True)
class Mask:
    """Stands for a mask: how far back a query sees."""

    reach: Reach


@dataclass(slots=True)
class AttentionCall:
    """What one layer that looks back was called with."""

    module: nn.Module
    spec: LayerSpec


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a model is made of.

    Attributes:
        layers: What each layer that looks back keeps.
        modules: Their modules' names, in the same order.
        num_layers: How many layers the model has.
        num_params: How many parameters.
        first_place: The position of a request's first token.
    """

    layers: tuple[LayerSpec, ...]
    modules: tuple[str, ...]
    num_layers: int
    num_params: int
    first_place: int


class Unservable(Exception):
    """Why the model cannot be served."""


@dataclass(slots=True)
class ProbeRecord:
    """What the probe that runs now has seen, of so many tokens."""

    num_tokens: int
    calls: list[AttentionCall] = field(default_factory=list)


_records: list[ProbeRecord] = []


def probe(config: Any) -> ProbeResult:
    """Return what a model needs.

    Args:
        config: Of transformers.

    Raises:
        ModelError: It cannot be served, and why.
    """
    from dovetail_models.transformers.plugin import refusal

    hf = {"architectures": config.architectures}
    text = config.get_text_config(decoder=True)
    types = list(getattr(text, "layer_types", None) or ())
    if others := sorted(set(types) - KNOWN):
        raise refusal(hf, f"layers of type {', '.join(others)} are not supported")
    record = ProbeRecord(min(NUM_TOKENS, getattr(text, "max_position_embeddings", None) or NUM_TOKENS))
    _records.append(record)
    try:
        model = make(config, NAME)
        note_mixers(model, record)
        run(model, record.num_tokens)
    except Unservable as reason:
        raise refusal(hf, str(reason)) from None
    except Exception as error:  # the model's own code, called in a way that not every model can be
        logger.debug("A call of the model without weights failed.", exc_info=True)
        raise refusal(hf, inconsistent(config, record.num_tokens) or missing(error)) from None
    finally:
        _records.pop()
    names = {id(module): name for name, module in model.named_modules()}
    num, seen = int(text.num_hidden_layers), len(record.calls)
    if seen < num - sum(kind in QUIET for kind in types):
        raise refusal(
            hf,
            f"only {seen} of its {num} layers attend through transformers' attention interface or keep a recurrent "
            "state of a supported form",
        )
    return ProbeResult(
        layers=tuple(call.spec for call in record.calls),
        modules=tuple(names[id(call.module)] for call in record.calls),
        num_layers=max(num, seen),
        num_params=sum(param.numel() for param in model.parameters()),
        first_place=first_place(model),
    )


def make(config: Any, attention: str) -> Any:
    """Make a model on the meta device. Experts go one by one: products of all at once want widths of whole 16 bytes."""
    with torch.device("meta"), reference_only():  # the first to import the model's code
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def inconsistent(config: Any, num_tokens: int) -> str:
    """Say what is wrong with a config that transformers' own attention does not compute either; "" if it does."""
    try:
        run(make(config, "eager"), num_tokens)
    except Exception as error:  # of any code of transformers
        if ON_HOST in str(error):
            return ""
        why = f" ({shorten(str(error), 200)})" if isinstance(error, (ValueError, ImportError)) else ""
        return f"transformers itself cannot compute a prompt with this config.json{why}"
    return ""


def missing(error: Exception) -> str:
    """Say what a model would have to have, by what a call of it failed with, which no user can read."""
    said = str(error)
    if isinstance(error, KeyError) and NAME in said:
        return "it chooses its attention from a list of its own, not through transformers' attention interface"
    if repr(Mask.__name__) in said:
        return (
            "it applies attention masks in code of its own instead of transformers' attention interface, and a paged "
            "cache has no masks"
        )
    if ON_HOST in said:
        return "it reads on the host what it has computed, so what it keeps of a token cannot be found without weights"
    return "its attention does not go through transformers' attention interface as far as is needed here"


def run(model: Any, num_tokens: int) -> None:
    """Call a model on the meta device."""
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
    places = torch.arange(num_tokens, device="meta")[None]
    with NoData(), torch.no_grad():  # type: ignore[no-untyped-call]
        model.base_model(input_ids=ids, position_ids=places, attention_mask=torch.ones_like(ids), use_cache=False)


def first_place(model: nn.Module) -> int:
    """Return the position of a request's first token: RoBERTa and its relatives count from behind that of padding."""
    own = (module for module in model.modules() if hasattr(module, "create_position_ids_from_input_ids"))
    return next((int(module.padding_idx) + 1 for module in own), 0)  # type: ignore[arg-type]


def note_mixers(model: nn.Module, record: ProbeRecord) -> None:
    """Let the mixers of a model write down what they keep of a request."""
    for module in model.modules():
        if (parameter := cache_parameter(module)) is not None:
            module.forward = partial(note_mixer, module, module.forward, parameter, record)


def note_mixer(
    module: nn.Module,
    inner: Callable[..., Any],
    parameter: str,
    record: ProbeRecord,
    hidden_states: Tensor,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Write down what a mixer keeps."""
    cache = EmptyCache()
    out = inner(hidden_states, **{parameter: cache})
    if not isinstance(out, Tensor) or out.shape != hidden_states.shape or not cache.found:
        raise Unservable(f"its {type(module).__name__} keeps its state in an unsupported form")
    if any(call.module is module for call in record.calls):
        raise Unservable(TWICE)
    state = tuple(cache.found.values())
    reach = Recurrent(interval(module, state))
    record.calls.append(AttentionCall(module, LayerSpec(index=len(record.calls), reach=reach, state=state)))
    return out


class NoData(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets code go on that reads tensors on the host, as routers of experts do: it finds nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if func is torch.ops.aten.nonzero.default:
                return torch.empty(0, args[0].dim(), dtype=torch.int64, device="meta")
            if func is torch.ops.aten._local_scalar_dense.default:
                return 0
        return func(*args, **(kwargs or {}))


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """Write down what a layer asks for: `[1, Hq, T, D]`, `[1, Hk, T, D]` and `[1, Hk, T, Dv]`."""
    calls, num_tokens = _records[-1].calls, _records[-1].num_tokens
    unknown = sorted(name for name, value in given.items() if value is not None and name not in UNDERSTOOD)
    if unknown:
        raise Unservable(f"its attention layers use {', '.join(unknown)}")
    if any(call.module is module for call in calls):
        raise Unservable(TWICE)
    if key.shape[2] != num_tokens or query.shape[2] != num_tokens:
        raise Unservable("its attention layers do not compute one key for each token")
    if given.get("is_causal") is False:
        raise Unservable(AHEAD)
    reach = reach_of(attention_mask, given.get("sliding_window"))
    scale = given.get("scaling")
    calls.append(
        AttentionCall(
            module,
            LayerSpec(
                index=len(calls),
                num_qo_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                qk_dim=query.shape[3],
                v_dim=value.shape[3],
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                reach=reach,
                soft_cap=given.get("softcap"),
                sinks=given.get("s_aux") is not None,
            ),
        )
    )
    return query.new_empty(1, num_tokens, query.shape[1], value.shape[3]), None


def reach_of(mask: Any, window: int | None) -> Reach:
    """Say how far back a layer sees, by its mask; by what it says of a window where it has none."""
    if mask is None:
        return FULL if window is None else Window(int(window))
    if not isinstance(mask, Mask):
        raise Unservable("it makes masks of its own")
    return mask.reach


def note_mask(*, mask_function: Callable[..., Any], local_size: int | None = None, config: Any, **_: Any) -> Mask:
    """Find how far back a mask lets a query see, by asking it."""
    far = 3 * (local_size or 8)
    try:
        first, last, next_one = (_seen(mask_function, query, far + 1) for query in (0, far - 1, far))
    except (RuntimeError, NotImplementedError, IndexError):
        # It looks at tensors that are not there, as that of chunks does.
        if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
            return Mask(Chunk(local_size))
        raise Unservable("it makes masks that depend on what the tokens are") from None
    if bool(first[1:].any()):
        raise Unservable(AHEAD)
    num, before = int(next_one.sum()), int(last.sum())
    reach: Full | Chunk | Window = FULL if num == far + 1 else Chunk(before) if num == 1 < before else Window(num)
    starts = reach.start(far), reach.start(far - 1)
    if not next_one[starts[0] :].all() or not last[starts[1] : far].all() or before != far - starts[1]:
        raise Unservable("its tokens attend to others than all earlier tokens, a window or a chunk of them")
    return Mask(reach)


def _seen(mask_function: Callable[..., Any], query: int, num: int) -> Tensor:
    """Which of `num` keys a query sees."""
    first = torch.zeros((), dtype=torch.int64)
    seen: Tensor = mask_function(first, first, torch.tensor(query), torch.arange(num))
    return seen.expand(num)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, note_mask)
