"""The nodes that tests/support/namespaces.py makes are as separate as machines, and nothing is left of them.

Not covered: latency and bandwidth of a real network; GPUs, which are pretended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.namespaces import ROOT, Cluster, Node, need_namespaces, nodes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with nodes(3, hosts=["good", "hostile", "good"], disk_mib=[16, 32, 32], work=tmp_path_factory.mktemp("n")) as made:
        yield made


def name_and_address() -> tuple[str, str]:
    return socket.gethostname(), socket.gethostbyname(socket.gethostname())


def test_a_node_has_a_name_an_address_and_a_hosts_file(cluster: Cluster) -> None:
    found = [node.call(name_and_address) for node in cluster]
    assert found == [("node0", "192.168.77.1"), ("node1", "127.0.1.1"), ("node2", "192.168.77.3")]
    assert socket.gethostname() != "node0"


def test_disks_are_apart_and_all_else_is_shared(cluster: Cluster, tmp_path: Path) -> None:
    cluster[0].run(["touch", str(cluster.disk / "here"), str(tmp_path / "there")])
    assert not list(cluster.disk.iterdir())
    assert cluster[1].run(["ls", str(cluster.disk), str(tmp_path)]).stdout.split()[-1] == "there"
    full = cluster[0].run(["dd", "if=/dev/zero", f"of={cluster.disk / 'zero'}", "bs=1M", "count=17"], check=False)
    assert full.returncode and "No space left" in full.stderr


LINK_UP_S = 20.0  # on a busy machine the bridge forwards some time after the port is up


def reaches(node: Node, other: str) -> bool:
    script = f"import socket; socket.create_connection(({other!r}, 1), timeout=1)"
    return "refused" in node.run([sys.executable, "-S", "-c", script], check=False).stderr


def test_a_cable_can_be_pulled_and_a_route_refused(cluster: Cluster) -> None:
    assert reaches(cluster[0], cluster[1].address) and reaches(cluster[2], cluster[1].address)
    cluster[1].unplug()
    assert not reaches(cluster[0], cluster[1].address) and reaches(cluster[0], cluster[2].address)
    cluster[1].plug_in()
    until = time.monotonic() + LINK_UP_S
    while not reaches(cluster[0], cluster[1].address):
        assert time.monotonic() < until, f"node1 is not reached {LINK_UP_S:g} s after its cable was plugged in"
    cluster[2].refuse(cluster[0])
    assert not reaches(cluster[2], cluster[0].address) and reaches(cluster[2], cluster[1].address)


SERVER = "import socket; s = socket.create_server(('', 7777)); print('up', flush=True); s.accept()[0].sendall(b'node')"


def test_a_node_is_not_reached_from_outside(cluster: Cluster) -> None:
    server = cluster[0].popen([sys.executable, "-S", "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline() == "up\n"
    received = b""
    with contextlib.suppress(OSError), socket.create_connection((cluster[0].address, 7777), timeout=0.5) as s:
        received = s.recv(4)  # an outgoing proxy may accept
    assert not received and server.poll() is None
    received = cluster[1].call(receive, cluster[0].address)
    assert received == b"node" and server.wait(10) == 0


def receive(address: str) -> bytes:
    with socket.create_connection((address, 7777), timeout=5) as s:
        return s.recv(4)


OWNER = """
import subprocess, sys, time
from pathlib import Path
from tests.support.namespaces import nodes
with nodes(2, work=Path(sys.argv[1]), disk="ext4") as cluster:
    cluster[1].run(["sh", "-c", "setsid sleep 777.5 & "])
    cluster[0].popen(["sleep", "777.5"])
    cluster[1].hang_disk()
    cluster[1].popen(["sh", "-c", f"echo > {cluster.disk}/x", "777.5"])
    cluster[0].pause()
    print("up", flush=True)
    time.sleep(600)
"""


def sleeping() -> list[str]:
    out = []
    for p in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            out += [p.parent.name] if b"777.5" in p.read_bytes().split(b"\0") else []
        except OSError:
            continue
    return out


def test_nothing_is_left_of_a_cluster_whose_test_was_killed(tmp_path: Path) -> None:
    """Nor of a node that was paused, nor of one whose disk hangs."""
    need_namespaces()
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "up\n" and within_10_s(sleeping)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert within_10_s(lambda: not sleeping())


def within_10_s(becomes_true: Callable[[], object]) -> bool:
    until = time.monotonic() + 10
    while not becomes_true() and time.monotonic() < until:
        time.sleep(0.05)
    return bool(becomes_true())
