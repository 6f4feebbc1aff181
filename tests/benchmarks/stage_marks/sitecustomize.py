"""Imported by each process that `image_stages.py` starts: functions named in `STAGES` write down when they ran.

A line of the process's file in `$DOVETAIL_STAGES`: the stage, begin and end by the clock that all processes share,
processor time, page faults. These are the thread's; of stages in `WITH_THREADS`, the process's, which does nothing else
meanwhile. Code that is measured has no part in this. With `$DOVETAIL_STAGES_WAIT`, stages of the device end when a GPU
has computed them.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

STAGES = {
    "dovetail_server.reading.request": {"raw_body": "http: body received", "elsewhere": "http: read elsewhere"},
    "dovetail_server.reading.pool": {
        "WorkerExchange._send": "http: to the copy",
        "WorkerExchange.run": "http: copy works",
    },
    "dovetail_server.reading.work": {"do": "copy: job"},
    "dovetail.base.forks": {"receive_bytes": "copy: receive", "receive": "copy: message awaited"},
    "dovetail_server.reading.parse": {"decoded": "JSON", "requests_of": "schema"},
    "dovetail_server.media.sources": {"data_of": "copy: base64"},
    "dovetail.messages.media": {
        "framed_digest": "copy: digests",
        "write_arrays": "copy: write arrays",
        "read_arrays": "engine: map arrays",
    },
    "dovetail_server.media.decode": {"decoded": "copy: decode"},
    "dovetail_server.media.loader": {
        "ImageLoader._ask": "copy: ask the server",
        "ImageLoader._decoded": "copy: image whole",
    },
    "dovetail_models.qwen2_vl_images": {"Qwen2VLImages.process": "copy: resize, patches"},
    "dovetail.processing.prompts": {"chat_prompt": "conversation whole"},
    "dovetail.processing.image_parts": {"expanded": "copy: expand"},
    "dovetail_server.reading.wire": {
        "BodyResult.of_requests": "copy: pack",
        "BodyResult.read_requests": "http: unpack",
    },
    "dovetail_server.serving.job": {"make_job": "http: job"},
    "dovetail.engine.streams": {"StreamClient.submit": "http: submit"},
    "dovetail.engine.core": {"EngineCore.handle": "engine: receive", "EngineCore._launch": "engine: launch"},
    "dovetail.engine.scheduler": {"Scheduler.schedule": "engine: schedule"},
    "dovetail.engine.step_builder": {"StepBuilder.build": "engine: build"},
    "dovetail.runtime.device.row_images": {
        "RowImages.encode": "engine: tower launched",
        "RowImages._admit": "engine: positions",
    },
    "dovetail.runtime.stepper": {
        "Stepper.run_eagerly": "engine: prefill launched",
        "Stepper.read": "engine: tokens awaited",
    },
}
"""By module, and by function in it."""
WITH_THREADS = ("copy: job", "copy: image whole", "copy: resize, patches")
ON_DEVICE = ("engine: tower launched", "engine: prefill launched")


class Marks:
    """The file of one process; a fork has one of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pid, self._file = folder, 0, -1

    def write(self, stage: str, began: float, ended: float, cpu_s: float, faults: int) -> None:
        """Note that a stage ran."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._file = os.open(
                self._folder / f"{self._pid}", os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600
            )
        os.write(self._file, json.dumps([stage, began, ended, cpu_s, faults]).encode() + b"\n")


def _used(*, whole: bool) -> tuple[float, int]:
    if whole:
        return time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def _wait_for_device() -> None:
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def marked(function: Callable[..., Any], stage: str, marks: Marks) -> Callable[..., Any]:
    """Return the function, noting when it ran. Of a coroutine, its waiting is part of it, and no processor time."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def waited(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return await function(*args, **kwargs)
            finally:
                marks.write(stage, began, time.monotonic(), 0.0, 0)

        return waited

    whole = stage in WITH_THREADS
    waits = stage in ON_DEVICE and "DOVETAIL_STAGES_WAIT" in os.environ

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        (cpu_s, faults), began = _used(whole=whole), time.monotonic()
        try:
            found = function(*args, **kwargs)
            if waits:
                _wait_for_device()
            return found
        finally:
            ended, (cpu_then_s, faults_then) = time.monotonic(), _used(whole=whole)
            marks.write(stage, began, ended, cpu_then_s - cpu_s, faults_then - faults)

    return called


def mark_functions(module: ModuleType, marks: Marks) -> None:
    """Put marked functions in place of a module's own."""
    for path, stage in STAGES[module.__name__].items():
        *owner, name = path.split(".")
        holder: Any = functools.reduce(getattr, owner, module)
        if (found := inspect.getattr_static(holder, name, None)) is None:
            continue  # of an older checkout
        if isinstance(found, classmethod):
            setattr(holder, name, classmethod(marked(found.__func__, stage, marks)))
        else:
            setattr(holder, name, marked(found, stage, marks))


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `STAGES`."""

    def __init__(self, marks: Marks) -> None:
        self._marks, self._active = marks, False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Have others find it."""
        if name not in STAGES or self._active:
            return None
        self._active = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._active = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                mark_functions(module, self._marks)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if folder := os.environ.get("DOVETAIL_STAGES"):
    sys.meta_path.insert(0, Finder(Marks(Path(folder))))
