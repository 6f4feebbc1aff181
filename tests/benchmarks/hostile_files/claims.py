"""What files that claim sizes have in common: values that no size should have, checkpoints, and what reads them."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import requests
import torch

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.needs import unserved
from dovetail.plugins import LoadedPlugins, Registry, load, make_plan
from dovetail.processing.embeddings import Embedder
from dovetail.processing.plugin_settings import PluginSettings
from dovetail.processing.prepare import check_model
from dovetail.processing.reranker import says_so
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.quantization import choose_quantization, converted, factory_of
from dovetail.runtime.hf_config import CONFIG_KEYS, quant_method
from dovetail.runtime.memory.plan import DeviceBytes, plan_memory
from dovetail_server.quantize.checkpoint import quantize
from dovetail_testing.targets import target_for

sys.path.append(str(Path(__file__).parents[2] / "models"))
from families import make_checkpoint
from server_tiny import write_model

NUMBERS: list[Any] = [
    *(-1, 0, 1, 2, 3, 5, 7, 16, 31, 63, 65, 100, 255, 1000, 4097, 65_535, 65_537, 10**6, 10**7),
    *(sign * (1 << bits) + more for bits in (15, 16, 20, 24, 31, 32, 40, 53, 62, 63, 64, 70) for sign in (1, -1)
      for more in (-1, 0, 1)),
    *(10**18, 10**30, 10**300, float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 0.5, 1.5, -0.0),
]  # fmt: skip
OTHERS: list[Any] = [
    *(True, False, None, "", "7", "x", "true", "nan", "1e9", "\0", "../../x", "é" * 3000),
    *([], {}, [[]], [None], {"": 1}),
    *([1] * 9999, ["x"] * 999, [10**9], {"a": {"b": [1, {"c": 2}]}}, [1 << 40] * 3, {"full_attention": {}}),
]
DEVICE = DeviceBytes(kind="cpu", name="cpu", total=4 << 30, free=4 << 30)
LIMIT_S, READY_S = 10.0, 120.0


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


def value(rng: random.Random) -> Any:
    """Draw a value."""
    return rng.choice(NUMBERS if rng.random() < 0.7 else OTHERS)


@cache
def checkpoint(kind: str) -> Path:
    """A tiny checkpoint of a family; not among those that are removed."""
    made = write_model(Path(tempfile.mkdtemp(dir="/tmp")))
    make_checkpoint(made, kind, vocab_size=300)
    for method in ("", "gguf"):  # imported once, and not in each process that reads a file
        plugins_of(ModelFolder.read(made).architecture, method)
    return made


@cache
def packed(method: str) -> Path:
    """The same with its weights in few bits."""
    plain, made = checkpoint("qwen3"), Path(tempfile.mkdtemp(dir="/tmp"))
    folder, model = ModelFolder.read(plain), plugins_of("Qwen3ForCausalLM", "").get("model", "Qwen3ForCausalLM")
    quantize(folder, made, method, model, folder.model_config(model.config_from_hf))
    return made


@cache
def plugins_of(architecture: str, method: str) -> LoadedPlugins:
    """Load the plugins of a model."""
    plan = make_plan(
        Registry.scan(), model=architecture, quantization="auto", quant_method=method, model_impl="dovetail"
    )
    plugins = load(plan, "engine")
    plugins.get("model", plan.of_kind("model")[0].qualified)
    return plugins


def build(folder: ModelFolder, plugins: LoadedPlugins, config: ModelConfig) -> None:
    """Build the model's layers, as its weights are stored."""
    model = plugins.get("model", plugins.plan.of_kind("model")[0].qualified)
    chosen = choose_quantization(plugins, folder.config)
    method = None if chosen is None else chosen[1]
    checkpoint = converted(method, folder, model, config, target_for(config.dtype))
    factory = factory_of(method, folder.config, model.weight_map(config), checkpoint.headers)
    dtype = getattr(torch, config.dtype)
    model.build(config, BuildContext(device=torch.device("cpu"), dtype=dtype, factory=factory))


def read(path: Path) -> float:
    """Do what a start does until weights are read: check, translate, plan, build.

    Raises:
        ConfigError: The file is refused.
        TimeoutError: It took longer than any such file may.
    """
    began = time.process_time()
    settings = PluginSettings(model_path=str(path), device="cpu")
    check_model(settings)
    folder = ModelFolder.read(path)
    plugins = plugins_of(folder.architecture, quant_method(folder.config))
    model = plugins.get("model", plugins.plan.of_kind("model")[0].qualified)
    config = folder.model_config(model.config_from_hf, served=CONFIG_KEYS if quant_method(folder.config) else ())
    if (reason := unserved(config)) is not None:
        raise ModelError(reason)
    Embedder.of_folder(folder, config.pool)
    says_so(folder)
    plan = plan_memory(settings, config, config.dtype, DEVICE, 1 << 20, has_graphs=False)
    assert plan.context_len <= config.max_position_embeddings
    build(folder, plugins, config)
    if time.process_time() - began > LIMIT_S:
        raise TimeoutError(f"{time.process_time() - began:.0f} s of processor time")
    return 0.0


def start(path: Path) -> dict[str, Any]:
    """Start a server with its own engine, chat once, and end it; returns what became of it, and the largest memory."""
    with socket.create_server(("127.0.0.1", 0)) as free, tempfile.TemporaryFile("w+") as errors:
        port = free.getsockname()[1]
        free.close()
        flags = ["--port", str(port), "--device", "cpu", "--log-level", "error", "--max-total-tokens", "1024"]
        flags += ["--file-storage-path", str(path.parent / "storage"), "--min-free-disk-bytes", "0"]
        command = [sys.executable, "-m", "dovetail", "serve", str(path), *flags]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, text=True)
        peak = 0.0
        status = None
        try:
            deadline = time.monotonic() + READY_S
            while process.poll() is None and time.monotonic() < deadline:
                peak = max(peak, _largest_mib(process.pid))
                if _status(f"http://127.0.0.1:{port}/readyz") == 200:
                    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
                    status = requests.post(
                        f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60
                    ).status_code
                    peak = max(peak, _largest_mib(process.pid))
                    break
                time.sleep(0.1)
            process.terminate()
            code = process.wait(60)
        finally:
            process.kill()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    found: dict[str, Any] = {"grown_mib": peak}
    if status in (200, 400) and code == 0:
        return found | {"longest_s": 0.0}
    if status is None and code == 2 and len(lines) == 1:
        return found | {"refused": lines[0]}
    return found | {"traceback": f"exit code {code}, answer {status}: {lines[-12:]}"}


def _status(url: str) -> int:
    try:
        return requests.get(url, timeout=5).status_code
    except requests.RequestException:
        return 0


def _largest_mib(pid: int) -> float:
    """Return the largest memory that a process or one of its children has had."""
    most = 0.0
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                most = int(line.split()[1]) / 1024
    except OSError:
        return 0.0
    return max([most, *(_largest_mib(int(child)) for child in children)])
