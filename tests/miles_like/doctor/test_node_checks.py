"""A healthy cluster has no fault, and each fault of a node is found, named and given a remedy.

Covered: every check once, from facts alone. Not covered: whether a machine reports these facts
(test_machine_facts.py, tests/cluster/test_doctor.py), and GPUs, whose facts are made here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from miles_like.check_results import Outcome
from miles_like.cluster.environment import network_variables
from miles_like.doctor.check_machine import check_disks, check_gpus, check_limits, check_memory, check_ports
from miles_like.doctor.check_network import ClockOffset, Link, check_clocks, check_links, check_names, check_nodes
from miles_like.doctor.check_software import check_software
from miles_like.doctor.examiner import NodeReport
from miles_like.doctor.findings import Finding, Needs
from miles_like.doctor.links import LinkTimes
from miles_like.nodes.facts import NodeName, ServerPort, Unanswered
from tests.support.node_reports import GIB, healthy
from tests.support.refusals import check_refusal

WHY = "trainer ranks write their checkpoints there"
NEEDS = Needs(
    nodes=3,
    gpus_per_node=8,
    shared={"/shared": dict.fromkeys(range(3), WHY)},
    local=("/local",),
    engine="/opt/engine/bin/python",
    engine_packages=("sglang",),
)
GIVEN = {"GLOO_SOCKET_IFNAME": "ib0"}
OF_RUN = replace(NEEDS, network=partial(network_variables, env={}))
ALL = ("node0", "node1", "node2")
SEEN = {"/shared": dict.fromkeys(ALL, ALL), "/local": {node: (node,) for node in ALL}}
PORTS = {
    node: [
        ServerPort(number=30000 + i, server=f"rollout server {i}", purpose="HTTP", key="rollout.port"),
        ServerPort(
            number=20003 + 64 * i,
            server=f"rollout server {i}",
            purpose="attention data parallelism",
            key="rollout.sglang.dist_init_port",
        ),
    ]
    for i, node in enumerate(ALL)
}
NAMES = {node: NodeName(host=node, address=f"192.168.0.{i + 1}") for i, node in enumerate(ALL)}
FAST = LinkTimes(latency_s=1e-4, bytes_per_s=5e9)
Reports = dict[str, NodeReport]


def cluster(gpus: int = 8) -> Reports:
    return {node: healthy(i, gpus=gpus) for i, node in enumerate(ALL)}


def checked(
    reports: Reports, needs: Needs = NEEDS, seen: dict[str, dict[str, tuple[str, ...]]] = SEEN
) -> list[Finding]:
    return [
        *check_software(reports, needs),
        *check_limits(reports),
        *check_names(reports, needs),
        *check_gpus(reports, needs, dict.fromkeys(reports, 8)),
        *check_memory(reports, dict.fromkeys(reports, 200 * GIB)),
        *check_ports(reports, PORTS, {}),
        *check_disks(reports, needs, seen, ALL),
    ]


def faults(findings: list[Finding]) -> list[str]:
    return [f.text for f in findings if f.outcome is Outcome.WRONG]


def remarks(findings: list[Finding]) -> list[str]:
    return [f.text for f in findings if f.outcome is Outcome.OK and f.text]


def test_a_healthy_cluster_has_no_fault_and_no_remark() -> None:
    found = checked(cluster())
    assert not faults(found) and not remarks(found)
    assert all(f.where for f in found)


def set_package(name: str, version: str) -> Callable[[NodeReport], object]:
    return lambda r: r["software"]["packages"].update({name: version})


def set_machine(**facts: object) -> Callable[[NodeReport], object]:
    return lambda r: r["machine"].update(facts)  # type: ignore[typeddict-item]


def set_limit(name: str, value: int) -> Callable[[NodeReport], object]:
    return lambda r: r["machine"]["ulimits"].update({name: value})


def set_gpu(**facts: object) -> Callable[[NodeReport], object]:
    return lambda r: r["gpus"][3].update(facts)  # type: ignore[index, union-attr]


def set_disk(path: str, **facts: object) -> Callable[[NodeReport], object]:
    return lambda r: r["disks"][path].update(facts)  # type: ignore[typeddict-item]


ONE_NODE = {  # what is wrong on node1 -> facts of the one message
    "torch": (set_package("torch", "2.13.0"), ("node1", "2.13.0", "2.14.1", "same version")),
    "engine": (lambda r: r.update(engine="No such file"), ("node1", "No such file", "interpreter")),
    "glibc": (lambda r: r["engine"].update(glibc="2.31"), ("node1", "2.31", "2.34", "newer system")),
    "nofile": (set_limit("nofile", 1024), ("node1", "nofile", 1024, 65536, "ulimit -n")),
    "memlock": (set_limit("memlock", 65536), ("node1", "memlock", "unlimited", "ulimit -l")),
    "nproc": (set_limit("nproc", 100), ("node1", "nproc", 100)),
    "stack": (set_limit("stack", 1024), ("node1", "stack", 8192)),
    "cgroup": (set_machine(cgroup_pids=100), ("node1", 100, "pids.max")),
    "hosts": (
        set_machine(name_resolves_to=["127.0.1.1"]),
        ("node1", "127.0.1.1", "/etc/hosts", "GLOO_SOCKET_IFNAME", "bond0"),
    ),
    "no address": (set_machine(name_resolves_to=[]), ("node1", "nothing", "/etc/hosts")),
    "shm": (set_machine(shm=64 << 20), ("node1", "/dev/shm", "200.0 GiB", "--shm-size")),
    "used GPU": (set_gpu(processes=["77 python"], free_mib=100), ("GPU 3", "node1", "77 python", "stop")),
    "full GPU": (set_gpu(free_mib=100), ("GPU 3", "node1", 100, "81,559")),
    "MIG": (set_gpu(mig="Enabled"), ("GPU 3", "node1", "MIG", "-mig 0")),
    "ECC": (set_gpu(ecc_errors="2"), ("GPU 3", "node1", 2, "reset")),
    "compute mode": (set_gpu(compute_mode="Exclusive_Process"), ("GPU 3", "node1", "Exclusive_Process", "-c 0")),
    "other GPUs": (
        lambda r: [g.update(name="NVIDIA A100") for g in r["gpus"]],
        ("node1", "NVIDIA A100", "NVIDIA H100 80GB HBM3"),
    ),
    "driver": (
        lambda r: [g.update(driver="580.82.07") for g in r["gpus"]],
        ("node1", "580.82.07", "580.95.05"),
    ),
    "port range": (
        set_machine(ephemeral_ports=(15000, 60999)),
        ("node1", 30001, "rollout server 1", "15000-60999", "net.ipv4.ip_local_port_range"),
    ),
    "full disk": (set_disk("/local", free=10 << 20), ("node1", "/local", 10)),
    "no right": (set_disk("/local", error="Permission denied"), ("node1", "/local", "Permission denied")),
}


@pytest.mark.parametrize("what", ONE_NODE)
def test_a_fault_of_one_node_names_it_with_a_remedy(what: str) -> None:
    break_it, facts = ONE_NODE[what]
    reports = cluster()
    break_it(reports["node1"])
    texts = faults(checked(reports))
    assert texts and not any(t.startswith(("node0", "node2")) for t in texts)
    check_refusal(texts[0], *facts)


OF_ALL = {  # what is wrong on every node -> facts of the message
    "CUDA driver": (
        lambda r: [g.update(driver="535.10.01") for g in r["gpus"]],
        ("535.10.01", "580.65.06", "13.0", "update the driver"),
    ),
    "torch of sglang": (set_package("torch", "2.13.0"), ("sglang", "0.5.23", "2.13.0", "torch==2.14.1")),
    "TransformerEngine's CUDA": (
        lambda r: r["software"]["distributions"].update({"transformer-engine-cuda": "transformer-engine-cu12"}),
        ("transformer-engine-cu12", "13.0", "transformer-engine-cu13"),
    ),
    "no megatron": (lambda r: r["software"]["packages"].pop("megatron-core"), ("megatron-core", "install it")),
}


@pytest.mark.parametrize("what", OF_ALL)
def test_versions_that_are_equal_and_do_not_fit(what: str) -> None:
    break_it, facts = OF_ALL[what]
    reports = cluster()
    for report in reports.values():
        break_it(report)
    text = next(t for t in faults(checked(reports)) if str(facts[0]) in t)
    check_refusal(text, "node0", *facts)


def test_a_port_in_use_is_named_with_its_server_and_its_key() -> None:
    """On the node of that server alone: another node may use the number."""
    found = check_ports(cluster(), PORTS, {"node1": [20067, 20003], "node2": [20003]})
    (text,) = faults(found)
    check_refusal(
        text, "node1", 20067, "rollout server 1", "attention data parallelism", "rollout.sglang.dist_init_port"
    )
    free = {(f.check, f.where): f.found for f in found if f.check.startswith("ports of")}
    assert free["ports of rollout server 1", ("node1",)] == "30001 free"
    assert free["ports of rollout server 2", ("node2",)] == "30002, 20131 free"
    (text,) = faults(check_ports(cluster(), "no room", {}))
    assert text == "no room"


def test_a_directory_that_must_be_shared_and_one_that_must_not() -> None:
    texts = faults(checked(cluster(), seen={"/shared": SEEN["/local"], "/local": SEEN["/shared"]}))
    assert len(texts) == 2
    check_refusal(texts[0], "/shared", "node0", "node0", "node1", WHY)
    check_refusal(texts[1], "/local", "cluster.stage_dir")


def test_a_directory_must_be_shared_by_those_nodes_of_the_run_that_need_it() -> None:
    """Here the run is on node1 and node2; node0 is a head, or has only a server."""
    blind = {"/shared": {"node0": ("node0",), "node1": ALL[1:], "node2": ALL[1:]}, "/local": SEEN["/local"]}
    needs = replace(NEEDS, shared={"/shared": {0: WHY, 1: WHY}})
    assert not faults(check_disks(cluster(), needs, blind, ALL[1:]))
    (text,) = faults(check_disks(cluster(), needs, blind, ALL))
    check_refusal(text, "/shared", "node0", "node1", WHY)


def test_a_cache_on_each_node_s_own_disk_is_remarked() -> None:
    either = replace(NEEDS, shared={}, either=("/shared",), local=())
    (text,) = remarks(check_disks(cluster(), either, {"/shared": SEEN["/local"]}, ALL))
    assert text.startswith("/shared is a separate directory on each node")
    assert not remarks(check_disks(cluster(), either, {"/shared": SEEN["/shared"]}, ALL))


def test_too_few_gpus_and_a_head_without_any() -> None:
    reports = cluster()
    reports["node0"]["gpus"] = "no nvidia-smi"
    two = replace(NEEDS, nodes=2)
    assert not faults(check_gpus(reports, two, {"node0": 0, "node1": 8, "node2": 8}))
    (text,) = faults(check_gpus(reports, NEEDS, {"node0": 0, "node1": 8, "node2": 8}))
    check_refusal(text, "node0", 0, "cluster.gpus_per_node", 8)
    none = check_gpus(cluster(gpus=0), Needs(), {})
    assert [(f.outcome, f.text) for f in none] == [(Outcome.NOT_CHECKED, "no GPU: not checked")]


def test_limits_are_of_gpu_nodes_where_only_they_need_them() -> None:
    reports = cluster(gpus=0)
    for report in reports.values():
        report["machine"]["ulimits"].update(nofile=20000, memlock=8 << 20)
        report["machine"]["cgroup_pids"] = 100
    assert not faults(check_limits(reports))


def test_remarks_are_no_faults() -> None:
    reports = cluster()
    reports["node1"]["machine"].update(cgroup_memory=100 * GIB, cgroup_cpus=8.0, memory=1000 * GIB, cores=48)
    reports["node1"]["gpus"][0]["persistence"] = "Disabled"  # type: ignore[index]
    reports["node2"]["disks"]["/local"]["kind"] = "tmpfs"
    reports["node2"]["disks"]["/shared"]["read"] = 1e6
    found = checked(reports)
    assert not faults(found)
    words = " / ".join(remarks(found))
    for part in (
        "100.0 GiB of 1,000.0 GiB",
        "8 of 48 cores",
        "smallest node",
        "nvidia-smi -pm 1",
        "in-memory file system",
        "/shared is slow on node2",
    ):
        assert part in words


def test_the_name_is_no_trap_where_the_run_names_the_interface() -> None:
    reports = cluster()
    reports["node1"]["machine"]["name_resolves_to"] = ["127.0.1.1"]
    found = check_names(reports, OF_RUN)
    assert not faults(found) and len(remarks(found)) == 1
    reports["node1"]["machine"]["interface"] = None  # then the run leaves it to gloo
    assert faults(check_names(reports, OF_RUN))
    assert not faults(check_names(reports, replace(OF_RUN, network=partial(network_variables, env=GIVEN))))


def test_a_node_that_does_not_answer_and_one_that_left_are_named() -> None:
    texts = faults(check_nodes(["node0"], {"node1": "it did not answer within 9 s"}, ["192.168.0.3"], NEEDS))
    assert len(texts) == 3
    check_refusal(texts[0], "node1", "within 9 s", "start Ray there")
    check_refusal(texts[1], "192.168.0.3", "left", "start Ray there")
    check_refusal(texts[2], 1, 3, "cluster.nodes")


def test_a_clock_is_wrong_by_more_than_the_measurement_s_error() -> None:
    right = ClockOffset(offset_s=5.0, error_s=4.5)
    (text,) = faults(check_clocks({"node0": right, "node1": ClockOffset(offset_s=-3600.5, error_s=0.01)}))
    check_refusal(text, "node1", "-3600.50 s", "NTP")


def link(first: int, second: int, result: LinkTimes | Unanswered = FAST, backend: str = "gloo") -> Link:
    return Link(backend=backend, ends=(ALL[first], ALL[second]), result=result)


def test_a_pair_that_fails_is_named_with_the_reason_and_the_remedy() -> None:
    reports = cluster()
    links = [link(0, 1), link(0, 2, Unanswered("no route to host")), link(1, 2)]
    (text,) = faults(check_links("gloo", links, reports, NAMES, NEEDS))
    check_refusal(text, "gloo", "node0", "node2", "no route to host", "192.168.0.1", "192.168.0.3", "firewall")
    (text,) = faults(
        check_links("nccl", [link(0, 1, Unanswered("unhandled system error"), "nccl")], reports, NAMES, NEEDS)
    )
    check_refusal(text, "nccl", "node0", "node1", "unhandled system error", "NCCL_DEBUG=INFO", "NCCL_IB_HCA")
    reports["node2"]["machine"]["name_resolves_to"] = ["127.0.1.1"]
    (text,) = faults(check_links("gloo", links, reports, NAMES, NEEDS))
    check_refusal(text, "node2", "node2", "127.0.1.1", "/etc/hosts", "GLOO_SOCKET_IFNAME")
    (text,) = faults(check_links("gloo", links, reports, NAMES, OF_RUN))
    check_refusal(text, "node2", "no route to host", "firewall")
    of_config = replace(OF_RUN, environment=GIVEN, network=partial(network_variables, env=GIVEN))
    (text,) = faults(check_links("gloo", links, reports, NAMES, of_config))
    check_refusal(text, "GLOO_SOCKET_IFNAME", "ib0", "[cluster.env]", "192.168.0.1", "192.168.0.3")


def test_many_pairs_are_summed_up_and_a_slow_one_is_remarked() -> None:
    slow = LinkTimes(latency_s=2e-3, bytes_per_s=1e8)
    links = [link(i % 2, 2, FAST) for i in range(9)] + [link(0, 1, slow)]
    found = check_links("gloo", links, cluster(), NAMES, NEEDS)
    assert not faults(found) and len(found) == 2
    assert "slowest 2.00 ms, 100 MB/s" in found[0].found and "the median of all pairs is 5.0 GB/s" in remarks(found)[0]


def test_a_sandbox_that_runs_no_program_is_named() -> None:
    reports = cluster()
    assert not [f for f in check_software(reports, NEEDS) if f.check == "sandbox"], "a run without one"
    for node, fault in zip(ALL, ("", "sandbox.kind = 'bwrap' needs the program bwrap", ""), strict=True):
        reports[node]["sandbox"] = fault
    found = [f for f in check_software(reports, NEEDS) if f.check == "sandbox"]
    assert [(f.where, f.outcome.name) for f in found] == [(("node0", "node2"), "OK"), (("node1",), "WRONG")]
    assert found[1].text == "node1: sandbox.kind = 'bwrap' needs the program bwrap"
