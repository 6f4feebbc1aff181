"""Finds out what a server is and whether it can be driven, before anything is measured."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from dovetail.contracts.errors import ConfigError
from dovetail_server.bench.jobs import Record
from dovetail_server.bench.stream import StreamScan
from dovetail_server.bench.wire import PATHS, BenchSampling, Prompt, body_of
from dovetail_server.bench.worker import problem, take_whole

LOCAL = frozenset(("127.0.0.1", "localhost", "::1"))
PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTarget:
    """A server that answers.

    Attributes:
        kind: Who made it, as far as it says.
        model_folder: The model's folder, where the server names one that this machine has too.
        vocab_size: Where the server tells.
        device: `cpu` or `cuda`, where the server tells.
        dtype: Of the weights, where the server tells.
        num_devices: That its model is spread over, where the server tells.
        defaults: What it samples by where a request says nothing, as far as it tells.
        state_dtype: What it keeps recurrent states in.
    """

    base_url: str
    model: str
    kind: str
    is_local: bool
    version: str | None = None
    model_folder: Path | None = None
    vocab_size: int | None = None
    device: str | None = None
    dtype: str | None = None
    num_devices: int | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    state_dtype: str = "float32"


def clean_url(base_url: str) -> str:
    """Return the address without `/v1` and a slash at its end.

    Raises:
        ConfigError: It is no address.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"--base-url {base_url!r}: expected an address such as http://127.0.0.1:30000")
    return base_url.rstrip("/").removesuffix("/v1")


async def discover(session: aiohttp.ClientSession, base_url: str, model: str | None) -> BenchTarget:
    """Ask a server what it is.

    Raises:
        ConfigError: Nothing answers there, or it does not serve the model.
    """
    models = await _get(session, base_url, "/v1/models", needed=True)
    entries = [entry for entry in models.get("data") or [] if isinstance(entry, dict) and entry.get("id")]
    names = [str(entry["id"]) for entry in entries]
    if not names and model is None:
        raise ConfigError(f"--base-url {base_url!r}: /v1/models lists no model; give --model NAME")
    if model is not None and names and model not in names:
        raise ConfigError(f"--model {model!r}: not served at {base_url}; served: {', '.join(names)}")
    info = await _get(session, base_url, "/get_server_info")
    about = await _get(session, base_url, "/get_model_info")
    entry = next((e for e in entries if e["id"] == model), entries[0] if entries else {})
    engine = info.get("engine") if isinstance(info.get("engine"), dict) else {}
    is_ours = "weight_bytes" in (engine or {})
    is_local = urlsplit(base_url).hostname in LOCAL
    folder = next((Path(p) for p in (info.get("model_path"), entry.get("root")) if isinstance(p, str) and p), None)
    return BenchTarget(
        base_url=base_url,
        model=model or names[0],
        kind="dovetail" if is_ours else str(entry.get("owned_by") or "OpenAI-compatible server"),
        is_local=is_local,
        version=str(info["version"]) if info.get("version") else None,
        model_folder=folder if folder is not None and is_local and (folder / "config.json").is_file() else None,
        vocab_size=engine.get("vocab_size") if engine else None,
        device=str(engine["device"]).split(":")[0] if engine and engine.get("device") else None,
        dtype=engine.get("dtype") if engine else None,
        num_devices=_product(info.get("tensor_parallel_size"), info.get("data_parallel_size")) if is_ours else None,
        defaults=about["preferred_sampling_params"] if isinstance(about.get("preferred_sampling_params"), dict) else {},
        engine=engine or {},
        state_dtype=str(info.get("state_dtype") or "float32"),
    )


def _product(*sizes: object) -> int | None:
    """Return how many devices that makes; None if a size is not told."""
    return prod(size for size in sizes if isinstance(size, int)) if all(isinstance(s, int) for s in sizes) else None


async def _get(session: aiohttp.ClientSession, base_url: str, path: str, *, needed: bool = False) -> dict[str, Any]:
    """Return the JSON object at a path; empty where there is none and it is not needed."""
    try:
        async with session.get(base_url + path) as response:
            data = await response.read()
            if response.status != 200:
                if needed:
                    raise ConfigError(f"{base_url}{path} answered HTTP {response.status}: {problem(data)}")
                return {}
            found = json.loads(data)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(
            f"--base-url {base_url!r}: nothing answers there ({reason}); start the server, or give --model-path "
            "instead to have one started"
        ) from None
    except ValueError:
        if needed:
            raise ConfigError(f"{base_url}{path} is no JSON; is this an OpenAI-compatible server?") from None
        return {}
    return found if isinstance(found, dict) else {}


async def probe(
    session: aiohttp.ClientSession, target: BenchTarget, endpoint: str, prompt: Prompt, sampling: BenchSampling
) -> bool:
    """Send one short request of the kind that will be measured.

    Returns:
        Whether the server can count the tokens of a stream in every event.

    Raises:
        ConfigError: The server refuses it, fails, or does not count tokens.
    """
    if sampling.stream and endpoint != "generate":
        status, supported = await _try(session, target, endpoint, prompt, sampling, counts_events=True)
        if status == 200:
            return supported
    await _try(session, target, endpoint, prompt, sampling, counts_events=False)
    return False


async def _try(
    session: aiohttp.ClientSession,
    target: BenchTarget,
    endpoint: str,
    prompt: Prompt,
    sampling: BenchSampling,
    *,
    counts_events: bool,
) -> tuple[int, bool]:
    """Send the request; with `counts_events`, a refusal is an answer and not an error."""
    body = body_of(endpoint, prompt, PROBE_TOKENS, sampling, counts_events=counts_events)
    where = f"{target.base_url}{PATHS[endpoint]}"
    try:
        async with session.post(target.base_url + PATHS[endpoint], json=body) as response:
            data = await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ConfigError(f"{where}: a test request failed: {str(error) or type(error).__name__}") from None
    if response.status != 200:
        if counts_events and response.status in {400, 422}:
            return response.status, False
        extensions = ("ignore_eos", "skip_special_tokens")
        hint = "; try --no-ignore-eos" if any(name in problem(data) for name in extensions) else ""
        raise ConfigError(f"{where}: a test request got HTTP {response.status}: {problem(data)}{hint}")
    if sampling.stream:
        scan = StreamScan(counts_events=counts_events)
        scan.feed(data, 1.0)
        failure = scan.close()
        supported = data.count(b'"completion_tokens":') > 1
    else:
        record = Record(index=0, start=0.0)
        take_whole(data, record)
        failure, supported = record.error, False
    if failure is not None:
        raise ConfigError(f"{where}: a test request did not work: {failure}")
    return 200, supported
