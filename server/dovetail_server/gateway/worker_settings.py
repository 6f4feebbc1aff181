"""What each worker is started with: the settings of all, its share of devices and threads, and its port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from pydantic import SecretStr

from dovetail.contracts.errors import ConfigError
from dovetail.processing.plugin_settings import ENV_PREFIX, GivenOption
from dovetail_server.settings.serve import ServeSettings

OURS = frozenset(
    (
        *("config", "host", "port", "data_parallel_size", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"),
        *("root_path", "allow_origins", "allowed_hosts", "max_connections", "max_connections_per_address"),
        *("closed_probes", "disable_access_log", "log_format", "devices", "num_threads", "random_seed"),
        *("stream_write_timeout", "keep_alive_timeout"),
    )
)
"""Settings that the address in front has for all workers, or that differ from worker to worker."""
KEEP_ALIVE_S = 300
"""Longer than the relay keeps a connection that it does not use."""
COUNT = "import sys; from dovetail.runtime.device.devices import count; print(count(sys.argv[1]))"
COUNT_S = 120.0


def divide(settings: ServeSettings, num_gpus: int, num_cores: int) -> list[dict[str, Any]]:
    """Return what differs between workers: devices, threads and seeds.

    Args:
        settings: `data_parallel_size` workers of `tensor_parallel_size` ranks each.
        num_gpus: GPUs that this process sees; 0 for the CPU.
        num_cores: Cores that it may use.

    Raises:
        ConfigError: There are fewer GPUs or cores than that takes.
    """
    num, ranks = settings.data_parallel_size, settings.tensor_parallel_size
    said = f"--data-parallel-size {num}" + (f" with --tensor-parallel-size {ranks}" if ranks > 1 else "")
    seeds = [{} if settings.random_seed is None else {"random_seed": settings.random_seed + i} for i in range(num)]
    if not num_gpus:
        if settings.devices is not None:
            raise ConfigError(f"--devices {settings.device_list}: there is no GPU here; leave it out")
        most = settings.num_threads or max(1, num_cores // (num * ranks))
        if num * ranks > num_cores:
            raise ConfigError(f"{said}: {num_cores} cores are here; give at most {max(1, num_cores // ranks)}")
        return [{**seed, "num_threads": most} for seed in seeds]
    devices = settings.devices if settings.devices is not None else tuple(range(num_gpus))
    shown = f"--devices {settings.device_list} names" if settings.devices is not None else "this process sees"
    if len(devices) < num * ranks or (settings.devices is not None and len(devices) != num * ranks):
        fix = f"give {num * ranks} devices" if settings.devices is not None else f"give at most {num_gpus // ranks}"
        raise ConfigError(f"{said}: {num * ranks} GPUs are needed, and {shown} {len(devices)}; {fix}")
    if len(set(devices)) < len(devices):
        raise ConfigError(f"--devices {settings.device_list}: one is given twice; every worker needs its own")
    if lost := [index for index in devices if index >= num_gpus]:
        raise ConfigError(f"--devices {settings.device_list}: there is no device {lost[0]}; {num_gpus} are here")
    threads = {} if settings.num_threads is None else {"num_threads": settings.num_threads}
    return [{**seeds[i], **threads, "devices": list(devices[i * ranks : (i + 1) * ranks])} for i in range(num)]


def count_gpus(settings: ServeSettings) -> int:
    """Return how many GPUs the workers may divide, 0 for the CPU. Another process looks: it ends with what it loaded.

    Raises:
        ConfigError: CUDA was asked for, and there is none.
    """
    if settings.device == "cpu":
        return 0
    command = [sys.executable, "-c", COUNT, settings.device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COUNT_S, check=False)
    lines = done.stdout.split()
    if done.returncode or not lines:
        raise ConfigError(f"GPUs cannot be counted: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    num = int(lines[-1])
    if settings.device != "auto" and not num:
        raise ConfigError(f"--device {settings.device}: there is no GPU here; give --device cpu")
    return num


def worker_config(settings: ServeSettings, port: int, share: dict[str, Any]) -> str:
    """Return the configuration file of a worker, whose keys it holds: to be handed over where nobody can read it."""
    given = {name: getattr(settings, name) for name in settings.model_fields_set if name not in OURS}
    if "model_path" in given:  # by now the folder of a hub's model, which is served under the name that was given
        given["served_model_name"] = settings.served_model_name
    config = {
        **{name: plain(value) for name, value in given.items()},
        "host": "127.0.0.1",
        "port": port,
        "log_format": settings.log_format,
        "disable_access_log": True,
        "keep_alive_timeout": KEEP_ALIVE_S,
        "stream_write_timeout": 0,  # of a stream's reader, whom the relay watches
        **share,
    }
    return json.dumps(config)


def plain(value: Any) -> Any:
    """Return a setting's value as a configuration file has it."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, GivenOption):
        return plain(value.value)
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return str(value)


def worker_environment() -> dict[str, str]:
    """Return this process's environment without settings: the workers get these from their file."""
    settings = {f"{ENV_PREFIX}{name.upper()}" for name in ServeSettings.model_fields}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in settings and not (name.startswith(ENV_PREFIX) and "__" in name)
    }
