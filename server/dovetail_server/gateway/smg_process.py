"""smg in a process of its own: `python -m dovetail_server.gateway.smg_process`, which reads its arguments, a JSON list.

They come through standard input, as other users of the machine see command lines, and there is a key among them. The
process ends when its standard input does.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import stat
import struct
import sys
import threading
import time

SO_ATTACH_FILTER = 26
"""Linux; Python's `socket` has no name for it."""
DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
"""A packet filter of one instruction: return 0 bytes of each packet."""


def main() -> int:
    """Run smg until it ends or the parent does."""
    arguments = json.loads(sys.stdin.readline())
    from smg.launch_router import launch_router, parse_router_args

    parsed = parse_router_args(arguments)
    threading.Thread(target=end_with_parent, name="dovetail-parent-watch", daemon=True).start()
    threading.Thread(target=close, args=(parsed.prometheus_port,), name="dovetail-close-metrics", daemon=True).start()
    launch_router(parsed)
    return 0


def close(port: int) -> None:
    """Let nobody connect to a port on which this process listens, or soon will.

    smg always serves its metrics, and to anybody: without a port it takes 29000 on every address, and it ends where the
    port is taken. Nobody here reads them. (Other systems than Linux have no such filter.)
    """
    while sys.platform == "linux" and not any(_is_closed(int(name), port) for name in os.listdir("/proc/self/fd")):
        time.sleep(0.005)


def _is_closed(number: int, port: int) -> bool:
    """Close a listening socket of the port for connections; false where a file is none, or is gone."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
        with socket.socket(fileno=os.dup(number)) as found:
            if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) or found.getsockname()[1:2] != (port,):
                return False
            filtered = struct.pack("HL", 1, ctypes.addressof(DROP_ALL))
            found.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filtered)
            return True
    except OSError:
        return False


def end_with_parent() -> None:
    """End this process when nobody holds the other end of its standard input any more."""
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
