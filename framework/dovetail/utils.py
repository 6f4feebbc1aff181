"""Helpers of notebooks and scripts under the name that SGLang's documents use: `from dovetail.utils import …`.

This is the name that people type; what it stands for is the server's (`dovetail_server.notebook`), as it starts one.
"""

from __future__ import annotations

from dovetail_server.notebook import (
    execute_shell_command,
    launch_server_cmd,
    print_highlight,
    terminate_process,
    wait_for_server,
)

__all__ = ["execute_shell_command", "launch_server_cmd", "print_highlight", "terminate_process", "wait_for_server"]
