"""The networks of the nodes of tests/support/namespaces.py: a bridge for each, in a separate network namespace.

Node k has an interface eth{n} with the address 192.168.{77+n}.{k+1} in each network n; its cable ends at the port
`port{k}.{n}` here. A cable can be pulled, narrowed (the kernel's token bucket, tc-tbf), and replaced by a long or bad
one (wire.py). Ports can be put on other bridges, so that packets between islands of nodes vanish.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.wire import Quality

NETWORKS = 2
_BURST = "64kb"  # that a narrow cable passes at once
_QUEUE = "100ms"  # of what waits at a narrow cable; the rest is lost


def address_of(index: int, network: int = 0) -> str:
    """Above 127.0.0.0: the one of two gloo processes with the lower address waits for the other to connect, so that a
    node which takes itself for 127.0.1.1 is not reached. Below, only two such nodes fail."""
    return f"192.168.{77 + network}.{index + 1}"


def ip(pid: int, *commands: str) -> None:
    """Run commands of `ip` in the network namespace of a process."""
    done = _inside(pid, ["ip", "-batch", "-"], "\n".join(commands))
    assert done.returncode == 0, f"ip {commands}: {done.stderr}"


class Switch:
    """Of the process with this number, whose network namespace it is in."""

    def __init__(self, pid: int) -> None:
        self._pid, self._nodes = pid, dict[int, int]()  # node -> its first process
        self._island: dict[int, int] = {}  # of the nodes that are on one
        self._islands = 1
        self._wires: dict[int, subprocess.Popen[str]] = {}
        ip(pid, *self._bridge(0))

    def connect(self, index: int, pid: int) -> None:
        """A node's cables, and its addresses."""
        self._nodes[index] = pid
        ours, theirs = [], []
        for n in range(NETWORKS):
            ours += [f"link add port{index}.{n} type veth peer name eth{n} netns {pid}"]
            ours += [f"link set port{index}.{n} master switch0.{n} up"]
            theirs += [f"addr add {address_of(index, n)}/24 dev eth{n}", f"link set eth{n} up"]
        ip(self._pid, *ours)
        ip(pid, *theirs)

    def plug(self, index: int, networks: Sequence[int], *, up: bool) -> None:
        ip(self._pid, *(f"link set port{index}.{n} {'up' if up else 'down'}" for n in networks))

    def narrow(self, index: int, mbit: float | None) -> None:
        """Megabits a second in each direction; None: as fast as the machine."""
        for n in range(NETWORKS):
            for pid, device in ((self._pid, f"port{index}.{n}"), (self._nodes[index], f"eth{n}")):
                _inside(pid, ["tc", "qdisc", "del", "dev", device, "root"])
                if mbit is not None:
                    bucket = ["tbf", "rate", f"{mbit}mbit", "burst", _BURST, "latency", _QUEUE]
                    done = _inside(pid, ["tc", "qdisc", "add", "dev", device, "root", *bucket])
                    assert done.returncode == 0, f"tc {bucket}: {done.stderr}"

    def degrade(self, index: int, quality: Quality) -> None:
        """Of both cables of a node."""
        wire = self._wires.get(index) or self._lay(index)
        assert wire.stdin is not None and wire.stdout is not None
        wire.stdin.write(json.dumps(quality) + "\n")
        wire.stdin.flush()
        assert wire.stdout.readline() == "ok\n", f"the wire of node{index} ended with {wire.wait()}"

    def restore(self, index: int) -> None:
        """The first cables again; nothing where they were never replaced."""
        if (wire := self._wires.pop(index, None)) is not None:
            _end(wire)
            ip(self._pid, *(f"link del near{index}.{n}" for n in range(NETWORKS)), *self._join(index))

    def part(self, islands: Sequence[Sequence[int]]) -> None:
        """Nodes of different islands do not reach each other; those of none are one more island. Without islands all
        reach all."""
        before = self._island
        self._island = {index: number for number, island in enumerate(islands, 1) for index in island}
        for number in range(self._islands, len(islands) + 1):
            ip(self._pid, *self._bridge(number))
        self._islands = max(self._islands, len(islands) + 1)
        ip(self._pid, *(line for index in sorted({*before, *self._island}) for line in self._join(index)))

    def end(self) -> None:
        for wire in self._wires.values():
            _end(wire)

    def _bridge(self, number: int) -> list[str]:
        names = [f"switch{number}.{n}" for n in range(NETWORKS)]
        return [line for name in names for line in (f"link add {name} type bridge", f"link set {name} up")]

    def _join(self, index: int) -> list[str]:
        """Commands that put a node's cables on the bridges of its island."""
        end, number = "far" if index in self._wires else "port", self._island.get(index, 0)
        return [f"link set {end}{index}.{n} master switch{number}.{n}" for n in range(NETWORKS)]

    def _lay(self, index: int) -> subprocess.Popen[str]:
        """Put a wire between the ports of a node and the bridges."""
        commands, pairs = [], []
        for n in range(NETWORKS):
            near, far = f"near{index}.{n}", f"far{index}.{n}"
            pairs += [f"port{index}.{n}", near]
            commands += [f"link add {near} type veth peer name {far}", f"link set port{index}.{n} nomaster"]
            commands += [f"link set {near} up", f"link set {far} up"]
        ip(self._pid, *commands)
        program = [sys.executable, "-S", "-E", str(Path(__file__).with_name("wire.py")), *pairs]
        wire = subprocess.Popen(
            ["nsenter", f"--target={self._pid}", "--net", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert wire.stdout is not None
        self._wires[index] = wire
        assert wire.stdout.readline() == "up\n", f"the wire of node{index} ended with {wire.wait()}"
        ip(self._pid, *self._join(index))
        return wire


def _inside(pid: int, command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    enter = ["nsenter", f"--target={pid}", "--net", *command]
    return subprocess.run(enter, input=text, capture_output=True, text=True, check=False)


def _end(wire: subprocess.Popen[str]) -> None:
    assert wire.stdin is not None
    wire.stdin.close()
    wire.wait(10)
