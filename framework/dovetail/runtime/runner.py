"""Owns the model on the device: builds it, sizes the cache, runs steps."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dovetail.contracts.attention import AttentionBackend, Phase
from dovetail.contracts.model import BuildContext, CausalLM, ModelPlugin
from dovetail.engine.messages import TokenLogprob
from dovetail.engine.request import Chunk, Request, StepPlan
from dovetail.errors import ModelError, PluginError
from dovetail.grammar.masks import MaskBuffer
from dovetail.plugins import LoadedPlugins
from dovetail.runtime.backends import choose_backend, find_device
from dovetail.runtime.batch import prepare
from dovetail.runtime.device_memory import DeviceMemory
from dovetail.runtime.device_state import DeviceState
from dovetail.runtime.graphs import DecodeGraphs, GraphPool
from dovetail.runtime.hf_config import eos_token_ids, read_config
from dovetail.runtime.prefill_graphs import PrefillGraphs
from dovetail.runtime.sampler import Sampled, count, is_plain, rank_logprobs, sample
from dovetail.runtime.weights import fill_dummy, load_weights
from dovetail.settings import EngineSettings

logger = logging.getLogger(__name__)

LOGIT_ROWS = 256
"""Most rows of prompt logits made at once; at a vocabulary of 152k they take 156 MB in float32."""
REDRAW = -2
MAX_GRAPH_CHUNKS = 4
"""Prefill chunks of a step that are replayed one by one; more of them are computed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Tokens of a step: `sampled[i]` got `tokens[i]`; None where its logits were not finite."""

    sampled: list[Request]
    tokens: list[int | None]
    outcome: Sampled | None
    graph: bool = False


class ModelRunner:
    """One model, its KV pool and device state, and the attention backend that serves it."""

    def __init__(self, settings: EngineSettings, plugins: LoadedPlugins) -> None:
        """Build and load.

        Raises:
            ConfigError: The model, the device, the memory or a plugin cannot serve these settings.
        """
        started = time.perf_counter()
        self.device = find_device(settings.device)
        folder = settings.folder
        hf = read_config(folder)
        plugin = _model_plugin(plugins)
        self.config = plugin.config_from_hf(hf)
        self.eos_ids = eos_token_ids(folder, hf)
        self.dtype: torch.dtype = getattr(torch, self.config.dtype if settings.dtype == "auto" else settings.dtype)
        backend, self.attention_name = choose_backend(plugins, self.config, self.device, self.dtype, settings)
        memory = DeviceMemory(settings, self.config, self.device, self.dtype)
        with memory.loading():
            self.model, self.weight_bytes = self._load(plugin, settings, folder)
        if self.device.type == "cpu":
            torch.set_num_threads(settings.num_threads or _useful_threads(self.weight_bytes))
        self.pool = memory.make_pool(self.weight_bytes)
        self.context_len = memory.context_len
        max_pages = -(-self.context_len // settings.page_size)
        self.state = DeviceState(settings.max_running_requests, max_pages, self.device)
        self.attention: AttentionBackend = backend(self.config, self.pool, self.device)
        self._masks = MaskBuffer((self.config.vocab_size + 31) // 32, self.device)
        self._prefill_graphs: PrefillGraphs | None = None
        self._graphs = self._capture(settings)
        memory.started()
        self.load_s = time.perf_counter() - started

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step and read its tokens back."""
        if self._graphs is not None and self._fits_graphs(plan, self._graphs):
            return self._run_graphs(plan, self._graphs)
        ready = prepare(plan, self.state, self.attention, self.pool.page_size)
        self.attention.plan(ready.batch, Phase.EAGER)
        self.attention.plan_in_graph(ready.batch)
        hidden = self.model.forward(ready.ids, ready.batch)
        self.state.seq_lens.index_copy_(0, ready.batch.rows, ready.batch.seq_lens)
        if any(chunk.request.prompt_logprobs is not None for chunk in plan.chunks):
            self._prompt_logprobs(plan, hidden)
        if not ready.sampled:
            return StepResult(sampled=[], tokens=[], outcome=None)
        logits = self.model.lm_head(hidden[ready.batch.last_tokens])
        outcome = sample(logits, [r.sample for r in ready.sampled], self._masks)
        self.state.set_next(ready.sampled_rows, outcome.ids)
        return StepResult(sampled=ready.sampled, tokens=read_back(outcome), outcome=outcome)

    def _fits_graphs(self, plan: StepPlan, graphs: DecodeGraphs) -> bool:
        """Whether a step can be made of one decode graph and a few prefill graphs."""
        if not graphs.fits(len(plan.decode)) or len(plan.chunks) > MAX_GRAPH_CHUNKS:
            return False
        prefill = self._prefill_graphs
        return not plan.chunks or (prefill is not None and all(prefill.fits(chunk) for chunk in plan.chunks))

    def _run_graphs(self, plan: StepPlan, graphs: DecodeGraphs) -> StepResult:
        """Replay a step: the decode rows, then each prefill chunk."""
        parts = [self._decode_graph(plan.decode, graphs)] if plan.decode else []
        for chunk in plan.chunks:
            if (part := self._prefill_graph(chunk)) is not None:
                parts.append(part)
        if not parts:
            return StepResult(sampled=[], tokens=[], outcome=None, graph=True)
        logprobs = [item for part in parts if part.outcome is not None for item in part.outcome.logprobs]
        first = parts[0].outcome
        outcome = None if first is None else Sampled(first.ids, first.broken, logprobs)
        return StepResult(
            sampled=[request for part in parts for request in part.sampled],
            tokens=[token for part in parts for token in part.tokens],
            outcome=outcome,
            graph=True,
        )

    def _decode_graph(self, requests: list[Request], graphs: DecodeGraphs) -> StepResult:
        """Replay a decode step; rows that want more than temperature and filters are sampled after it."""
        num, rows = len(requests), [r.sample for r in requests]
        done = graphs.run([r.row for r in requests])
        if all(is_plain(row) for row in rows):
            outcome = Sampled(done.ids[:num], done.broken[:num], [None] * num)
            enough = None
            if any(row.params.temperature > 0 for row in rows):
                drawn = graphs.draw(done, rows)
                outcome.ids, enough = drawn.ids[:num], drawn.enough[:num]
            tokens = read_back(outcome, enough)
            if REDRAW not in tokens:
                count(outcome.ids, rows)
                return StepResult(sampled=requests, tokens=tokens, outcome=outcome)
        outcome = sample(done.logits[:num], rows, self._masks)
        self.state.set_next(done.rows[:num], outcome.ids)
        return StepResult(sampled=requests, tokens=read_back(outcome), outcome=outcome)

    def _prefill_graph(self, chunk: Chunk) -> StepResult | None:
        """Replay a prefill chunk; None if no token follows it."""
        if self._prefill_graphs is None:
            return None
        done = self._prefill_graphs.run(chunk)
        if not chunk.samples:
            return None
        row = chunk.request.sample
        if is_plain(row) and row.params.temperature == 0:
            outcome = Sampled(done.ids, done.broken, [None])
            count(outcome.ids, [row])
        else:
            outcome = sample(done.logits, [row], self._masks)
            self.state.next_ids[chunk.request.row] = outcome.ids[0]
        return StepResult(sampled=[chunk.request], tokens=read_back(outcome), outcome=outcome)

    def _capture(self, settings: EngineSettings) -> DecodeGraphs | None:
        """Decode graphs, where device, backend and settings allow them."""
        if self.device.type != "cuda" or settings.disable_cuda_graph or self.attention.caps.graph == "none":
            return None
        parts = (self.model, self.attention, self.state, self.pool.page_size)
        pool = GraphPool(self.device)
        with torch.inference_mode():
            if self.attention.caps.graph == "mixed":
                self._prefill_graphs = PrefillGraphs(*parts, pool)
                self._prefill_graphs.capture_all()
            graphs = DecodeGraphs(*parts, settings.max_running_requests, pool)
            graphs.capture_some()
        return graphs

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> None:
        """Append the log probabilities of each chunk's successors within its prompt."""
        at = len(plan.decode)
        for chunk in plan.chunks:
            if chunk.request.prompt_logprobs is not None:
                self._chunk_logprobs(chunk, hidden[at : at + chunk.num_new])
            at += chunk.num_new

    def _chunk_logprobs(self, chunk: Chunk, hidden: Tensor) -> None:
        """`hidden` `[num_new, H]`: the state at position p gives the log probability of token p + 1."""
        request = chunk.request
        wanted, found = request.params.prompt_logprobs, request.prompt_logprobs
        if wanted is None or found is None:
            return
        if chunk.start == 0 and request.params.prompt_logprobs_start == 0:
            found.append(TokenLogprob(request.ids[0], None, []))
        first = max(chunk.start, request.params.prompt_logprobs_start - 1)
        last = min(chunk.start + chunk.num_new, request.num_prompt - 1)
        for begin in range(first, last, LOGIT_ROWS):
            end = min(begin + LOGIT_ROWS, last)
            logits = self.model.lm_head(hidden[begin - chunk.start : end - chunk.start])
            chosen = list(request.ids[begin + 1 : end + 1])
            found += rank_logprobs(logits, chosen, [wanted] * len(chosen))

    def _load(self, plugin: type[ModelPlugin], settings: EngineSettings, folder: Path) -> tuple[CausalLM, int]:
        with torch.inference_mode():
            model = plugin.build(self.config, BuildContext(device=self.device, dtype=self.dtype))
            if not isinstance(model, nn.Module):
                raise PluginError(f"model {self.config.architecture}: build() must return a torch.nn.Module")
            model.eval()
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            if settings.load_format == "dummy":
                fill_dummy(model)
            else:
                load_weights(model, plugin.weight_map(self.config), folder)
        return model, size


def read_back(outcome: Sampled, enough: Tensor | None = None) -> list[int | None]:
    """The step's one wait for the device: its tokens, None where the logits were not finite.

    Where `enough` is false, the token is `REDRAW`.
    """
    ids = outcome.ids if enough is None else torch.where(enough, outcome.ids, REDRAW)
    tokens: list[int] = torch.where(outcome.broken, -1, ids).tolist()
    return [None if token == -1 else token for token in tokens]


def _useful_threads(weight_bytes: int) -> int:
    """One thread per 64 MiB of weights: a barrier costs more than a smaller share of a step saves."""
    return max(1, min(len(os.sched_getaffinity(0)), weight_bytes >> 26))


def _model_plugin(plugins: LoadedPlugins) -> type[ModelPlugin]:
    planned = plugins.plan.of_kind("model")
    if len(planned) != 1:
        raise ModelError(f"the plugin plan must hold one model, it holds {len(planned)}")
    found: type[ModelPlugin] = plugins.get("model", planned[0].qualified)
    return found
