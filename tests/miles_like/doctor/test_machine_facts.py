"""Facts that the doctor reads from a machine's files, from nvidia-smi's output and from clocks that it is given.

Not covered: nvidia-smi itself; a file system that is slow.
"""

from __future__ import annotations

import itertools
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from miles_like.cluster.environment import network_variables
from miles_like.doctor.disks import MEASURED_BYTES, disk_facts, forget, kind_of, seen
from miles_like.doctor.examine import ThisMachine, examine, examiner_of, measure_clocks, unique_labels
from miles_like.doctor.findings import Needs
from miles_like.doctor.gpus import query_gpus
from miles_like.doctor.links import Linker, ring, tournament
from miles_like.doctor.machine import cgroup_limits, machine_facts
from miles_like.doctor.software import _glibc_of_wheel, software
from miles_like.nodes.facts import NodeName, ServerPort, Unanswered
from miles_like.nodes.probe import ephemeral_ports
from miles_like.nodes.sight import existing

SMI = {
    "gpu": "0, GPU-a, NVIDIA H100 80GB HBM3, 81559, 81079, 580.95.05, Enabled, Disabled, Enabled, 0, Default\n"
    "1, GPU-b, NVIDIA H100 80GB HBM3, 81559, 500, 580.95.05, Disabled, [N/A], [N/A], [N/A], Default\n",
    "compute-apps": "GPU-b, 4711, python, \nGPU-b, 4712, sglang::scheduler\n",
}


def test_nvidia_smi_is_read() -> None:
    first, second = query_gpus(lambda what, fields: SMI[what])
    assert isinstance(first, dict) and first["free_mib"] == 81079 and first["processes"] == []
    assert isinstance(second, dict) and second["mig"] == "" and second["persistence"] == "Disabled"
    assert second["processes"] == ["4712 sglang::scheduler"]

    def fails(what: str, fields: tuple[str, ...]) -> str:
        raise RuntimeError("NVIDIA-SMI has failed because\nit couldn't communicate with the NVIDIA driver")

    assert query_gpus(fails) == "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_the_tightest_limit_of_a_cgroup_and_those_above_it_counts(tmp_path: Path) -> None:
    (tmp_path / "pod/run").mkdir(parents=True)
    for file, text in {
        "cgroup.controllers": "cpu memory pids",
        "pod/memory.max": "1073741824",
        "pod/run/memory.max": "max",
        "pod/pids.max": "max",
        "pod/run/pids.max": "500",
        "pod/cpu.max": "150000 100000",
        "pod/run/cpu.max": "max 100000",
    }.items():
        (tmp_path / file).write_text(text + "\n")
    (of := tmp_path / "of").write_text("0::/pod/run\n")
    assert cgroup_limits(tmp_path, of) == ("v2", {"memory": 1 << 30, "pids": 500, "cpus": 1.5})


def test_the_first_version_of_cgroups_is_read(tmp_path: Path) -> None:
    for controller in ("memory", "pids", "cpu"):
        (tmp_path / controller / "docker").mkdir(parents=True)
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory/docker/memory.limit_in_bytes").write_text("2147483648\n")
    (tmp_path / "pids/docker/pids.max").write_text("max\n")
    (tmp_path / "cpu/docker/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/docker/cpu.cfs_period_us").write_text("100000\n")
    (of := tmp_path / "of").write_text("8:pids:/docker\n3:cpu,cpuacct:/docker\n5:memory:/docker\n0::/\n")
    assert cgroup_limits(tmp_path, of) == ("v1", {"memory": 2 << 30, "pids": -1, "cpus": -1})
    assert cgroup_limits(tmp_path / "nowhere", of)[0] == cgroup_limits(tmp_path, tmp_path / "no file")[0] == "none"


def test_a_disk_is_measured_within_a_bound_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: written.append(os.fstat(fd).st_size))
    facts = disk_facts(str(tmp_path / "not" / "yet"), "a")
    assert facts["write"] > 0 and facts["read"] > 0 and not facts["error"] and 0 < written[0] <= MEASURED_BYTES
    assert seen(str(tmp_path / "not"), ("a", "b")) == ("a",)
    forget(str(tmp_path), "a")
    assert not list(tmp_path.iterdir())
    assert existing(tmp_path / "x" / "y") == tmp_path


def test_the_kind_of_a_file_system_is_that_of_the_last_mount_above_it(tmp_path: Path) -> None:
    (mounts := tmp_path / "mountinfo").write_text(
        "1 0 8:1 / / rw - ext4 /dev/root rw\n"
        f"2 1 0:3 / {tmp_path} rw shared:1 - nfs4 server:/x rw\n"
        f"3 1 0:4 / {tmp_path} rw - tmpfs tmpfs rw\n"
    )
    assert kind_of(tmp_path, mounts) == "tmpfs" and kind_of(Path("/"), mounts) == "ext4"
    assert kind_of(tmp_path, tmp_path / "none") == "?"


def test_this_machine_is_read() -> None:
    facts = machine_facts("127.0.0.1")
    assert (
        facts["cores"] >= 1 and facts["memory"] > facts["memory_available"] > 0 and facts["interface"] in ("lo", "lo0")
    )
    assert set(facts["ulimits"]) == {"nofile", "memlock", "nproc", "stack"}
    assert ephemeral_ports(Path("/nowhere")) == (0, 0)
    found = software()
    assert found["packages"]["megatron-core"] == "0.16.1" and "torch" in " ".join(
        found["requires"]["transformers"] or ["torch"]
    )
    assert _glibc_of_wheel("Tag: cp39-abi3-manylinux_2_34_x86_64\n") == "2.34"
    assert _glibc_of_wheel("Tag: cp311-cp311-manylinux_2_17_x86_64\nTag: cp311-cp311-manylinux_2_28_x86_64") == "2.17"


class Shifted:
    """Nodes whose clocks are given: node 0 is right, node 1 an hour late, node 2 does not answer."""

    names = tuple(NodeName(host=f"node{k}", address=f"192.168.0.{k + 1}") for k in range(3))
    ray_gpus = racks = object_store = departed = ()

    def __init__(self) -> None:
        self.time = 1000.0
        self.trips = itertools.cycle((0.5, 0.02, 0.1))  # seconds of a round trip

    def now(self) -> float:
        return self.time

    def call(self, method: str, arguments: dict[int, tuple[Any, ...]], timeout_s: float) -> dict[int, Any]:
        (node,) = arguments
        half = next(self.trips) / 2
        self.time += half
        answer = {0: self.time, 1: self.time - 3600.0, 2: Unanswered("gone")}[node]
        self.time += half
        return {node: answer}


def test_a_shifted_clock_is_measured_by_the_fastest_round_trip() -> None:
    nodes = Shifted()
    clocks = measure_clocks(nodes, ("node0", "node1", "node2"), (0, 1, 2), nodes.now)
    assert set(clocks) == {"node0", "node1"}
    assert clocks["node0"].offset_s == pytest.approx(0, abs=1e-9) and clocks["node0"].error_s == pytest.approx(0.01)
    assert clocks["node1"].offset_s == pytest.approx(-3600)


@pytest.mark.parametrize("number", range(1, 18))
def test_a_tournament_has_every_pair_once_in_rounds_of_disjoint_pairs(number: int) -> None:
    rounds = tournament(number)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(itertools.combinations(range(number), 2))
    for pairs in (*rounds, *ring(number)):
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
    assert len(rounds) == max(0, number - 1 + number % 2)
    neighbours = {tuple(sorted((k, (k + 1) % number))) for k in range(number)} if number > 1 else set()
    assert {pair for pairs in ring(number) for pair in pairs} == neighbours and len(ring(number)) <= 3


def test_nodes_of_one_name_are_told_apart() -> None:
    a, b = NodeName(host="vm", address="10.0.0.1"), NodeName(host="vm", address="10.0.0.2")
    assert unique_labels([a, b, NodeName(host="x", address="10.0.0.3")]) == ("vm (10.0.0.1)", "vm (10.0.0.2)", "x")
    assert len(set(unique_labels([a, a, b]))) == 3


def test_messages_have_the_network_of_a_rank_and_not_that_of_the_node_s_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL too, which no test of this repository runs between nodes."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"):
        monkeypatch.setenv(name, "wrong0")
    monkeypatch.setattr("miles_like.doctor.examiner.query_gpus", lambda: "no nvidia-smi")
    monkeypatch.setattr("miles_like.doctor.examiner.engine_software", lambda interpreter: "none")
    monkeypatch.setattr(Linker, "warm", lambda self: None)
    needs = Needs(network=partial(network_variables, env={"NCCL_IB_HCA": "mlx5"}))
    node = examiner_of(needs, brief=True)()
    interface = node.report("127.0.0.1", "token")["machine"]["interface"]
    node.warm()
    assert interface in ("lo", "lo0") and os.environ["GLOO_SOCKET_IFNAME"] == interface
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={interface}" and os.environ["NCCL_IB_HCA"] == "mlx5"


def test_this_machine_alone_is_examined_and_its_taken_port_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_like.doctor.examiner.query_gpus", lambda: "no nvidia-smi")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = ServerPort(number=port, server="rollout server 0", purpose="HTTP", key="rollout.port")
        needs = Needs(ports=lambda ranges: {0: (own,)}, local=(str(tmp_path),))
        found = examine(ThisMachine(examiner_of(needs)), needs)
    assert any(f.check == f"port {port}" and f.text for f in found.findings)
    assert not found.links and not found.clocks and not list(tmp_path.iterdir())
