"""Count hook calls while tokens are generated, and time what a request observer adds to a request.

    python tests/benchmarks/hook_calls.py [--requests 8] [--tokens 64]

A plugin that implements every hook is enabled in a real server around a real engine with the demo model. Target: no
hook is called between "ready" and the end, so calls per token = 0.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pluggy

from dovetail.client.inprocess import InProcessClient
from dovetail.contracts import RequestObserver, RequestStart
from dovetail.demo import MODEL_DIR
from dovetail.messages import SamplerParams, Submit
from dovetail.plugins import hookspecs
from dovetail.processing.plan import plan_plugins
from dovetail_server.observe.observers import Observers
from dovetail_server.serving.hooks import ApiHooks
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start.run import engine_settings
from dovetail_testing.folder import unread_model
from dovetail_testing.site import FakeSite


def every_hook() -> str:
    """Return the source of a plugin that implements each hook and notes each call."""
    lines = ["import sys", "from dovetail.contracts import hookimpl", "plugin = sys.modules[__name__]", "calls = []"]
    for name, function in vars(hookspecs).items():
        if inspect.isfunction(function) and name.startswith("dovetail_"):
            lines += ["@hookimpl", f"def {name}{_arguments(function)}:", f"    calls.append({name!r})"]
    return "\n".join(lines) + "\n"


def _arguments(function: Any) -> str:
    return f"({', '.join(inspect.signature(function).parameters)})"


async def generate(client: InProcessClient, requests: int, tokens: int) -> int:
    """Run requests side by side and return the number of tokens."""

    async def one(index: int) -> int:
        params = SamplerParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        submit = Submit(rid=str(index), prompt_ids=[5, 6, 7, 8 + index], params=params)
        return sum([len(delta.ids) async for delta in client.submit(submit)])

    return sum(await asyncio.gather(*(one(index) for index in range(requests))))


async def measure(site: FakeSite, requests: int, tokens: int) -> tuple[int, int, int]:
    """Return the hook calls at start, those while generating, and the tokens."""
    sys.path.insert(0, str(site.root))
    settings = ServeSettings(model_path=str(MODEL_DIR), plugin=["acme"], device="cpu", num_threads=1)
    settings, _, plan = plan_plugins(settings, unread_model())
    hooks = ApiHooks.start(plan)
    client = InProcessClient(engine_settings(settings), plan)
    await client.start()
    noted = sys.modules["acme_hooks"].calls
    traced: list[str] = []
    hooked: pluggy.PluginManager = hooks.manager._pm  # type: ignore[union-attr]
    hooked.add_hookcall_monitoring(lambda name, *rest: traced.append(name), lambda *rest: None)
    at_start = len(noted)
    count = await generate(client, requests, tokens)
    while_running = len(noted) - at_start + len(traced)
    await client.close()
    hooks.stop()
    return at_start, while_running, count


def observer_us() -> float:
    """Return the time in µs that telling one observer of one request's start takes."""
    observers = Observers()
    observers.add("dovetail_request_observers", "bench", RequestObserver())
    start = RequestStart(request_id="x", num_choices=1, num_prompt_tokens=1)
    began = time.perf_counter()
    for _ in range(100_000):
        observers.notify("request_started", start)
    return (time.perf_counter() - began) * 10


def main() -> int:
    """Print the figures; exit code 1 where a hook ran per token."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = FakeSite(Path(folder))
        groups = {"dovetail.hooks.v1": {"acme": "acme_hooks:plugin"}}
        roles = {"hooks": {"acme": {"roles": ["api", "engine"]}}}
        site.add("acme", "1.0", groups, {"acme_hooks.py": every_hook()}, manifest=roles)
        at_start, while_running, tokens = asyncio.run(measure(site, args.requests, args.tokens))
    print(
        f"hook calls: {at_start} at start, {while_running} during {tokens} tokens: {while_running / tokens:g} per token"
    )
    print(f"a request observer's call: {observer_us():.2f} µs, twice per request")
    return int(while_running > 0 or at_start == 0)


if __name__ == "__main__":
    raise SystemExit(main())
