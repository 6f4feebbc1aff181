"""Says what a process sees of itself, or ends as it is told; run by `test_warm_starts.py`."""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def facts() -> dict[str, object]:
    """What can be told apart."""
    fds = [int(fd) for fd in os.listdir("/proc/self/fd")]
    open_fds = [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")]
    sockets = [fd for fd in open_fds if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")]
    interrupt, terminate = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "shown": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0"),
        "path": sys.path[0],
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "cwd": os.getcwd(),
        "example": os.environ.get("DOVETAIL_EXAMPLE"),
        "data": os.environ.get("XDG_DATA_HOME"),
        "fds": sorted(set(open_fds) - set(sockets)),  # a socket: to its template
        "name": __name__,
        "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
        "cores": len(os.sched_getaffinity(0)),
        "interrupt": getattr(interrupt, "__name__", str(interrupt)),
        "terminate": getattr(terminate, "name", str(terminate)),
        "threads": len(os.listdir("/proc/self/task")),
        "unbuffered": sys.stdout.write_through,
        "encoding": sys.stdout.encoding,
        "prefix": sys.prefix,
        "has_torch": "torch" in sys.modules,
    }


def end(how: str) -> None:
    """End in some way."""
    if how == "exit 7":
        sys.exit(7)
    if how == "exit words":
        sys.exit("words")
    if how == "raise":
        raise ValueError("it is wrong")
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    if how == "atexit":
        atexit.register(lambda: print("at exit", file=sys.stderr))
    if how == "thread":
        threading.Timer(0.05, lambda: print("a thread", file=sys.stderr)).start()
    if how == "_exit":
        os._exit(5)
    if how == "abort":
        os.abort()


def main(argv: list[str]) -> None:
    """Do what the first argument says."""
    if argv[:1] == ["--echo"]:
        lines = sys.stdin.readlines()
        sys.stdout.writelines(lines)
        print("read", len(lines), file=sys.stderr)
        sys.exit(3)
    if argv[:1] == ["--wait"]:
        print("waiting", flush=True)
        time.sleep(60)
    if argv[:1] == ["--end"]:
        end(argv[1])
        return
    found = facts()
    if argv[:1] == ["--child"]:
        command = [sys.executable, __file__]
        found["child"] = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
