"""Runs requests through a real engine in this process: the shortest way to test a model or an attention backend."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dovetail.base.settings import EngineSettings
from dovetail.checkpoint.formats import Formats
from dovetail.client.inprocess import InProcessClient
from dovetail.client.launch import make_engine
from dovetail.contracts.scheduling import SchedulePolicy
from dovetail.engine.core import EngineCore
from dovetail.engine.policy import Policy, policy_of
from dovetail.messages import SamplerParams, Submit, TokenDelta
from dovetail.plugins import PluginPlan, Registry, load, make_plan
from dovetail.processing.plan import NAMED
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.hf_config import quant_method, vision_type


def make_plans(
    folder: Path,
    *,
    grammar_backend: str | None = None,
    logits_processors: Sequence[str] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    **changes: Any,
) -> tuple[EngineSettings, PluginPlan]:
    """Return settings and plan for a checkpoint; float32 on CPU and a small cache unless `changes` says otherwise.

    `options` are settings of plugins, by their names.
    On CUDA, kernels are compiled when they are first launched: a test seldom launches all of them.
    """
    defaults: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_total_tokens": 8192}
    defaults["disable_compile_ahead"] = True
    settings = EngineSettings(model_path=str(folder), **{**defaults, **changes})
    formats = Formats.installed(settings.load_format)
    model = ModelFolder(folder, weights=False, formats=formats)
    plan = make_plan(
        Registry.scan(),
        model=model.architecture,
        prefill_attention_backend=settings.prefill_attention_backend,
        decode_attention_backend=settings.decode_attention_backend,
        grammar_backend=grammar_backend,
        logits_processor=logits_processors,
        options=options,
        checkpoint=formats.used(folder, settings.tokenizer_folder),
        **{kind: getattr(settings, name) for kind, name in NAMED.items() if name in EngineSettings.model_fields},
        quant_method=quant_method(model.config),
        vision=vision_type(model.config),
        model_impl=settings.model_impl,
        device=settings.device,
    )
    return settings, plan


@cache
def _policy_class(name: str) -> type[SchedulePolicy]:
    plan = make_plan(Registry.scan(), schedule_policy=name)
    found: type[SchedulePolicy] = load(plan, "engine").get("schedule_policy", name)
    return found


def make_policy(name: str = "fcfs") -> Policy:
    """Make an installed schedule policy as an engine does, for a scheduler without an engine."""
    return policy_of(_policy_class(name), name)


def make_client(folder: Path, **changes: Any) -> InProcessClient:
    """Make an engine client for a checkpoint, with the settings of `make_plans`."""
    return InProcessClient(*make_plans(folder, **changes))


def make_core(folder: Path, **changes: Any) -> EngineCore:
    """Make an engine without a loop around it, with the settings of `make_plans`: its owner steps it."""
    settings, plan = make_plans(folder, **changes)
    return make_engine(settings, load(plan, "engine"))


async def collect(client: InProcessClient, request: Submit) -> list[TokenDelta]:
    """Return all deltas of one request."""
    return [delta async for delta in client.submit(request)]


def generate(
    folder: Path, prompts: Sequence[list[int]], params: SamplerParams | Sequence[SamplerParams], **changes: Any
) -> list[list[TokenDelta]]:
    """Run all prompts at once through a fresh engine.

    Args:
        folder: The checkpoint.
        prompts: Token ids.
        params: One for all, or one per prompt.
        changes: Engine settings.

    Returns:
        The deltas of each request.

    Raises:
        RuntimeError: The engine still holds pages or requests when all have ended.
    """
    each = [params] * len(prompts) if isinstance(params, SamplerParams) else params
    submits = [Submit(rid=str(i), prompt_ids=p, params=q) for i, (p, q) in enumerate(zip(prompts, each, strict=True))]
    return serve(folder, submits, **changes)


def serve(folder: Path, submits: Sequence[Submit], **changes: Any) -> list[list[TokenDelta]]:
    """As `generate`, for requests of any kind."""

    async def main() -> list[list[TokenDelta]]:
        client = make_client(folder, **changes)
        await client.start()
        try:
            outputs = await asyncio.gather(*(collect(client, submit) for submit in submits))
            stats = await client.control("stats")
            if stats["num_running"] or stats["num_queued"] or stats["num_used_tokens"]:
                raise RuntimeError(f"the engine still holds something: {stats}")
            return list(outputs)
        finally:
            await client.close()

    return asyncio.run(main())


def tokens(deltas: Sequence[TokenDelta]) -> list[int]:
    """Return the token ids of one request's deltas."""
    return [token for delta in deltas for token in delta.ids]
