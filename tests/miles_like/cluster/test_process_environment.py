"""The environment of a run's processes: Ray gives them that of the node's Ray process, so that all is set here."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from miles_like.cluster.environment import (
    describe_environment,
    network_variables,
    plain_values,
    process_environment,
    secret_names,
    secret_values,
)
from miles_like.cluster.placement import Role, Slot
from miles_like.cluster.run_nodes import RunNodes
from miles_like.config.sections.cluster import ClusterConfig
from miles_like.nodes.facts import Device, NodeFacts
from miles_like.nodes.members import Node
from tests.support.refusals import refuses

DEVICES = tuple(Device(index=i, uuid=f"GPU-{i}") for i in (2, 3, 6, 7))  # another job has the others
NODE = NodeFacts(host="a", address="10.0.0.7", interface="eth1", cores=96, devices=DEVICES)
OPTIONS: Mapping[str, Any] = {"env": {}, "node_gpus": 8, "stage_dir": None, "local": False}
SECRETS = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "", "WANDB_API_KEY": ""}


def slot(role: Role = "trainer", *gpus: int) -> Slot:
    return Slot(role=role, index=0, node=0, gpus=gpus)


def test_a_gpu_rank_gets_its_devices_its_share_of_the_cores_and_the_interface_of_its_address() -> None:
    """Its share of the node's 96 cores is one of 8 GPUs', of which the run has 4: another run may have the others."""
    assert process_environment(slot("trainer", 1), NODE, **OPTIONS) == {
        "CUDA_VISIBLE_DEVICES": "3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": "12",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
    }


def test_two_runs_on_a_node_have_a_thread_for_each_core_together() -> None:
    """Each holds half of its GPUs."""
    node = Node(id="a", address=NODE.address, host="a", gpus=8, cores=96)
    half = ClusterConfig(gpus_per_node=4)
    nodes = RunNodes(nodes=(node,), facts=(NODE,), cluster=half)
    threads = [int(nodes.environment(slot("trainer", gpu))["OMP_NUM_THREADS"]) for gpu in range(4)]
    assert 2 * sum(threads) == node.cores


@pytest.mark.parametrize("gpus", [(0, 1), (3,), (2, 0)])
def test_both_sides_of_a_gpu_have_the_same_device(gpus: tuple[int, ...]) -> None:
    """Publication between processes of one GPU needs the same physical device."""
    found = {
        process_environment(slot(role, *gpus), NODE, **OPTIONS)["CUDA_VISIBLE_DEVICES"]
        for role in ("trainer", "critic", "rollout")
    }
    assert found == {",".join(str(DEVICES[g].index) for g in gpus)}


def test_a_server_keeps_the_launch_queues_of_its_engine() -> None:
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in process_environment(slot("rollout", 0), NODE, **OPTIONS)


def test_a_server_finds_its_other_parts_by_the_node_s_address() -> None:
    """Not by the host name or the default route, which SGLang would ask; a table may name another."""
    assert process_environment(slot("rollout", 0), NODE, **OPTIONS)["SGLANG_HOST_IP"] == NODE.address
    given = process_environment(slot("rollout", 0), NODE, **OPTIONS | {"env": {"SGLANG_HOST_IP": "10.0.0.9"}})
    assert given["SGLANG_HOST_IP"] == "10.0.0.9"
    for found in (
        process_environment(slot("trainer", 0), NODE, **OPTIONS),
        process_environment(slot("rollout", 0), NODE, **OPTIONS | {"local": True}),
    ):
        assert "SGLANG_HOST_IP" not in found


def test_a_gpu_that_the_run_does_not_hold_is_refused() -> None:
    with refuses(ValueError, "trainer", 4, "cluster.gpus_per_node"):
        process_environment(slot("trainer", 4), NODE, **OPTIONS)


def test_a_process_has_a_thread_even_where_gpus_outnumber_cores() -> None:
    node = NodeFacts(host="a", address="10.0.0.7", interface="eth1", cores=2, devices=DEVICES)
    assert process_environment(slot("trainer", 0), node, **OPTIONS)["OMP_NUM_THREADS"] == "1"


def test_a_cpu_rank_has_one_thread_and_no_variable_of_a_gpu() -> None:
    options = {**OPTIONS, "node_gpus": 0, "stage_dir": "/nvme"}
    assert process_environment(slot(), NODE, **options) == {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
    }


def test_a_local_ray_listens_on_loopback_and_so_do_its_ranks() -> None:
    found = process_environment(slot(), NODE, **{**OPTIONS, "local": True})
    assert found["GLOO_SOCKET_IFNAME"] in ("lo", "lo0") and found["NCCL_SOCKET_IFNAME"].endswith("lo")


def test_an_unknown_interface_is_left_to_the_libraries() -> None:
    node = NodeFacts(host="a", address="10.0.0.7", interface=None, cores=96, devices=DEVICES)
    assert not [name for name in process_environment(slot("trainer", 0), node, **OPTIONS) if "IFNAME" in name]


@pytest.mark.parametrize("interface", ["eth1", None])
@pytest.mark.parametrize("env", [{}, {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_IB_HCA": "mlx5", "HF_TOKEN": ""}])
def test_the_doctor_s_messages_have_the_network_of_a_rank(interface: str | None, env: dict[str, str]) -> None:
    node = NodeFacts(host="a", address="10.0.0.7", interface=interface, cores=96, devices=DEVICES)
    of_rank = process_environment(slot("trainer", 0), node, **{**OPTIONS, "env": env})
    found = network_variables(interface, env)
    assert found.items() <= of_rank.items()
    network = {name for name in of_rank if name.startswith(("NCCL_", "GLOO_"))}
    assert set(found) == network and ("GLOO_SOCKET_IFNAME" in found) == (interface is not None)


def test_the_user_s_values_replace_the_defaults_and_secrets_are_left_out() -> None:
    env = {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "ib0", **SECRETS}
    found = process_environment(slot("trainer", 0), NODE, **{**OPTIONS, "env": env})
    assert {name: found[name] for name in plain_values(env)} == plain_values(env)
    assert not set(found) & {"HF_TOKEN", "WANDB_API_KEY"}


@pytest.mark.parametrize(("stage_dir", "root"), [("/nvme/stage/", "/nvme/stage"), (None, "/tmp/miles-like-7")])
def test_kernel_caches_are_on_the_node_s_disk_and_apart(stage_dir: str | None, root: str) -> None:
    """The two sides have other versions of the same compilers."""
    options, node = {**OPTIONS, "stage_dir": stage_dir}, replace(NODE, scratch="/tmp/miles-like-7")
    found = [process_environment(slot(role, 0), node, **options) for role in ("trainer", "rollout")]
    roots = [{value for value in one.values() if value.startswith("/")} for one in found]
    assert all(path.startswith(f"{root}/kernels/") for paths in roots for path in paths)
    assert not roots[0] & roots[1]
    assert {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"} <= set(found[0]) & set(found[1])


@pytest.mark.parametrize("role", ["trainer", "critic", "rollout"])
@pytest.mark.parametrize("gpus_per_node", [0, 4])
@pytest.mark.parametrize("stage_dir", ["/nvme", None])
def test_what_a_dry_run_prints_are_the_variables_that_arrive(
    role: Role, gpus_per_node: int, stage_dir: str | None
) -> None:
    printed = describe_environment(role, env=SECRETS, gpus_per_node=gpus_per_node, stage_dir=stage_dir)
    options, node = {**OPTIONS, "env": SECRETS, "stage_dir": stage_dir}, replace(NODE, scratch="/tmp/a")
    arrived = process_environment(slot(role, *range(gpus_per_node)), node, **options)
    assert set(printed) == set(arrived) | set(secret_names(SECRETS))
    assert all(value == arrived[name] for name, value in printed.items() if not value.startswith("("))
    assert {printed[name] for name in secret_names(SECRETS)} == {"(from the driver's environment)"}


def test_secrets_come_from_the_driver_and_a_missing_one_is_refused() -> None:
    driver = {"HF_TOKEN": "a", "WANDB_API_KEY": "b", "OTHER_KEY": "c"}
    assert secret_values(SECRETS, driver) == {"HF_TOKEN": "a", "WANDB_API_KEY": "b"}
    with refuses(ValueError, "WANDB_API_KEY"):
        secret_values(SECRETS, {"HF_TOKEN": "a"})
