"""Puts an engine together: the engine itself, and the executor that computes its steps."""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import Future

from dovetail.engine.core import EngineCore
from dovetail.engine.standstill import EARLY
from dovetail.errors import DovetailError
from dovetail.executor.group import STEP_S, GroupExecutor
from dovetail.executor.local import LocalExecutor
from dovetail.plugins import LoadedPlugins
from dovetail.settings import EngineSettings
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
    tokenizer: Future[Tokenizer] = Future()
    _preload_grammars(settings, plugins, tokenizer)
    executor: GroupExecutor | LocalExecutor
    if settings.tensor_parallel_size > 1:
        limit_s = STEP_S if hang_s is None else EARLY * hang_s
        executor = GroupExecutor(settings, plugins, limit_s=limit_s)
    else:
        executor = LocalExecutor(settings, plugins)
    return EngineCore(settings, plugins, executor, tokenizer)


def _preload_grammars(settings: EngineSettings, plugins: LoadedPlugins, tokenizer: Future[Tokenizer]) -> None:
    """Have grammar backends import what they need, and the tokenizer read, while the model loads.

    Afterwards requests would wait for it: reading a large tokenizer takes a second in which nothing else of the
    process runs, whichever thread does it.
    """
    backends = []
    with contextlib.suppress(DovetailError):  # the engine says so when it makes them
        backends = [backend for _, backend in plugins.candidates("grammar_backend")]

    def preload() -> None:
        try:
            found = Tokenizer.load(settings.tokenizer_folder)
            _ = found.bytes_table
            tokenizer.set_result(found)
        except BaseException as error:
            tokenizer.set_exception(error)  # whoever asks for a grammar is told
        for backend in backends:
            try:
                backend.preload()
            except Exception as error:
                logger.debug("grammar backend %s is not preloaded: %s", backend.__name__, error)

    if backends:
        threading.Thread(target=preload, name="grammar preload", daemon=True).start()
