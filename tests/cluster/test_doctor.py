"""`miles-like doctor` over three nodes: green where they are well; a node that is not, and what is wrong, is named.

Covered: Ray over a network, gloo between all pairs and its real failure where a host name is 127.0.1.1, shared and
local disks, ports. Not covered: GPUs and NCCL, other versions on one node.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles_like.check_results import Outcome
from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from tests.support.namespaces import ROOT, Cluster, nodes
from tests.support.refusals import check_refusal

# each finding, by what nodes answer, is held there
pytestmark = pytest.mark.long(beside="tests/miles_like/doctor/test_node_checks.py")

TINY = ROOT / "configs" / "tiny.toml"
WHY = "measured values, and names of other nodes' faults beside it"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[Cluster]:
    with nodes(3, disk_mib=256, work=shared) as made:
        made.start_ray()
        yield made


def settings(*given: str) -> list[str]:
    """Options of a run over the three nodes with a server on each."""
    sets = ["cluster.nodes=3", "rollout.servers=3", *given]
    return ["--config", str(TINY), *(word for setting in sets for word in ("--set", setting))]


def doctor(cluster: Cluster, shared: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """(exit status, the file it writes, what it prints)."""
    file = shared / "found.json"
    run = ["-m", "miles_like.cli", "doctor", "--ray-address", cluster.ray_address, "--json", str(file), *options]
    done = cluster[0].run([sys.executable, *run], check=False, env={"COLUMNS": "160"}, timeout_s=300.0)
    return done.returncode, json.loads(file.read_text()), done.stdout + done.stderr


def wrong(found: dict[str, Any], check: str) -> list[tuple[list[str], str]]:
    """(nodes, text) of the faults of a check."""
    return [
        (f["where"], f["text"]) for f in found["findings"] if f["outcome"] == "wrong" and f["check"].startswith(check)
    ]


def test_three_healthy_nodes(cluster: Cluster, shared: Path) -> None:
    given = settings(f"cache_dir={shared}/cache", f"cluster.stage_dir={cluster.disk}", "rollout.port=20000")
    status, found, printed = doctor(cluster, shared, *given, "--run-dir", str(shared / "run"))
    assert status == 0 and found["ok"], printed
    assert set(found["nodes"]) == set(found["clocks"]) == {"node0", "node1", "node2"}
    assert sorted(sorted(x["ends"]) for x in found["links"]) == [
        ["node0", "node1"],
        ["node0", "node2"],
        ["node1", "node2"],
    ]
    assert all(link["latency_s"] > 0 and link["bytes_per_s"] > 0 for link in found["links"])
    reach = {f["check"]: f["found"] for f in found["findings"] if f["check"].startswith("reach")}
    same = {f"reach of {shared}/{name}": "shared" for name in ("cache", "run")}
    assert reach == {**same, f"reach of {cluster.disk}": "local"}
    ports = {f["check"]: (f["where"], f["found"]) for f in found["findings"] if f["check"].startswith("ports of")}
    assert ports == {f"ports of rollout server {i}": ([f"node{i}"], f"{20000 + i} free") for i in range(3)}
    assert {f["found"] for f in found["findings"] if f["check"] == f"disk {cluster.disk}"} != set()
    assert "all 3 nodes" in printed and "no GPU: not checked" in json.dumps(found)
    assert not list((shared / "namespaces" / "disk").iterdir())
    assert cluster[1].run(["find", str(cluster.disk), str(shared), "-name", ".miles-like-doctor*"]).stdout == ""


def test_a_hostile_hosts_file_a_taken_port_and_disks_are_named(cluster: Cluster, shared: Path) -> None:
    """gloo really fails between the node whose name is 127.0.1.1 and the others, and not between those. With a run's
    configuration it does not: the run gives each rank the interface of its node's address.

    The run's cache is on the nodes' own disks, which is no fault, as its directory is; the directory of node 1 for
    copies cannot be written. A port of the server of node 2 is taken, which stock SGLang would bind for itself.
    """
    taker = "import socket; s = socket.create_server(('', 20131)); print('up', flush=True); s.accept()"
    server = cluster[2].popen([sys.executable, "-S", "-c", taker], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline() == "up\n"
    full = ["dd", "if=/dev/zero", f"of={cluster.disk / 'zero'}", "bs=1M", "count=240"]
    cluster[0].run(full)
    cluster[1].set_hosts("hostile")
    (shared / "copies").mkdir()
    cluster[1].run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(shared / "copies")])
    try:
        own = [f"cache_dir={cluster.disk}/cache", "model.make=false", "model.path=owner/name"]
        own += [f"cluster.stage_dir={shared}/copies", f"data.train={ROOT}/configs/tiny/train.jsonl"]
        stock = ["rollout.engine=sglang", "rollout.sglang.enable_dp_attention=true"]
        given = settings(*own, *stock)
        _, of_run, _ = doctor(cluster, shared, *given, "--run-dir", str(cluster.disk / "run"))
        status, found, printed = doctor(cluster, shared)
    finally:
        cluster[1].run(["umount", str(shared / "copies")])
        cluster[1].set_hosts("good")
        cluster[0].run(["rm", str(cluster.disk / "zero")])
        server.kill()
    assert status == 1, printed
    ((where, text),) = wrong(found, "host name")
    assert where == ["node1"]
    check_refusal(text, "node1", "127.0.1.1", "/etc/hosts", "GLOO_SOCKET_IFNAME=eth0")
    failed = [link for link in found["links"] if "error" in link]
    assert sorted(sorted(link["ends"]) for link in failed) == [["node0", "node1"], ["node1", "node2"]]
    assert any("127.0.1.1" in link["error"] for link in failed)
    for _, text in wrong(found, "gloo"):
        check_refusal(text, "node1", "127.0.1.1", "/etc/hosts", unrecorded=WHY)
    assert not wrong(of_run, "gloo") and not wrong(of_run, "host name")
    assert not [link for link in of_run["links"] if "error" in link]
    ((where, text),) = wrong(of_run, "port ")
    assert where == ["node2"]
    facts = "node2", "rollout server 2", "attention data parallelism", "rollout.sglang.dist_init_port"
    check_refusal(text, *facts)
    ((where, text),) = wrong(of_run, f"disk {cluster.disk}/cache")
    assert where == ["node0"] and str(cluster.disk) in text and "16 MiB free" in text
    ((where, text),) = wrong(of_run, f"disk {shared}/copies")
    assert where == ["node1"]
    check_refusal(text, "node1", "Read-only file system", "another path")
    ((_, text),) = wrong(of_run, f"reach of {cluster.disk}/run")
    check_refusal(text, "node0", "node1", "trainer ranks write their checkpoints", "mount the shared file system")
    assert not wrong(of_run, f"reach of {cluster.disk}/cache")
    remarks = [f["text"] for f in of_run["findings"] if f["check"] == f"reach of {cluster.disk}/cache"]
    assert len(remarks) == 1 and "a separate directory on each node" in remarks[0]


def brief(address: str, *configs: RunConfig) -> list[list[tuple[str, str, str]]]:
    """What the start of a run of each configuration finds."""
    from miles_like.nodes.members import living_nodes
    from miles_like.nodes.session import start_ray
    from miles_like.preflight.examination import brief_checks

    start_ray(address)
    return [
        [(check.name, check.outcome.value, check.text) for check in brief_checks(config, living_nodes())]
        for config in configs
    ]


def test_the_start_of_a_run_finds_a_pair_that_does_not_reach_each_other(cluster: Cluster, shared: Path) -> None:
    config = load_config(TINY, ["cluster.nodes=3"])
    cluster[1].refuse(cluster[2])
    try:
        (found,) = cluster[0].call(brief, cluster.ray_address, config)
    finally:
        cluster[1].refuse(cluster[2], refused=False)
    (text,) = [text for _, outcome, text in found if outcome == Outcome.WRONG]
    check_refusal(text, "gloo", "node1", "node2", cluster[1].address, cluster[2].address, unrecorded=WHY)
    assert {name.partition(" of ")[0] for name, *_ in found} >= {"node", "clock", "host name", "trainer: torch"}


def test_messages_go_by_the_interface_that_the_run_s_configuration_names(cluster: Cluster) -> None:
    """Which is not always that of the nodes' addresses; the name of node 1 is no trap for either."""
    cluster[1].set_hosts("hostile")
    given = [
        load_config(TINY, ["cluster.nodes=3", f"cluster.env.GLOO_SOCKET_IFNAME={name}"]) for name in ("eth0", "none0")
    ]
    try:
        right, other = cluster[0].call(brief, cluster.ray_address, *given)
    finally:
        cluster[1].set_hosts("good")
    assert not [text for _, outcome, text in right if outcome == Outcome.WRONG]
    texts = [text for _, outcome, text in other if outcome == Outcome.WRONG]
    assert len(texts) == 3
    for text in texts:
        check_refusal(text, "gloo", "GLOO_SOCKET_IFNAME", "[cluster.env]", "none0", unrecorded=WHY)


def end_ray_process() -> None:
    """Runs on a node, which sees its own processes alone."""
    for process in psutil.process_iter():
        if process.name() == "raylet":
            process.kill()


def test_a_node_that_left_the_cluster_is_named_and_the_others_are_examined(cluster: Cluster, shared: Path) -> None:
    """The last test of this file: the node does not come back."""
    cluster[2].call(end_ray_process)
    _, found, _ = doctor(cluster, shared)
    named = [f["text"] for f in found["findings"] if f["outcome"] == "wrong" and cluster[2].address in f["text"]]
    assert named
    check_refusal(named[0], cluster[2].address, "start Ray there", unrecorded="the node has left, or is about to")
    assert not [link for link in found["links"] if link["ends"] == ["node0", "node1"] and "error" in link]
