"""What may be said of a model under Ray: every mistake is one line, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr

pytest.importorskip("ray", reason="needs dovetail-llm[ray]")

from dovetail.contracts.errors import ConfigError, ModelError
from dovetail_server.ray.options import ClusterNode, actor_options, check_models, read_model, replica_values

CPU, GPU, EIGHT = ClusterNode(2, 0), ClusterNode(16, 1), ClusterNode(64, 8)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_replica": 2}, "max_replica: unknown; did you mean max_replicas?"),
        ({"context_len": 5}, "context_len: unknown; did you mean context_length?"),
        ({"qqqq": 5}, "qqqq: unknown; `dovetail serve --help=all` lists the settings"),
        ({"max_replicas": "many"}, "max_replicas 'many': give a whole number"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas 2: less than min_replicas, 3; give at least as many"),
        ({"devices": "0,1"}, "devices: this is Ray's here; it gives each replica its GPUs"),
        ({"data_parallel_size": 2}, "data_parallel_size: this is Ray's here; it starts the replicas"),
        ({"port": 1}, "port: this is Ray's here; its proxies have the address"),
        ({"page_size": 0}, "page_size 0: give a whole number from 1 to 1,024"),
    ],
)
def test_a_wrong_argument_is_one_line(given: dict[str, Any], said: str) -> None:
    """With the name, what was given, and what to do."""
    with pytest.raises(ConfigError) as raised:
        read_model(given)
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)


def test_a_wrong_key_is_not_shown() -> None:
    """Keys stay out of messages."""
    with pytest.raises(ConfigError) as raised:
        read_model({"api_key": ["a secret with spaces"]})
    assert "secret with" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "nodes", "said"),
    [
        (
            {"device": "cuda"},
            [CPU],
            "device 'cuda': a replica needs 1 GPU, and this Ray cluster has no GPU; ",
        ),
        (
            {"tensor_parallel_size": 2},
            [GPU, GPU],
            "tensor_parallel_size 2: a replica needs 2 GPUs, and the largest",
        ),
        ({"num_gpus": 1, "device": "cpu"}, [EIGHT], "num_gpus 1: device is 'cpu'; leave one of them out"),
        ({"num_gpus": 0, "device": "cuda"}, [EIGHT], "num_gpus 0: device is 'cuda'; give num_gpus=1"),
        ({"num_gpus": 1, "tensor_parallel_size": 2}, [EIGHT], "num_gpus 1: tensor_parallel_size 2 takes one GPU for"),
        ({"num_cpus": 3}, [CPU], "num_cpus 3: the largest machine of this Ray cluster has 2 CPUs; give fewer"),
        (
            {"num_threads": 3, "device": "cpu"},
            [CPU],
            "num_threads 3: the largest machine of this Ray cluster has 2",
        ),
    ],
)
def test_a_cluster_without_what_is_needed_is_refused(
    given: dict[str, Any], nodes: list[ClusterNode], said: str
) -> None:
    """With what is needed, what there is, and what to do."""
    with pytest.raises(ConfigError) as raised:
        actor_options(read_model(given), nodes)
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize(
    ("given", "nodes", "said"),
    [
        ({"device": "cuda"}, [CPU], "--device cuda: a replica needs 1 GPU, and this Ray cluster has no GPU; "),
        ({"tensor_parallel_size": 2}, [GPU], "--tensor-parallel-size 2: a replica needs 2 GPUs, and the largest"),
        ({"num_threads": 3}, [CPU], "--num-threads 3: the largest machine of this Ray cluster has 2 CPUs; give fewer"),
    ],
)
def test_a_command_is_told_its_own_flags(given: dict[str, Any], nodes: list[ClusterNode], said: str) -> None:
    """Ray's options, such as num_gpus, are for Python and configuration files: a command line has none of them."""
    with pytest.raises(ConfigError) as raised:
        actor_options(read_model(given), nodes, is_command=True)
    assert str(raised.value).startswith(said)
    assert "num_" not in str(raised.value)
    if "GPU" in said:
        assert str(raised.value).endswith(
            "give --device cpu, or in RAY_ADDRESS a cluster that has as many on one machine"
        )


@pytest.mark.parametrize(
    ("given", "nodes", "reserved", "follows"),
    [
        ({}, [CPU], (1, 0), {"device": "cpu", "num_threads": 1}),
        ({"num_cpus": 2}, [CPU], (2, 0), {"device": "cpu", "num_threads": 2}),
        ({"num_threads": 2}, [CPU], (2, 0), {"device": "cpu"}),
        ({}, [CPU, GPU], (1, 1), {"device": "cuda"}),
        ({"device": "cpu"}, [GPU], (1, 0), {"device": "cpu", "num_threads": 1}),
        ({"tensor_parallel_size": 4}, [EIGHT], (1, 4), {"device": "cuda"}),
        ({"num_gpus": 1}, [CPU], (1, 1), {"device": "cuda"}),  # the cluster adds machines when they are asked for
        ({"num_gpus": "0.5"}, [GPU], (1, 0.5), {"device": "cuda"}),
    ],
)
def test_a_replica_gets_its_devices(
    given: dict[str, Any], nodes: list[ClusterNode], reserved: tuple[float, float], follows: dict[str, Any]
) -> None:
    """GPUs by ranks where there are any, threads by CPUs where there are none."""
    found, found_follows = actor_options(read_model(given), nodes)
    assert ((found["num_cpus"], found["num_gpus"]), found_follows) == (reserved, follows)


def test_models_of_one_address_have_names_of_their_own_and_one_key() -> None:
    """Requests say which one they mean."""
    with pytest.raises(ConfigError, match="two models are called 'dovetail-demo'; give one of them another"):
        check_models([read_model({}), read_model({})])
    pair = [read_model({}), read_model({"served_model_name": "other", "api_key": "one"})]
    with pytest.raises(ConfigError, match="api_key differs between models"):
        check_models(pair)
    check_models([read_model({"served_model_name": name, "api_key": "one"}) for name in ("a", "b")])


def test_a_folder_without_a_model_is_refused(tmp_path: Any) -> None:
    """Where this machine sees it: a folder of other machines, or of a hub, is looked at there."""
    with pytest.raises(ModelError):
        check_models([read_model({"model": str(tmp_path)})])


def test_a_replica_gets_what_was_given_and_nothing_else() -> None:
    """Values are plain: what Ray sends can be read without this package's classes."""
    model = read_model({"api_key": "one", "served-model-name": "a,b", "max_replicas": 2, "random_seed": "5"})
    assert model.settings.api_key == [SecretStr("one")]
    assert replica_values(model, {"device": "cpu"}, "resume") == {
        "api_key": ["one"],
        "served_model_name": ["a", "b"],
        "random_seed": 5,
        "device": "cpu",
        "resume_key": "resume",
        "allowed_hosts": ["*"],
        "allow_origins": [],
    }
