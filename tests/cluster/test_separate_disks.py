"""Nodes with a disk each: a conversion over them is bitwise that of one machine, though only the driver's node has the
source; a node that ends in the middle costs only its own units; each node then gets what it loads, from whichever node
holds it. With a shared disk no byte goes through Ray.

Not covered: networks that lose packets, nodes that come back with another address.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import separate_disks
from tests.support.namespaces import Cluster, Node, nodes
from tests.support.node_listing import listed, times

# a run over two nodes with a disk each is converted and staged there too
pytestmark = pytest.mark.long(beside="tests/cluster/test_spread_run.py")

RAY = str(Path(sys.executable).with_name("ray"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with nodes(3, disk_mib=64, work=tmp_path_factory.mktemp("n")) as made:
        made.start_ray(cpus=2)
        yield made


@pytest.fixture(scope="module")
def alone(cluster: Cluster) -> dict[str, Any]:
    """What one machine makes of the source, which is on the driver's node."""
    return cluster[0].call(separate_disks.write_source, cluster.disk)


def wait_for_units(node: Node, directory: Path, number: int) -> None:
    until = time.monotonic() + 240
    while len(node.call(times, directory)) < number:
        assert time.monotonic() < until, f"{node.name} converted nothing"
        time.sleep(0.5)


def test_with_a_shared_disk_nothing_is_elsewhere(cluster: Cluster, tmp_path: Path) -> None:
    driver, second, _ = cluster
    alone = driver.call(separate_disks.write_source, tmp_path)
    local = cluster.disk / "unused"
    found = driver.call(
        separate_disks.convert_apart, tmp_path / "hf", tmp_path / "out", cluster.ray_address, local, False
    )
    assert found == alone and found["elsewhere"] == "{}"
    assert not second.call(listed, local)


def test_a_conversion_over_separate_disks_survives_a_node_and_is_staged_by_need(
    cluster: Cluster, alone: dict[str, Any]
) -> None:
    driver, second, third = cluster
    disk, address = cluster.disk, cluster.ray_address
    out, local = disk / "cache" / "out", disk / "local"
    pieces = local / "cache.out.pieces"
    driver.run(["mkdir", str(disk / "cache")])
    begun = [str(disk / "hf"), str(out), address, str(local)]
    first = driver.popen([sys.executable, "-c", _STUCK, *begun], stderr=subprocess.PIPE, text=True)
    wait_for_units(third, pieces, 2)
    third.run([RAY, "stop", "--force"])
    _, errors = first.communicate(timeout=240)
    assert first.returncode and "run again, converted parts are kept" in errors, errors[-2000:]
    kept = second.call(times, pieces)
    assert len(kept) > 2 and not second.call(listed, disk / "hf")  # the source is on the driver's node alone

    found = driver.call(separate_disks.convert_apart, disk / "hf", out, address, local, False, 2)
    assert found["manifest"] == alone["manifest"] and found["metadata"] == alone["metadata"]
    elsewhere = json.loads(found["elsewhere"])
    assert {tuple(where) for where in elsewhere.values()} == {(second.address, str(pieces))}
    assert found["here"] and set(found["here"]) | set(elsewhere) == set(alone["here"])
    again = second.call(times, pieces)
    assert again.items() >= kept.items() and set(elsewhere) == set(again)  # what was kept is not written twice
    check_staging(cluster, out)


def check_staging(cluster: Cluster, out: Path) -> None:
    driver, _, third = cluster
    disk, address = cluster.disk, cluster.ray_address
    back = [f"--address={address}", "--num-cpus=2", f"--node-ip-address={third.address}"]
    third.run([RAY, "start", *back, "--object-store-memory=80000000"])
    staged, resumed = driver.call(separate_disks.stage_twice, disk / "hf", out, disk / "staged", address)
    whole = driver.call(listed, disk / "alone")
    source = driver.call(listed, disk / "hf")
    by_node = [node.call(listed, disk / "staged") for node in cluster]
    for files in by_node:
        for name, digest in files.items():
            folder, _, file = name.partition("/")
            assert digest == (source if folder == "hf" else whole)[file], name
        assert {"hf/config.json", "hf/tokenizer.json", "megatron/.metadata"} <= set(files)
        # a stage of the pipeline
        assert 0 < sum(name.endswith(".distcp") for name in files) < 0.6 * len(whole)
    weights = [any(name.endswith(".safetensors") for name in files) for files in by_node]
    assert sorted(weights) == [False, False, True]  # of the node with the server
    assert all(s["copied_bytes"] == s["hashed_bytes"] == 0 for s in resumed)
    assert [s["skipped_bytes"] for s in resumed] == [s["copied_bytes"] for s in staged]


_STUCK = """
import sys
from pathlib import Path
from tests.support.separate_disks import convert_apart
source, out, address, local = sys.argv[1:]
convert_apart(Path(source), Path(out), address, Path(local), True)
"""
