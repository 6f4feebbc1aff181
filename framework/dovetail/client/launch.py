"""Puts an engine together: the engine itself, and the executor that computes its steps."""

from __future__ import annotations

import contextlib
import logging
import threading

from dovetail.base.settings import EngineSettings
from dovetail.checkpoint.formats import Formats
from dovetail.contracts.errors import DovetailError
from dovetail.engine.core import EngineCore
from dovetail.engine.first_requests import serve_first
from dovetail.engine.loop import EARLY
from dovetail.executor.group import STEP_S, GroupExecutor
from dovetail.executor.local import LocalExecutor
from dovetail.grammar.compile.early import EarlyTokenizer
from dovetail.plugins import LoadedPlugins
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.text.tokenizer.ends import end_ids
from dovetail.text.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def make_engine(settings: EngineSettings, plugins: LoadedPlugins, hang_s: float | None = None) -> EngineCore:
    """Load the model, and make the engine over it. Importing this module imports torch.

    Args:
        settings: Of the engine.
        plugins: Of this process.
        hang_s: After so long without a step the engine is taken for hanging. A rank that does is found, and named,
            before that.

    Raises:
        ConfigError: The settings, the model or a plugin is at fault.
    """
    formats = Formats.of_plan(plugins, settings.load_format)
    folder = ModelFolder(settings.folder, settings.tokenizer_folder, formats=formats)
    tokenizer = None
    if plugins.plan.of_kind("grammar_backend"):
        path, texts = settings.tokenizer_folder, folder.texts
        tokenizer = EarlyTokenizer(path, lambda: Tokenizer.of_files(path, texts), lists=texts.stored is None)
    _preload_grammars(plugins)
    ends = end_ids(folder.texts)
    if settings.tensor_parallel_size > 1:
        limit_s = STEP_S if hang_s is None else EARLY * hang_s
        executor: LocalExecutor = GroupExecutor(settings, plugins, limit_s=limit_s)
    else:
        executor = LocalExecutor(settings, plugins)
    core = EngineCore(settings, plugins, executor, tokenizer, eos_ids=ends)
    if executor.info.device != "cpu" and executor.info.generates:
        serve_first(core)
    plugins.check_torch()
    return core


def _preload_grammars(plugins: LoadedPlugins) -> None:
    """Have grammar backends import what they need while the model loads: afterwards, requests would wait for it."""
    backends = []
    with contextlib.suppress(DovetailError):  # the engine says so when it makes them
        backends = [backend for _, backend in plugins.candidates("grammar_backend")]

    def preload() -> None:
        for backend in backends:
            try:
                backend.preload()
            except Exception as error:
                logger.debug("grammar backend %s is not preloaded: %s", backend.__name__, error)

    if backends:
        threading.Thread(target=preload, name="grammar preload", daemon=True).start()
