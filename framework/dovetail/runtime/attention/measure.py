"""How long the attention backends that serve a group take on this device, and which is taken for which use.

A few layers of the group run over a small pool of made-up keys, by themselves, as the engine runs them: decode rows at
a usual context, in a graph where the backend can be captured, and prompt chunks, a short one and a long one. The time
of a use is the mean of its steps' times, each as a part of what the default takes: so no step counts for more because
it is longer. The default stays unless another one is faster by a margin that noise does not reach.

A candidate that computes something else than the default, or raises, is left out.

Figures are kept in a file whose name is a digest of all that they depend on; a later start reads them.

B requests, T tokens, D head dim.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dovetail.cache.pool import PagedKVPool
from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, Phase
from dovetail.contracts.config import LayerSpec, ModelConfig
from dovetail.contracts.kernels import PLAIN_KERNELS, Kernels
from dovetail.runtime.attention.grouped import attended_groups
from dovetail.runtime.attention.hybrid import Backend
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.kernels.ahead import CompiledAhead
from dovetail.runtime.kernels.figures import ALIKE, Clock, Figures
from dovetail.runtime.kernels.records import records
from dovetail.sdk.layers.attention import attend, attend_qkv

logger = logging.getLogger(__name__)

Times = dict[str, list[float]]
"""Seconds of each step of `STEPS`, by backend; the default first."""

NUM_LAYERS = 2
MAX_REPEATS = 32
FEW_TOKENS = 4096
"""A step of fewer tokens is repeated, so that a clock sees more than launches."""
SEED = 1


@dataclass(frozen=True, slots=True)
class TrialStep:
    """`num` requests with `cached` tokens each that bring `new` ones each: decode rows, or a chunk of a prompt."""

    num: int
    cached: int
    new: int

    @property
    def use(self) -> str:
        """`decode` or `prefill`."""
        return "decode" if self.cached else "prefill"

    @property
    def num_repeats(self) -> int:
        """How often it is done within what is timed."""
        return max(1, min(MAX_REPEATS, FEW_TOKENS // (self.num * self.new)))

    def __str__(self) -> str:
        return f"{self.num} rows" if self.cached else f"{self.new} tokens"


STEPS = (
    TrialStep(1, 1023, 1),
    TrialStep(16, 1023, 1),
    TrialStep(64, 1023, 1),
    TrialStep(1, 0, 512),
    TrialStep(1, 0, 8192),
)
ALIKE_STEPS = (STEPS[1], STEPS[4])
"""Those whose results are compared."""
USES = ("prefill", "decode")

Run = Callable[[], Tensor]
"""Runs a step as often as it is repeated; returns what its last layer gave."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """How backends are measured here.

    Attributes:
        clock: Times a step.
        folder: Where figures are kept; None: nowhere.
        compile_all: Compiles what steps launch, before any is timed; they are run in it, and launch nothing. Is told
            the digest that their figures will have.
        kernels: Binds what models compute between a projection and attention.
    """

    clock: Clock
    folder: Path | None = None
    compile_all: Callable[[str, Sequence[Callable[[], None]]], None] = lambda digest, rehearsals: None
    kernels: Kernels = PLAIN_KERNELS


class AttentionTimes(Figures):
    """What was measured of the backends: times of each step of `STEPS`; see `Figures`."""

    def fastest(self, use: str) -> str:
        """Return the backend to take: the fastest if it beats the default by the margin, else the default.

        Raises:
            ValueError: None ran.
        """
        if not self.times:
            raise ValueError("no backend ran")
        return self.best({name: self.ratio(name, use) for name in self.times})

    def ratio(self, name: str, use: str) -> float:
        """Return the mean time of a use's steps, each as a part of the default's."""
        default = next(iter(self.times.values()))
        of_use = [at for at, step in enumerate(STEPS) if step.use == use]
        return statistics.mean(self.times[name][at] / default[at] for at in of_use)

    def __str__(self) -> str:
        """`decode of 1 rows: triton 8 us, fa3 9 us; …`: of a layer."""
        parts = []
        for at, step in enumerate(STEPS):
            each = ", ".join(f"{name} {times[at] * 1e6:.0f}" for name, times in self.times.items())
            parts.append(f"{step.use} of {step} {each}")
        return f"us a layer: {'; '.join(parts)}" if self.times else "nothing ran"


def measure(
    candidates: Mapping[str, Backend], group: MeasuredLayers, measuring: Measuring, digest: str = ""
) -> AttentionTimes:
    """Time each candidate; the default comes first. One that raises is left out, with its reason.

    Args:
        candidates: Those that serve, by name.
        group: What they have to serve.
        measuring: How.
        digest: Of what figures depend on.
    """
    devices = [] if device_of(group.device).is_host else [group.device]
    with torch.random.fork_rng(devices):  # what is drawn later does not depend on whether this was measured
        return _measure(candidates, group, measuring, digest)


def _measure(
    candidates: Mapping[str, Backend], group: MeasuredLayers, measuring: Measuring, digest: str
) -> AttentionTimes:
    measured_times = AttentionTimes({})
    rehearsals = [group.rehearsal(backend, step) for backend in candidates.values() for step in STEPS]
    measuring.compile_all(digest, rehearsals)
    for name, backend in candidates.items():
        try:
            times = [group.seconds(backend, step, measuring.clock) for step in STEPS]
            default = candidates[next(iter(measured_times.times), name)]
            far = {str(step): group.distance(backend, default, step) for step in ALIKE_STEPS if backend is not default}
        except Exception as error:  # a stranger's backend may raise anything; the others serve all the same
            logger.debug("measuring %s failed", name, exc_info=True)
            measured_times.failed_by(name, error)
            continue
        if wrong := [f"{step} by {most:.2g}" for step, most in far.items() if not most < ALIKE]:
            measured_times.failed[name] = f"its result differs from the default's for {' and '.join(wrong)}"
        else:
            measured_times.times[name] = times
    group.release()
    return measured_times


class MeasuredLayers:
    """A group's first layers over a small pool, which all candidates share: made when it is first needed."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        page_size: int,
        kernels: Kernels = PLAIN_KERNELS,
    ) -> None:
        """`config` is that of the group; `kernels` are as those of `Measuring`."""
        self._kernels = kernels
        writers = [spec for spec in config.layers if spec.cache_layer is None][:NUM_LAYERS]
        self.config = dataclasses.replace(config, layers=tuple(writers))
        self.device, self.dtype, self.page_size = device, dtype, page_size
        self._pool: PagedKVPool | None = None

    @property
    def pool(self) -> PagedKVPool:
        """Keys and values for the largest step; those of a dtype that has no normal numbers stay zero."""
        if self._pool is None:
            [group] = attended_groups(self.config)
            most = max(step.num * -(-(step.cached + step.new) // self.page_size) for step in STEPS)
            self._pool = PagedKVPool(group, most + 1, self.page_size, self.dtype, self.device)
            for spec in self.config.layers:
                for name in ("latent",) if spec.mixer == "latent" else ("k", "v"):
                    tensor = self._pool.tensor(spec.index, name)
                    if tensor.dtype == self.dtype:
                        tensor.normal_()
        return self._pool

    def release(self) -> None:
        """Give the memory back."""
        self._pool = None
        device_of(self.device).trim()

    def seconds(self, backend: Backend, step: TrialStep, clock: Clock) -> float:
        """Return the seconds that a layer takes."""
        covers = backend.caps.graph == "mixed" or (backend.caps.graph == "decode" and step.use == "decode")
        with torch.inference_mode():
            run = self.runner(backend, step, is_captured=covers)
            return clock(run, covers) / (step.num_repeats * len(self.config.layers))

    def rehearsal(self, backend: Backend, step: TrialStep) -> Callable[[], None]:
        """Return what launches all that a step launches, once."""

        def rehearse() -> None:
            self.runner(backend, step, is_captured=True, num_repeats=1)()

        return rehearse

    def distance(self, backend: Backend, default: Backend, step: TrialStep) -> float:
        """Return how far the results of two backends are apart, as a part of the default's; NaN if one is no number."""
        with torch.inference_mode():
            found = []
            for each in (backend, default):
                torch.manual_seed(SEED)
                found.append(self.runner(each, step, is_captured=False, num_repeats=1)().float())
            return float((found[0] - found[1]).norm() / found[1].norm())

    def runner(
        self, backend_class: Backend, step: TrialStep, *, is_captured: bool, num_repeats: int | None = None
    ) -> Run:
        """Make a backend and a batch, and return what runs the step."""
        backend = backend_class(self.config, self.pool, self.device)
        batch = self._batch(step, backend, is_captured=is_captured)
        backend.init_graph_state(step.num, step.num * step.new)
        backend.plan(batch, Phase.CAPTURE if is_captured else Phase.EAGER)
        layers = [self._layer(spec, batch) for spec in self.config.layers]

        def run() -> Tensor:
            for _ in range(num_repeats or step.num_repeats):
                backend.plan_in_graph(batch)
                outs = [layer() for layer in layers]
            return outs[-1]

        return run

    def _batch(self, step: TrialStep, backend: AttentionBackend, *, is_captured: bool) -> ForwardBatch:
        """Requests in random pages; of decode rows in a graph, the host knows no lengths."""
        num, new, length, size = step.num, step.new, step.cached + step.new, self.page_size
        pages = -(-length // size)
        shuffled = torch.randperm(num * pages, device=self.device).view(num, pages)
        table = (1 + shuffled).to(torch.int32)
        places = step.cached + torch.arange(new, device=self.device)
        slots = table[:, places // size].long() * size + places % size
        starts = torch.arange(num + 1, dtype=torch.int32, device=self.device) * new
        is_known = not is_captured
        return ForwardBatch(
            num_decode=num if step.use == "decode" else 0, positions=places.repeat(num), kv_slots=slots.flatten(),
            rows=torch.arange(num, device=self.device), page_table=table,
            seq_lens=torch.full((num,), length, device=self.device), q_starts=starts,
            seq_lens_cpu=[length] * num if is_known else [],
            q_lens_cpu=[new] * num if is_known or step.use == "prefill" else [],
            attention=backend, last_tokens=starts[1:].long() - 1,
        )  # fmt: skip

    def _layer(self, spec: LayerSpec, batch: ForwardBatch) -> Run:
        """Return what computes a layer as models do, from queries, keys and values on."""
        sinks = torch.zeros(spec.num_qo_heads, device=self.device) if spec.sinks else None
        layer, num = AttentionLayer.of(spec, sinks=sinks), batch.num_tokens

        def draw(*shape: int) -> Tensor:
            return torch.randn(num, *shape, device=self.device, dtype=torch.float32).to(self.dtype)

        if spec.mixer == "kv" and spec.qk_dim == spec.v_dim:
            qkv = draw(spec.num_qo_heads + 2 * spec.num_kv_heads, spec.qk_dim)
            rope = draw(1, spec.qk_dim), draw(1, spec.qk_dim)
            dims, dtype = {"D": spec.qk_dim}, str(self.dtype).removeprefix("torch.")
            turned = self._kernels.bind(self._kernels.ask("norm_rotate", dtype, dims, {}, invariant=False))
            return lambda: attend_qkv(layer, qkv, None, rope, batch, turned)
        q, k = draw(spec.num_qo_heads, spec.qk_dim), draw(spec.num_kv_heads, spec.qk_dim)
        v = None if layer.latent else draw(spec.num_kv_heads, spec.v_dim)
        return lambda: attend(layer, q, k, v, batch)


def is_measurable(config: ModelConfig) -> bool:
    """Whether a group has layers of the kind that steps are made of: they look back, and keep what they look at."""
    return all(spec.causal for spec in config.layers) and any(spec.cache_layer is None for spec in config.layers)


def measuring_on(device: torch.device, kernels: Kernels, *, compiles_ahead: bool) -> Measuring:
    """Return how backends are measured on a device that compiles kernels."""
    on = device_of(device)

    def compile_all(digest: str, rehearsals: Sequence[Callable[[], None]]) -> None:
        if compiles_ahead:
            CompiledAhead(on, ["attention", digest]).compile(rehearsals)

    def seconds(run: Run, is_captured: bool) -> float:
        return on.seconds(run, is_captured=is_captured)

    return Measuring(seconds, records(on.compiler()), compile_all, kernels)
