"""A server over a scripted engine in a process of its own, to be killed. Arguments: model folder, settings as JSON."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import threading
from pathlib import Path
from typing import Any


def main(folder: str, options: str) -> None:
    path = Path(__file__).parents[1] / "server" / "conftest.py"
    spec = importlib.util.spec_from_file_location("server_tests", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules["server_tests"] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    settings: dict[str, Any] = json.loads(options)
    delay_s = settings.pop("delay_s", 0.0)
    harness = module.Harness(Path(folder), min_free_disk_bytes=0, **settings)
    harness.engine.delay_s = delay_s
    harness.eventually(lambda: harness.server.started)
    asyncio.run_coroutine_threadsafe(harness.state.storage.resume(), harness.loop)
    print(harness.port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
