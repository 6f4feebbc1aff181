"""`dovetail.ray.deployment` and `dovetail.ray.app`: from what a user says to an application of Ray Serve."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from dovetail.contracts.errors import ConfigError
from dovetail_server.ray.options import (
    RayModel,
    actor_options,
    check_models,
    cluster_nodes,
    read_model,
    replica_values,
)
from dovetail_server.ray.proxy import DeployedModel, Front
from dovetail_server.ray.replica import Replica
from dovetail_server.ray.router import IMBALANCE

if TYPE_CHECKING:
    from ray.serve import Application

ROOM = "dovetail_server.ray"
FRONT = "dovetail"
MAX_FRONT_REQUESTS = 1 << 16
MAX_STARTS = 3
"""Of the first replicas: what the user can fix is said after so many tries, not after Ray's twenty."""
PREFIX_CHARACTERS = 4_000_000
"""Of prompts, which Ray's tree of prefixes keeps for all replicas of a model."""


def deployment(model: str | None = None, *, models: Sequence[Mapping[str, Any]] = (), **options: Any) -> Application:
    """Make an application of Ray Serve: one model, or several behind one address.

    Connects this process to the Ray cluster (`RAY_ADDRESS`), or starts a local one, if it is not connected: what a
    replica needs is compared with what the cluster has.

    Args:
        model: Folder or name on a hub; the demo model if neither this nor `models` is given.
        models: Of several: for each `model` and what else concerns it alone.
        **options: Ray's (`min_replicas`, `max_replicas`, `target_queued_tokens`, `num_gpus`, …) and the settings of
            `dovetail serve`, for all models.

    Raises:
        ConfigError: A wrong name or value, a model that cannot be served, or a cluster without what it needs.
    """
    if model is not None and models:
        raise ConfigError(f"model {model!r} and models are both given; put it among them")
    given = [dict(one) for one in models] or [{} if model is None else {"model": model}]
    read = [read_model({**options, **one}) for one in given]
    check_models(read)
    nodes = cluster_nodes()
    key = secrets.token_hex(24)
    parts = [(one, *actor_options(one, nodes)) for one in read]
    replicas = {
        one.deployment_name: replica_deployment(one, reserved, follows, key) for one, reserved, follows in parts
    }
    if len(replicas) < len(read):
        raise ConfigError("two models have names that Ray cannot tell apart; give one another served_model_name")
    served = [DeployedModel(one.deployment_name, one.names) for one in read]
    front = Front(front_values(read[0]), served, key)
    address = serve.deployment(
        serve.ingress(front)(),
        name=FRONT,
        ray_actor_options={"num_cpus": 0},  # it relays, and waits most of the time
        max_ongoing_requests=MAX_FRONT_REQUESTS,
        graceful_shutdown_timeout_s=read[0].settings.drain_timeout,
    )
    return address.bind(*replicas.values())


def app(args: dict[str, Any]) -> Application:
    """Build the application of `serve run dovetail.ray:app model=… max_replicas=4`, or of a file's `args`.

    Args:
        args: As `deployment` takes them.

    Raises:
        ConfigError: As there.
    """
    return deployment(**{name.replace("-", "_"): value for name, value in args.items()})


def replica_deployment(model: RayModel, reserved: dict[str, Any], follows: dict[str, Any], key: str) -> Application:
    """Return the deployment of one model's replicas."""
    options, settings = model.options, model.settings
    policy = AutoscalingPolicy(
        policy_function=f"{ROOM}.scaling:QueuedTokens", policy_kwargs={"target": options.target_queued_tokens}
    )
    scaled = AutoscalingConfig(
        min_replicas=options.min_replicas,
        max_replicas=options.most,
        upscale_delay_s=options.upscale_delay_s,
        downscale_delay_s=options.downscale_delay_s,
        look_back_period_s=options.look_back_period_s,
        policy=policy,
    )
    router = RequestRouterConfig(
        request_router_class=f"{ROOM}.router:PrefixRouter",
        request_router_kwargs={
            "imbalanced_threshold": IMBALANCE,
            "do_eviction": True,
            "eviction_threshold_chars": PREFIX_CHARACTERS,
            "eviction_target_chars": PREFIX_CHARACTERS * 9 // 10,
        },
    )
    return serve.deployment(
        Replica,
        name=model.deployment_name,
        ray_actor_options=reserved,
        autoscaling_config=scaled,
        request_router_config=router,
        max_ongoing_requests=settings.max_running_requests + settings.max_queued_requests,
        graceful_shutdown_timeout_s=settings.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=MAX_STARTS,
    ).bind(replica_values(model, follows, key))


def front_values(model: RayModel) -> dict[str, Any]:
    """Return the settings of the address: those of the first model that concern it."""
    names = {*model.settings.model_fields_set} & {*ADDRESS}
    return {name: _plain(getattr(model.settings, name)) for name in names}


ADDRESS = (
    *("api_key", "admin_api_key", "keys_file", "allow_origins", "allowed_hosts", "closed_probes", "open_metrics"),
    *("max_body_bytes", "max_queued_bytes", "body_timeout", "min_body_rate", "disable_playground"),
    *("apis", "plugin_allow", "plugin_deny", "plugins_locked", "plugin_file", "plugins_dir", "plugin_timeout"),
)


def _plain(value: Any) -> Any:
    from dovetail_server.gateway.worker_settings import plain

    return plain(value)
