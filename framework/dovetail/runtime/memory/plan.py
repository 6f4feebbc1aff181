"""How an engine divides the memory of its device: one function for the engine and for `dovetail plan`. No torch here.

What is static is known: weights (safetensors headers) and the KV cache. What a step needs beside it is estimated: see
`estimates.py`.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from dovetail.base.settings import EngineSettings
from dovetail.contracts.cache import Chunk, Recurrent, Window
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.contracts.needs import unserved
from dovetail.runtime.memory.checks import check_settings, gib
from dovetail.runtime.memory.estimates import graph_bytes, group_token_bytes, image_bytes, step_bytes
from dovetail.runtime.memory.prefill_sizes import sizes
from dovetail.sdk.config import ITEM_BYTES

STATIC_FRACTION = 0.88
"""Of free CUDA memory for weights and KV cache where no flag says more; less where a step needs more than the rest."""
MAX_CPU_KV_BYTES = 4 << 30
TYPICAL_LEN = 4096
"""Tokens of the request by which groups are balanced."""
COPIES_EACH = 2
"""Copies of a recurrent state for a request of that length, …"""
MIN_COPIES = 2
"""… and those that there are at least: one that is gone on from, and one that is written."""
ROWS_EACH = 4
"""Running requests for which there is at least one copy, where memory allows."""
MAX_FREE_TOKENS = 1 << 22
"""Tokens of a cache whose pages take no memory of the device: what the host keeps of them takes some 100 MiB."""
NUM_PADDING_ROWS = 3
"""Device rows that no request holds. The first pads the batches of CUDA graphs; trial steps stand in all of them."""
DERIVED = ("kv_bytes", "page_bytes", "num_pages", "num_tokens", "free_bytes")
"""What a plan as plain values tells beside its fields."""
CONTEXT_BYTES = 512 << 20
"""What a process takes of a device before anything is loaded; for plans without the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """A device's memory in bytes. `free` is that before the weights; `left` that after them, None if not measured."""

    kind: str
    name: str
    total: int
    free: int
    left: int | None = None

    def of_rank(self, num_ranks: int) -> DeviceBytes:
        """Return what one of several ranks may use: on CPU they share one memory."""
        if self.kind != "cpu" or num_ranks == 1:
            return self
        left = None if self.left is None else self.left // num_ranks
        return dataclasses.replace(self, total=self.total // num_ranks, free=self.free // num_ranks, left=left)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Pages of one cache group, without its null page; of a recurrent group copies of states, without that of zeros.

    `seen_pages` are those that a request sees at most while it decodes, None where that grows with its length.
    `num_rows` are the device rows that have a state, 0 in groups with pages.
    """

    name: str
    page_bytes: int
    num_pages: int
    seen_pages: int | None = None
    num_rows: int = 0

    @property
    def num_bytes(self) -> int:
        """Size, the null page included, and the rows."""
        return (self.num_pages + 1 + self.num_rows) * self.page_bytes

    def pages_of(self, num_tokens: int, page_size: int) -> int:
        """Return the pages that a decoding request of so many tokens has."""
        pages = -(-num_tokens // page_size)
        return pages if self.seen_pages is None else min(pages, self.seen_pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How a device is divided. Sizes in bytes; the groups' layers see less and less.

    `measured_bytes` is what buffers and graphs took until the engine was ready, None before that.
    `process_bytes` is what the engine's process takes without the model, on a CPU, whose memory both take.
    `notes` are sentences that the user should read; `weight_notes` say what a quantisation makes of the weights.
    `state_copies` is how many copies of recurrent states were asked for, None for as many as the cache's size suggests.
    `image_bytes` are those of the vision tower and its output, for images of at most `image_patches`; 0: it has none.
    """

    device: DeviceBytes
    dtype: str
    weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    page_size: int
    groups: tuple[GroupPlan, ...]
    context_len: int
    step_tokens: int
    max_running_requests: int
    notes: tuple[str, ...] = ()
    measured_bytes: int | None = None
    process_bytes: int | None = None
    weight_notes: tuple[str, ...] = ()
    state_copies: int | None = None
    image_patches: int = 0
    image_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        """Size of the KV cache, null pages included."""
        return sum(group.num_bytes for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of every group that has pages."""
        return sum(group.page_bytes for group in self.groups if not group.num_rows)

    @property
    def num_pages(self) -> int:
        """Pages of the first group; 0 where nothing is cached."""
        return self.groups[0].num_pages if self.groups else 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_pages * self.page_size

    @property
    def free_bytes(self) -> int:
        """What nobody needs; below 0 if the estimates say that it is too little."""
        left = self.device.free - self.weight_bytes if self.device.left is None else self.device.left
        return left - self.kv_bytes - self.working_bytes

    @property
    def working_bytes(self) -> int:
        """What steps need beside weights and cache: activations, images and CUDA graphs."""
        return self.activation_bytes + self.image_bytes + self.graph_bytes

    def num_requests(self, num_tokens: int) -> int:
        """How many requests of so many tokens the KV cache holds at once; where there is none, how many run."""
        if not self.groups:
            return self.max_running_requests
        paged = [group for group in self.groups if not group.num_rows]
        return min(group.num_pages // group.pages_of(num_tokens, self.page_size) for group in paged)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values, the derived ones included."""
        derived = {name: getattr(self, name) for name in DERIVED}
        return {**dataclasses.asdict(self), **derived, "num_full_requests": self.num_requests(self.context_len)}


def chunk_size(settings: EngineSettings, device: str, weight_bytes: int) -> int:
    """Return `--chunked-prefill-size`, or its default for a device type: most prompt tokens of a step, -1 for no bound.

    Where nothing is cached prompts are not cut: a longer one is a step of its own.

    On CPU the default shrinks as the model grows, so that a step takes about as long.

    Raises:
        ConfigError: 0 was given.
    """
    chunk = settings.chunked_prefill_size
    if chunk is None:
        return 8192 if device != "cpu" else max(256, min(4096, (1 << 39) // max(weight_bytes, 1)))
    if chunk == 0:
        raise ConfigError("--chunked-prefill-size 0: give a number of tokens, or -1 for prompts that are never cut")
    return chunk


def context_len(settings: EngineSettings, config: ModelConfig) -> int:
    """Return the context asked for, at most the model's own: beyond it positions are untrained.

    Raises:
        ConfigError: More was asked for.
    """
    most = config.max_position_embeddings
    if settings.context_length is not None and settings.context_length > most:
        raise ConfigError(
            f"--context-length {settings.context_length}: the model has {most} positions (max_position_embeddings); "
            f"give at most {most}, or extend the model by rope scaling in its config.json"
        )
    return settings.context_length or most


def plan_memory(
    settings: EngineSettings,
    config: ModelConfig,
    dtype: str,
    device: DeviceBytes,
    weight_bytes: int,
    *,
    has_graphs: bool,
) -> MemoryPlan:
    """Divide a device's memory.

    Args:
        settings: The engine's.
        config: The model's facts.
        dtype: Name of the dtype of weights and KV cache.
        device: What there is. With `left`, the weights are on it already.
        weight_bytes: Size of the weights.
        has_graphs: Whether steps are captured into CUDA graphs.

    Raises:
        ConfigError: The model, the KV cache or the context does not fit; with the numbers and the flags to change.
        ModelError: Its layers need a cache of a kind that there is not.
    """
    check_settings(settings, device.kind)
    if settings.expert_shard == "expert" and config.experts is None:
        raise ConfigError(f"--expert-parallel: {config.architecture} has no experts; leave it out")
    if (reason := unserved(config)) is not None:
        raise ModelError(reason)
    item = ITEM_BYTES[dtype]
    context, rows = context_len(settings, config), settings.max_running_requests
    tokens = _step_tokens(settings, config, device.kind, weight_bytes, context)
    size, patches = settings.page_size, image_patches(settings, config, context)
    plan = MemoryPlan(
        device=device,
        dtype=dtype,
        weight_bytes=weight_bytes,
        activation_bytes=step_bytes(config, item, tokens, rows, settings.max_places),
        graph_bytes=graph_bytes(config, item, rows, sizes(weight_bytes, tokens - rows, rows)) if has_graphs else 0,
        page_size=size,
        groups=_empty_groups(config, size, item, rows),
        context_len=context,
        step_tokens=tokens,
        max_running_requests=rows,
        image_patches=patches,
        image_bytes=image_bytes(config, item, patches, tokens),
        state_copies=_state_copies(settings, config),
    )
    if device.left is None and weight_bytes > device.free:
        raise ConfigError(_does_not_fit(plan))
    if not plan.groups:
        return dataclasses.replace(plan, notes=_uncached_notes(settings, plan))
    num, notes = _num_pages(settings, plan)
    plan = _with_copies(dataclasses.replace(plan, groups=groups_for(plan, num), notes=tuple(notes)))
    if not plan.page_bytes and settings.max_total_tokens is None:
        plan = _with_free_pages(plan)
    return _with_context(settings, plan)


def image_patches(settings: EngineSettings, config: ModelConfig, context: int) -> int:
    """Return the most patches of an image that is served: as many as was asked for, or as a prompt has room for.

    Raises:
        ConfigError: A number was asked for, and the model reads text only.
    """
    asked = settings.max_image_patches
    if config.vision is None:
        if asked is not None:
            raise ConfigError(f"--max-image-patches {asked}: {config.architecture} reads text only; leave it out")
        return 0
    room = context * config.vision.patches_per_token
    return room if asked is None else min(asked, room)


def _state_copies(settings: EngineSettings, config: ModelConfig) -> int | None:
    """Return how many copies of states were asked for; none are of use where nothing is looked for in the cache.

    Raises:
        ConfigError: There are no states, or replies are to be in a cache that there is not.
    """
    asked, has_states = settings.state_copies, any(spec.state for spec in config.layers)
    if asked is not None and not has_states:
        raise ConfigError(f"--state-copies {asked}: {config.architecture} keeps no states; leave it out")
    if settings.fold_replies and not has_states:
        raise ConfigError(f"--fold-replies: {config.architecture} keeps no states, and its replies are cached anyway")
    if settings.fold_replies and (asked == 0 or settings.disable_radix_cache):
        other = "--state-copies 0" if asked == 0 else "--disable-radix-cache"
        raise ConfigError(f"--fold-replies: with {other} nothing of a reply is kept; leave one of them out")
    return 0 if asked is None and settings.disable_radix_cache else asked


def _empty_groups(config: ModelConfig, page_size: int, item_bytes: int, rows: int) -> tuple[GroupPlan, ...]:
    groups = []
    for group in config.cache_groups:
        size, is_state = group_token_bytes(group, item_bytes), isinstance(group.reach, Recurrent)
        groups.append(
            GroupPlan(
                name=group.name,
                page_bytes=size if is_state else page_size * size,
                num_pages=0,
                seen_pages=seen_pages(group.reach, page_size) if isinstance(group.reach, Window | Chunk) else None,
                num_rows=rows + NUM_PADDING_ROWS if is_state else 0,
            )
        )
    return tuple(groups)


def seen_pages(reach: Window | Chunk, page_size: int) -> int:
    """Return the pages that a decoding request sees at most, and those that it has beside them."""
    return -(-reach.size // page_size) + 2


def floor_pages(seen: int, rows: int, prefill_tokens: int, page_size: int) -> int:
    """Return the pages of a group with which nobody ever waits: all rows see theirs, and two steps are computed."""
    return rows * seen + 2 * (-(-prefill_tokens // page_size) + rows)


def groups_for(plan: MemoryPlan, num: int) -> tuple[GroupPlan, ...]:
    """Return the groups of a cache that holds `num` pages of tokens.

    Recurrent groups have a state in each device row, and beside them as many copies as were asked for, or copies for
    requests of a typical length.
    What does not see everything has room for what all running requests see and two steps compute, or more, so that
    prefixes of requests of a typical length can be gone on from; but no more than there are tokens for.
    """
    rows, size = plan.max_running_requests, plan.page_size
    typical = -(-min(plan.context_len, TYPICAL_LEN) // size)
    groups = []
    for group in plan.groups:
        seen, wanted = group.seen_pages, num
        if group.num_rows and plan.state_copies is not None:
            wanted = plan.state_copies
        elif group.num_rows:
            wanted = max(MIN_COPIES, -(-num * COPIES_EACH // typical))
        elif seen is not None:
            least = floor_pages(seen, rows, plan.step_tokens - rows, size)
            wanted = min(num, max(least, -(-num * min(seen, typical) // typical)))
        groups.append(dataclasses.replace(group, num_pages=wanted))
    return tuple(groups)


def _with_copies(plan: MemoryPlan) -> MemoryPlan:
    """Give a small cache of many rows a copy of states for each few of them, out of what nobody needs.

    Else requests that end one after another would write over each other's copies before anybody goes on from one.
    """
    states = [group for group in plan.groups if group.num_rows]
    wanted = min(plan.max_running_requests // ROWS_EACH, plan.num_pages)
    if (
        not states
        or plan.state_copies is not None
        or (lacking := wanted - min(group.num_pages for group in states)) <= 0
    ):
        return plan
    more = max(0, min(lacking, plan.free_bytes // sum(group.page_bytes for group in states)))
    groups = [
        dataclasses.replace(group, num_pages=group.num_pages + more) if group.num_rows else group
        for group in plan.groups
    ]
    notes = plan.notes
    if more < lacking:
        num = min(group.num_pages for group in groups if group.num_rows)
        note = (
            f"There is room for {num} copies of recurrent states beside up to {plan.max_running_requests} requests: "
            "prefixes will seldom be found in the cache; raise --max-total-tokens, or lower --max-running-requests"
        )
        notes = (*notes, note)
    return dataclasses.replace(plan, groups=tuple(groups), notes=notes)


def _with_free_pages(plan: MemoryPlan) -> MemoryPlan:
    """Give a model of states alone pages for all tokens of its requests: those take memory of the host only."""
    most = min(plan.max_running_requests * plan.context_len, MAX_FREE_TOKENS) // plan.page_size
    tokens, *states = plan.groups
    tokens = dataclasses.replace(tokens, num_pages=max(tokens.num_pages, most))
    return dataclasses.replace(plan, groups=(tokens, *states))


def _bytes_for(plan: MemoryPlan, num: int) -> int:
    """Bytes of a cache that holds `num` pages of tokens."""
    return sum(group.num_bytes for group in groups_for(plan, num))


def _uncached_notes(settings: EngineSettings, plan: MemoryPlan) -> tuple[str, ...]:
    """Say where a flag sizes a cache that there is not, and where a step may not fit."""
    notes = []
    if settings.max_total_tokens is not None:
        notes.append(f"--max-total-tokens {settings.max_total_tokens}: the model caches nothing; it has no effect")
    if plan.free_bytes < 0:
        notes.append(
            f"a step of {plan.step_tokens:,} tokens may need {gib(plan.activation_bytes)}, more than is free: if "
            "memory runs out, lower --context-length or --chunked-prefill-size"
        )
    return tuple(notes)


def _step_tokens(settings: EngineSettings, config: ModelConfig, kind: str, weight_bytes: int, context: int) -> int:
    """Most tokens of a step: a chunk, or a whole prompt where prompts are not cut, and one per running request.

    An image that is not cut is a chunk, too.
    """
    chunk = chunk_size(settings, kind, weight_bytes)
    if chunk == -1:
        chunk = max(settings.max_prefill_tokens, context)
    elif not config.cache_groups:
        chunk = max(chunk, context)
    if config.vision is not None:
        chunk = max(chunk, config.vision.span_tokens)
    rows = settings.max_running_requests
    return min(chunk, rows * context) + rows


def _num_pages(settings: EngineSettings, plan: MemoryPlan) -> tuple[int, list[str]]:
    """Size the KV cache: as asked for, else as memory allows and requests can use."""
    left = plan.device.free - plan.weight_bytes if plan.device.left is None else plan.device.left
    working = plan.working_bytes
    if settings.max_total_tokens is not None:
        num = settings.max_total_tokens // plan.page_size
        budget, limit = left, f"--max-total-tokens {settings.max_total_tokens}"
        _check_states(plan, budget, left)
        if _bytes_for(plan, num) > left:
            raise ConfigError(_no_room(plan, left, f"{limit} takes {gib(_bytes_for(plan, num))}; lower it"))
    else:
        budget, limit = _budget(settings, plan.device, left, working)
        _check_states(plan, budget, left)
        useful = settings.max_running_requests * -(-plan.context_len // plan.page_size)
        num = bisect_right(range(useful + 1), budget, key=lambda pages: _bytes_for(plan, pages)) - 1
    if num < 1:
        raise ConfigError(_no_room(plan, left, _advice(settings, limit)))
    notes = []
    rest = left - _bytes_for(plan, num)
    if rest < working:
        notes.append(
            f"{limit} leaves {gib(rest)} for activations{', images' if plan.image_bytes else ''} and graphs, which may "
            f"need {gib(working)}: if memory runs out, lower it or --chunked-prefill-size{_or_patches(plan)}"
        )
    return num, notes


def _check_states(plan: MemoryPlan, budget: int, left: int) -> None:
    """Refuse recurrent states for which there is no room, however few tokens are cached."""
    states = [group for group in groups_for(plan, 0) if group.num_rows]
    num = sum(group.num_bytes for group in states)
    if states and num > budget:
        what = f"states of {states[0].num_rows} rows and {states[0].num_pages} copies take {gib(num)}"
        lower = f"lower --max-running-requests ({plan.max_running_requests})"
        lower += "" if not plan.state_copies else f" or --state-copies ({plan.state_copies})"
        raise ConfigError(_no_room(plan, left, f"{what}; {lower}"))


def _budget(settings: EngineSettings, device: DeviceBytes, left: int, working: int) -> tuple[int, str]:
    """Bytes for the KV cache, and the flag that bounds them.

    `--mem-fraction-static` as SGLang has it: weights and KV cache take this share of what is free before loading.
    `--gpu-memory-utilization` as vLLM has it: the process takes this share of all memory, activations included.
    """
    static, utilization = settings.mem_fraction_static, settings.gpu_memory_utilization
    if utilization is not None:
        allowed = int(device.total * utilization)
        if allowed > device.free:
            raise ConfigError(
                f"--gpu-memory-utilization {utilization:g}: that is {gib(allowed)} of {device.name}, and "
                f"{gib(device.free)} are free; stop what else runs there, or give at most "
                f"{device.free / device.total:.2f}"
            )
        return allowed - (device.free - left) - working, f"--gpu-memory-utilization {utilization:g}"
    if static is not None:
        return left - int(device.free * (1 - static)), f"--mem-fraction-static {static:g}"
    if device.kind == "cpu":
        return min(left // 2, MAX_CPU_KV_BYTES), "the default on CPU"
    return left - max(int(device.free * (1 - STATIC_FRACTION)), working), "the default of --mem-fraction-static"


def _with_context(settings: EngineSettings, plan: MemoryPlan) -> MemoryPlan:
    """Bound the context by the KV cache; refuse that where the user asked for more. A last token needs no page.

    Where every layer has a window, a request of any length fits if what it sees does.
    """
    seen = plan.groups[0].seen_pages
    if plan.context_len <= plan.num_tokens or (seen is not None and plan.num_pages >= seen):
        return plan
    if settings.context_length is not None:
        raise ConfigError(
            f"--context-length {settings.context_length}: the KV cache holds {plan.num_tokens} tokens; give at most "
            f"that, or make room: raise --max-total-tokens or --mem-fraction-static, lower --chunked-prefill-size "
            f"({plan.step_tokens - plan.max_running_requests})"
        )
    note = (
        f"Requests are limited to {plan.num_tokens:,} tokens, which the KV cache holds; the model's context is "
        f"{plan.context_len:,}."
    )
    return dataclasses.replace(plan, context_len=plan.num_tokens, notes=(*plan.notes, note))


def _does_not_fit(plan: MemoryPlan) -> str:
    device = plan.device
    remedies = "stop what else runs there, or use a smaller model"
    remedies += ", or more GPUs (--tensor-parallel-size)" if device.kind != "cpu" else ""
    remedies += ", or --dtype bfloat16" if plan.dtype == "float32" else ""
    return (
        f"the model does not fit on {device.name}: its weights take {gib(plan.weight_bytes)} in {plan.dtype}, and "
        f"{gib(device.free)} of {gib(device.total)} are free; {remedies}"
    )


def _no_room(plan: MemoryPlan, left: int, advice: str) -> str:
    graphs = f" and CUDA graphs {gib(plan.graph_bytes)}" if plan.graph_bytes else ""
    images = f", images of up to {plan.image_patches:,} patches {gib(plan.image_bytes)}" if plan.image_bytes else ""
    return (
        f"no room for the KV cache on {plan.device.name}: {gib(plan.device.free)} were free, the weights leave "
        f"{gib(left)}, activations may need {gib(plan.activation_bytes)}{images}{graphs}, and a page of "
        f"{plan.page_size} tokens takes {gib(plan.page_bytes)}; {advice}{_or_patches(plan)}"
    )


def _or_patches(plan: MemoryPlan) -> str:
    return f" or --max-image-patches ({plan.image_patches})" if plan.image_bytes else ""


def _advice(settings: EngineSettings, limit: str) -> str:
    lower = "lower --chunked-prefill-size or --max-running-requests"
    return f"raise {limit}, or {lower}" if settings.mem_fraction_static or settings.gpu_memory_utilization else lower
