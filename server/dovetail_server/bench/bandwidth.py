"""Measures the memory's copy bandwidth: `python -m dovetail_server.bench.bandwidth [DEVICE]` prints JSON.

It runs in a process of its own, so that neither torch nor a device's context stays in the client.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from dovetail_server.bench.roofline import Bandwidth

MAX_COPY_BYTES = 2 << 30
HOST_COPY_BYTES = 256 << 20
REPEATS = 8
MOST_REPEATS = 200
LEAST_S = 1.0
TIMEOUT_S = 120.0


def copy_bandwidth(name: str) -> tuple[float, str | None]:
    """Return bytes a second of a large copy, reads and writes counted, and the device's model; None for the host's.

    Args:
        name: As `--device`. A server may hold most of the device's memory: the copy takes a quarter of what is free.
    """
    import torch

    from dovetail.plugins import Registry
    from dovetail.runtime.device.devices import choose, installed

    cls = choose(installed(Registry.scan(), name))
    device = cls(cls.take(None))
    memory = device.memory()
    size = HOST_COPY_BYTES if memory is None else max(64 << 20, min(MAX_COPY_BYTES, memory[0] // 4))
    source = torch.zeros(size, dtype=torch.uint8, device=device.place)
    target = torch.zeros_like(source)
    times: list[float] = []
    # A server at work on the same device takes turns with the copies: the fastest one is the memory's own.
    while len(times) < REPEATS or (sum(times) < LEAST_S and len(times) < MOST_REPEATS):
        device.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        device.synchronize()
        times.append(time.perf_counter() - started)
    return 2 * size / min(times), None if device.is_host else device.model


async def measure(device: str) -> Bandwidth | str:
    """Measure in a child process; returns why there is no figure where that fails."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "dovetail_server.bench.bandwidth", device)
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"measuring the copy bandwidth took more than {TIMEOUT_S:g} s; give --bandwidth"
    if process.returncode != 0:
        last = (err.decode("utf-8", "replace").strip().splitlines() or ["no message"])[-1]
        return f"the copy bandwidth could not be measured ({last}); give --bandwidth"
    found = json.loads(out)
    device = found["device"]
    return Bandwidth(
        bytes_per_s=found["bytes_per_s"], origin=f"copy measured on {device or 'host memory'}", device=device
    )


def main() -> int:
    """Print the figure as JSON."""
    rate, name = copy_bandwidth(sys.argv[1] if len(sys.argv) > 1 else "auto")
    print(json.dumps({"bytes_per_s": rate, "device": name}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
