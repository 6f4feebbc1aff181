"""smg in a process of its own: `python -m dovetail_server.gateway.smg_process`, which reads its arguments, a JSON list.

They come through standard input, as other users of the machine see command lines, and there is a key among them. The
process ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import sys
import threading


def main() -> int:
    """Run smg until it ends or the parent does."""
    arguments = json.loads(sys.stdin.readline())
    from smg.launch_router import launch_router, parse_router_args

    threading.Thread(target=end_with_parent, name="dovetail-parent-watch", daemon=True).start()
    launch_router(parse_router_args(arguments))
    return 0


def end_with_parent() -> None:
    """End this process when nobody holds the other end of its standard input any more."""
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
