"""Sixteen nodes of namespaces, and what a fault does to each kind of them: tests of faults rely on it.

A fault is felt where it should be and nowhere else, and ends. Not covered: clocks (all nodes have the machine's),
faults of memory and of GPUs.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.namespaces import Cluster, Node, address_of, nodes
from tests.support.switch import NETWORKS

NODES, DISK_MIB = 16, 8
NO_ANSWER_S = 0.7  # that a packet would not take to be answered
ANSWERS_S = 30.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with nodes(NODES, disk_mib=DISK_MIB, shm_mib=16, disk="ext4", work=tmp_path_factory.mktemp("n")) as made:
        yield made


def started(node: Node, program: str, *arguments: str) -> subprocess.Popen[str]:
    """A program that has printed `up`."""
    command = [sys.executable, "-S", "-c", program, *arguments]
    process = node.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def asked(process: subprocess.Popen[str], word: str) -> str:
    """Its next line after a line to it."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


# Answers the `end` of what it is sent with the node's name, and each datagram.
ECHO = """
import select, socket
tcp, udp, open_ = socket.create_server(("", 7000)), socket.socket(type=socket.SOCK_DGRAM), []
udp.bind(("", 7000))
name = socket.gethostname().encode()
print("up", flush=True)
while True:
    for s in select.select([tcp, udp, *open_], [], [])[0]:
        if s is tcp:
            open_.append(tcp.accept()[0])
        elif s is udp:
            data, sender = udp.recvfrom(100)
            udp.sendto(name + b" " + data, sender)
        elif data := s.recv(1 << 16):
            s.sendall(name + b" end" if data.endswith(b"end") else b"")
        else:
            open_.remove(s)
"""
# `ask ADDRESS`, over a connection that is kept; `send ADDRESS BYTES`; `flood ADDRESS N` datagrams. Prints seconds.
TALK = """
import socket, sys, time
kept = {}
print("up", flush=True)
for line in sys.stdin:
    what, address, *more = line.split()
    began = time.monotonic()
    if what == "flood":
        s = socket.socket(type=socket.SOCK_DGRAM)
        for k in range(int(more[0])):
            s.sendto(b"%d" % k, (address, 7000))
            time.sleep(0.001)
        s.settimeout(0.5)
        came = 0
        try:
            while s.recv(100):
                came += 1
        except TimeoutError:
            print(came, flush=True)
        continue
    try:
        if address not in kept:
            kept[address] = socket.create_connection((address, 7000), timeout=float(more[-1]))
        kept[address].settimeout(float(more[-1]))
        if what == "send":
            kept[address].sendall(bytes(int(more[0])))
        kept[address].sendall(b"end")
        answer = b""
        while not answer.endswith(b"end"):
            if not (part := kept[address].recv(1000)):
                raise ConnectionResetError
            answer += part
        print(time.monotonic() - began, answer.decode().split()[0], flush=True)
    except OSError as e:
        print(type(e).__name__, flush=True)
"""


class Talks:
    """Node 0 talks to another node, which answers."""

    def __init__(self, cluster: Cluster, other: int) -> None:
        self._other, self._echo, self._talk = other, started(cluster[other], ECHO), started(cluster[0], TALK)

    def asks(self, network: int = 0, within_s: float = ANSWERS_S) -> str:
        """`node{k}` or the name of an error."""
        return asked(self._talk, f"ask {address_of(self._other, network)} {within_s}").split()[-1]

    def seconds(self, *, size: int = 0) -> float:
        """Of a question with so many bytes before it."""
        return float(asked(self._talk, f"send {address_of(self._other)} {size} {ANSWERS_S}").split()[0])

    def flood(self, number: int) -> int:
        """How many of so many datagrams are answered."""
        return int(asked(self._talk, f"flood {address_of(self._other)} {number}"))

    def end(self) -> None:
        for process in (self._echo, self._talk):
            process.kill()
            process.wait()


@pytest.fixture
def talks(cluster: Cluster) -> Iterator[Talks]:
    """With node 15."""
    made = Talks(cluster, NODES - 1)
    yield made
    made.end()


def test_each_of_sixteen_nodes_has_two_addresses_a_name_and_a_disk(cluster: Cluster, talks: Talks) -> None:
    for k, node in enumerate(cluster):
        shown = node.run(["sh", "-c", f"hostname; hostname -I; df -m --output=size {cluster.disk} | tail -1"]).stdout
        name, *addresses, size = shown.split()
        assert (name, addresses) == (f"node{k}", [address_of(k, n) for n in range(NETWORKS)])
        assert DISK_MIB // 2 < int(size) <= DISK_MIB
        node.run(["touch", str(cluster.disk / name)])
    for k, node in enumerate(cluster):
        assert set(node.run(["ls", str(cluster.disk)]).stdout.split()) - {"lost+found"} == {f"node{k}"}
    assert [talks.asks(n) for n in range(NETWORKS)] == [f"node{NODES - 1}"] * NETWORKS


def test_the_cable_of_one_network_can_be_pulled(cluster: Cluster, talks: Talks) -> None:
    assert {talks.asks(0), talks.asks(1)} == {"node15"}
    cluster[15].unplug(0)
    assert (talks.asks(0, NO_ANSWER_S), talks.asks(1)) == ("TimeoutError", "node15")
    cluster[15].plug_in(0)


def test_a_narrow_cable_takes_its_time(cluster: Cluster, talks: Talks) -> None:
    """At least that: a busy machine takes longer."""
    cluster[15].narrow(8)
    try:
        assert talks.seconds(size=500_000) > 0.8 * (500_000 - (64 << 10)) / 1e6
    finally:
        cluster[15].narrow(None)


def test_a_bad_cable_is_late_and_loses_packets_and_connections_survive_it(cluster: Cluster, talks: Talks) -> None:
    assert talks.flood(50) == 50
    cluster[15].worsen(delay_s=0.15)
    assert talks.seconds() > 0.3
    cluster[15].worsen(loss=0.3)
    assert 5 < talks.flood(100) < 90
    cluster[15].worsen(loss=0.02)
    assert talks.seconds(size=2_000_000) > 0
    cluster[15].restore()
    assert talks.flood(50) == 50


def test_islands_do_not_reach_each_other_and_connections_go_on_afterwards(cluster: Cluster, talks: Talks) -> None:
    near = Talks(cluster, 1)
    try:
        assert (talks.asks(), near.asks()) == ("node15", "node1")
        with cluster.apart([15, 14]):
            assert (talks.asks(0, NO_ANSWER_S), talks.asks(1, NO_ANSWER_S)) == ("TimeoutError", "TimeoutError")
            assert near.asks() == "node1"
        assert talks.asks() == "node15"
    finally:
        near.end()


def test_a_paused_node_does_not_answer_and_goes_on(cluster: Cluster, talks: Talks) -> None:
    assert talks.asks() == "node15"
    cluster[15].pause()
    assert talks.asks(0, NO_ANSWER_S) == "TimeoutError"
    cluster[15].go_on()
    assert talks.asks() == "node15"
    assert cluster[15].run(["echo", "there"]).stdout == "there\n"


def test_a_node_that_crashes_is_silent_and_keeps_its_disk(cluster: Cluster, talks: Talks) -> None:
    """The other end of a connection learns nothing of it until the node is there again, and the connection is not."""
    node = cluster[15]
    node.run(["sh", "-c", f"echo kept > {cluster.disk}/kept; echo > /dev/shm/gone"])
    assert talks.asks() == "node15"
    node.crash()
    assert talks._echo.wait(10) != 0
    assert talks.asks(0, NO_ANSWER_S) == "TimeoutError"
    node.boot()
    assert talks.asks() in ("ConnectionResetError", "BrokenPipeError")
    assert node.run(["sh", "-c", f"cat {cluster.disk}/kept; ls /dev/shm"]).stdout == "kept\n"


def test_a_full_disk_takes_nothing_and_others_do(cluster: Cluster) -> None:
    write = ["dd", "if=/dev/zero", f"of={cluster.disk}/more", "bs=4096", "count=1"]
    cluster[3].fill_disk()
    full = cluster[3].run(write, check=False)
    assert full.returncode and "No space left" in full.stderr
    cluster[4].run(write)
    cluster[3].empty_disk()
    cluster[3].run(write)


def test_a_disk_that_hangs_holds_what_writes_until_it_goes_on(cluster: Cluster) -> None:
    """SIGKILL does not end it. What reads goes on, and so does another node's disk."""
    node, file, other = cluster[5], cluster.disk / "written", cluster.disk / "other"
    write = "import sys; print('up', flush=True); open(sys.argv[1], 'w').write('x')"
    node.run(["touch", str(file)])
    node.hang_disk()
    writer, killed = (started(node, write, str(path)) for path in (file, other))
    assert within(ANSWERS_S, lambda: len(hanging(node)) == 2)
    killed.kill()
    assert node.run(["cat", str(file)]).stdout == ""
    cluster[6].run(["touch", str(file)])
    assert len(hanging(node)) == 2 and writer.poll() is None
    node.go_on_disk()
    assert writer.wait(10) == 0 and node.run(["cat", str(file)]).stdout == "x"
    assert within(ANSWERS_S, lambda: not hanging(node))


def hanging(node: Node) -> list[str]:
    """The processes that no signal ends before they have waited."""
    return [
        line
        for line in node.run(["sh", "-c", "cat /proc/[0-9]*/stat"], check=False).stdout.splitlines()
        if ") D " in line
    ]


def within(limit_s: float, becomes_true: Callable[[], object]) -> bool:
    until = time.monotonic() + limit_s
    while not becomes_true() and time.monotonic() < until:
        time.sleep(0.05)
    return bool(becomes_true())


@pytest.mark.long(beside="tests/cluster/test_spread_run.py")
def test_ray_has_sixteen_members_and_learns_of_one_that_crashed(tmp_path: Path) -> None:
    """With the addresses of the second network, in the order of `in_order`: as numbers and not as text."""
    with nodes(NODES, shm_mib=128, work=tmp_path) as cluster:
        address = cluster.start_ray(cpus=1, network=1)
        wanted = [(address_of(k, 1), f"node{k}") for k in range(NODES)]
        assert cluster[0].call(members, address, NODES) == wanted
        cluster[7].crash()
        assert cluster[0].call(members, address, NODES - 1) == wanted[:7] + wanted[8:]


def members(address: str, number: int) -> list[tuple[str, str]]:
    """(address, host name) of each, once there are so many."""
    from miles_like.nodes.members import living_nodes
    from miles_like.nodes.session import start_ray, stop_ray

    start_ray(address)
    within(120.0, lambda: len(living_nodes()) == number)
    found = [(node.address, node.host) for node in living_nodes()]
    stop_ray()
    return found
