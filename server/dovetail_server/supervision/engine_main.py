"""The engine process: `python -m dovetail_server.supervision.engine_main SOCKET`.

`ProcessClient` starts it, nobody by hand.
"""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from pathlib import Path

import msgspec

from dovetail.base import log
from dovetail.base.orphans import wake_when_orphaned
from dovetail.base.settings import EngineSettings
from dovetail.contracts.errors import ConfigError, described, said
from dovetail.engine.loop import ClosedError, run_loop
from dovetail.messages import EngineFailed, Ready, Working
from dovetail.plugins import load
from dovetail.plugins.exits import ended_by, innermost, name_exits
from dovetail.plugins.loader import naming_plugin
from dovetail.plugins.manager import running_hooks
from dovetail.runtime.device.devices import likely_device
from dovetail_server.supervision import imports
from dovetail_server.supervision.stall_logger import StallLogger
from dovetail_server.supervision.wire import SocketTransport, Start, StartSigns

logger = logging.getLogger("dovetail.engine")
WARM_UP_S = 20.0
"""Longer than that, what structured outputs need does not keep the engine from being ready."""
ORPHANED = (
    "the process that this engine belongs to has ended without stopping it: it was killed, or code in it called C's "
    "exit(); the engine ends, too"
)
"""Of such an end nobody else is left to tell: whatever exit code it had, the log has this line."""


def main(argv: list[str]) -> int:
    """Connect, load the plan, build the engine, serve; returns the exit code."""
    wake_when_orphaned()
    log.follow("engine")
    # Ctrl-C, and a service manager's SIGTERM, reach the whole process group; the parent decides when the engine stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    transport = SocketTransport(Path(argv[0]))
    transport.exit_without_client()
    name_exits()
    try:
        serve(transport, transport.receive_start())
    except ClosedError:
        log.complain(f"dovetail: error: {ORPHANED}")
        return 1
    except ConfigError as error:
        transport.send(EngineFailed(said(error), user_error=True))
        return 2
    except SystemExit as error:  # nothing of ours raises it
        transport.send(
            EngineFailed(ended_by(f"sys.exit({error.code!r})", innermost(error.__traceback__)), user_error=False)
        )
        return 1
    except Exception as error:
        # The last resort of the process: whatever it was, the parent must hear of it.
        logger.critical("the engine stopped\n%s", traceback.format_exc())
        transport.send(EngineFailed(described(error), user_error=False))
        return 1
    return 0


def serve(transport: SocketTransport, start: Start) -> None:
    """Start the engine and run its loop."""
    log.setup(start.log_level, process="engine")
    settings = EngineSettings.model_validate(start.settings)
    device = likely_device(start.plan)
    device.wake(uses_first=settings.devices is None and settings.tensor_parallel_size == 1)
    compiler = None if settings.disable_compile_ahead else device.compiler()
    if compiler is not None:
        compiler.wake()
    with imports.for_good():
        plugins = load(start.plan, "engine")
        from dovetail.client.launch import make_engine  # imports torch: after the plan, which fails sooner
    with running_hooks(plugins):
        with StartSigns(transport), naming_plugin(plugins):
            core = make_engine(settings, plugins, start.hang_s)
            if compiler is not None:
                compiler.release()
            if start.num_hangs:
                core.recovery.hung(start.num_hangs)
            if core.grammars is not None:
                core.grammars.service.warm_up().wait(WARM_UP_S)
            imports.started()
        transport.send(Ready(msgspec.structs.replace(core.info, plugins=plugins.states())))
        with StallLogger(
            start.plan,
            start.hang_s,
            lambda: (core.step_count, core.executor.progress),
            lambda: core.has_work,
            lambda: transport.send(Working()),
            core.why_slow,
        ):
            run_loop(core, transport)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    imports.ending()
    sys.exit(status)
