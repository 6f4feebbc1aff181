"""What a user may say of a model under Ray, checked with the cluster's devices before anything starts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dovetail.base.config_file import field_aliases
from dovetail.base.word_numbers import wanted
from dovetail.contracts.errors import ConfigError
from dovetail_server.gateway.worker_settings import plain
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start.preflight import DEMO_NAME

RAYS = frozenset(
    (
        *("host", "port", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "root_path", "data_parallel_size"),
        *("devices", "max_connections", "max_connections_per_address", "header_timeout", "keep_alive_timeout"),
        *("drain_grace", "log_requests", "disable_access_log"),
    )
)
"""Settings whose subject is Ray's here: addresses, connections, devices and replicas."""
COMMON = ("api_key", "admin_api_key", "keys_file", "allow_origins", "allowed_hosts", "closed_probes", "max_body_bytes")
"""Settings of the address, which all models of an application share."""


class RayOptions(BaseModel):
    """How Ray runs a model; beside these, every setting of `dovetail serve` that concerns the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: int = Field(1, ge=0, description="Replicas that are always there; 0 starts one for a request.")
    max_replicas: int | None = Field(None, ge=1, description="Most replicas; min_replicas if not given.")
    target_queued_tokens: int | None = Field(
        None, ge=1, description="Prompt tokens that a replica is to hold at most, running and waiting; half its cache."
    )
    upscale_delay_s: float = Field(10.0, ge=0, description="Seconds of more load before a replica is added.")
    downscale_delay_s: float = Field(300.0, ge=0, description="Seconds of less load before one is taken away.")
    look_back_period_s: float = Field(
        30.0, gt=10, description="Seconds over which the load is averaged; replicas tell Ray of it every 10 s."
    )
    num_gpus: float | None = Field(None, ge=0, description="GPUs of a replica; one for each rank where there are any.")
    num_cpus: float | None = Field(None, gt=0, description="Ray's CPUs of a replica; its num_threads, or 1.")
    accelerator_type: str | None = Field(None, min_length=1, description="Kind of GPU, as Ray calls it: H100.")

    @property
    def most(self) -> int:
        """`max_replicas`, where it is not given `min_replicas`, but at least one."""
        return self.max_replicas or max(1, self.min_replicas)


@dataclass(frozen=True)
class ClusterNode:
    """What one machine of the cluster has."""

    cpus: float
    gpus: float


@dataclass(frozen=True)
class RayModel:
    """One model of an application: its settings, and how Ray runs it."""

    settings: ServeSettings
    options: RayOptions

    @property
    def names(self) -> list[str]:
        """What requests may call it; the first is the one that replies carry."""
        return self.settings.served_model_name or [self.settings.model_path or DEMO_NAME]

    @property
    def deployment_name(self) -> str:
        """The first name, as Ray takes it."""
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", self.names[0]).strip("-") or "model"


def read_model(said: Mapping[str, Any]) -> RayModel:
    """Read what was given for one model.

    Args:
        said: `model`, which may be left out for the demo model, names of `RayOptions`, and settings; values may be
            words, as the command line has them.

    Raises:
        ConfigError: A name or a value is wrong.
    """
    given: dict[str, Any] = {name.replace("-", "_"): value for name, value in said.items()}
    if "model" in given:
        given["model_path"] = given.pop("model")
    known = field_aliases(ServeSettings)
    for name in given:
        if name in RAYS:
            raise ConfigError(f"{name}: this is Ray's here; {HINTS.get(name, 'leave it out')}")
        if name not in RayOptions.model_fields and name not in ServeSettings.model_fields:
            near = difflib.get_close_matches(name, [*RayOptions.model_fields, *known], n=1, cutoff=0.5)
            raise ConfigError(f"{name}: unknown; " + (f"did you mean {near[0]}?" if near else WHERE))
    ours = {name: given.pop(name) for name in list(given) if name in RayOptions.model_fields}
    try:
        options = RayOptions(**ours)
        settings = ServeSettings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "the settings"
        reason = first["msg"].removeprefix("Value error, ")
        shown = "" if "key" in name or not first["loc"] else f" {first['input']!r}"
        field = RayOptions.model_fields.get(name) or ServeSettings.model_fields.get(name)
        text = wanted(first, field) if field is not None else ""
        raise ConfigError(f"{name}{shown}: {text or reason[0].lower() + reason[1:]}") from None
    if options.max_replicas is not None and options.max_replicas < options.min_replicas:
        text = f"max_replicas {options.max_replicas}: less than min_replicas, {options.min_replicas}"
        raise ConfigError(f"{text}; give at least as many")
    return RayModel(settings, options)


HINTS = {
    "devices": "it gives each replica its GPUs; num_gpus says how many",
    "data_parallel_size": "it starts the replicas; min_replicas and max_replicas say how many",
    "host": "its proxies have the address: http_options of serve.start, or of the configuration file",
    "port": "its proxies have the address: http_options of serve.start, or of the configuration file",
}
WHERE = "`dovetail serve --help=all` lists the settings, docs/deploy.md Ray's options"


def check_models(models: Sequence[RayModel]) -> None:
    """Refuse models that cannot stand behind one address, and folders that cannot be served.

    Raises:
        ConfigError: Names that meet, keys that differ, or a model that this machine sees and cannot serve.
    """
    seen: dict[str, int] = {}
    for number, model in enumerate(models):
        for name in model.names:
            if seen.setdefault(name, number) != number:
                raise ConfigError(f"two models are called {name!r}; give one of them another served_model_name")
        for name in COMMON:
            if getattr(model.settings, name) != getattr(models[0].settings, name):
                raise ConfigError(f"{name} differs between models; the address has one for all of them")
        folder = model.settings.model_path
        if folder is not None and Path(folder).is_dir():
            from dovetail.processing.prepare import check_model

            check_model(model.settings)


def actor_options(
    model: RayModel, nodes: Sequence[ClusterNode], *, is_command: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what Ray reserves for a replica, and the settings that follow from it.

    Args:
        model: With `device`, `tensor_parallel_size`, `num_threads` and Ray's options.
        nodes: The machines of the cluster.
        is_command: Settings were given as flags, and Ray's options cannot be.

    Raises:
        ConfigError: No machine has what a replica needs.
    """
    settings, options = model.settings, model.options
    ranks = settings.tensor_parallel_size
    most = max((node.gpus for node in nodes), default=0)
    gpus = options.num_gpus
    if gpus is None and settings.device != "cpu":
        gpus = float(ranks) if settings.device == "cuda" or most or options.accelerator_type else 0.0
        if gpus > most:
            raise ConfigError(too_few_gpus(ranks, gpus, most, is_command))
    gpus = gpus or 0.0
    if gpus and settings.device == "cpu":
        raise ConfigError(f"num_gpus {gpus:g}: device is 'cpu'; leave one of them out")
    if gpus and ranks > 1 and gpus != ranks:
        raise ConfigError(f"num_gpus {gpus:g}: tensor_parallel_size {ranks} takes one GPU for each rank; give {ranks}")
    if not gpus and settings.device == "cuda":
        raise ConfigError("num_gpus 0: device is 'cuda'; give num_gpus=1, or device='cpu'")
    cpus = options.num_cpus or settings.num_threads or 1
    cores = max((node.cpus for node in nodes), default=0)
    if cpus > cores:
        said = "num_cpus" if options.num_cpus else "--num-threads" if is_command else "num_threads"
        raise ConfigError(f"{said} {cpus:g}: the largest machine of this Ray cluster has {cores:g} CPUs; give fewer")
    reserved: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus}
    if options.accelerator_type is not None:
        reserved["accelerator_type"] = options.accelerator_type
    follows: dict[str, Any] = {"device": "cuda" if gpus else "cpu"}
    if not gpus and settings.num_threads is None:
        follows["num_threads"] = max(1, int(cpus) // ranks)
    return reserved, follows


def too_few_gpus(ranks: int, gpus: float, most: float, is_command: bool) -> str:
    """Say that no machine has so many, and what to do."""
    has = f"the largest machine of this Ray cluster has {most:g}" if most else "this Ray cluster has no GPU"
    needs = f"a replica needs {gpus:g} GPU{'s' if gpus > 1 else ''}, and {has}"
    if is_command:
        what = f"--tensor-parallel-size {ranks}" if ranks > 1 else "--device cuda"
        return f"{what}: {needs}; give --device cpu, or in RAY_ADDRESS a cluster that has as many on one machine"
    what = f"tensor_parallel_size {ranks}" if ranks > 1 else "device 'cuda'"
    fix = f"give device='cpu', or num_gpus={gpus:g} if the cluster adds machines when they are asked for"
    return f"{what}: {needs}; {fix}"


def replica_values(model: RayModel, follows: Mapping[str, Any], resume_key: str | None) -> dict[str, Any]:
    """Return the settings that a replica is started with, as plain values."""
    given = model.settings.model_fields_set - RAYS - {"config"}
    values = {name: plain(getattr(model.settings, name)) for name in given}
    # The front has looked at names and origins; what is between the two is Ray's.
    key = {} if resume_key is None else {"resume_key": resume_key}
    return {**key, **values, **follows, "allowed_hosts": ["*"], "allow_origins": []}


def cluster_nodes() -> list[ClusterNode]:
    """Return the machines of the cluster that live; connects to it, or starts a local one."""
    import ray

    if not ray.is_initialized():
        ray.init(namespace="serve")
    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [ClusterNode(float(has.get("CPU", 0)), float(has.get("GPU", 0))) for has in found]
