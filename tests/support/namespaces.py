"""Machines made of Linux namespaces, for tests of a cluster on one machine.

    with nodes(3, hosts=["good", "hostile", "good"], disk_mib=64, work=tmp_path) as cluster:
        cluster.start_ray(gpus=8)  # pretended GPUs
        done = cluster[1].run(["hostname"])
        process = cluster[2].popen([sys.executable, "-m", "rollout.embedded.server", ...])
        answer = cluster[0].call(drive, cluster.ray_address)  # drive(...) in a new Python process on node 0

Node k is called `node{k}` and has the addresses 192.168.77.{k+1} and 192.168.78.{k+1} in two networks (switch.py); the
hosts files have the first. Network, host name, /etc/hosts, process table, /dev/shm, /tmp/ray and `cluster.disk`, a file
system of `disk_mib`, are separate from those of other nodes. All other files are the machine's: a directory below
`work` is the cluster's shared disk.

What goes wrong with machines goes wrong with these:

    node.unplug(), plug_in()        the network's cables: connections wait, and go on if it was not too long
    node.narrow(mbit), worsen(delay_s, loss), restore()
    with cluster.apart([0, 1], [2]):    islands that do not reach each other
    node.refuse(other)              connections fail at once
    node.pause(), go_on()           all its processes stand still, as in a machine that swaps
    node.crash(), boot()            they end, and other nodes do not learn it; the disk keeps what it has
    node.fill_disk(), empty_disk()  no space is left
    node.hang_disk(), go_on_disk()  of `disk="ext4"`: what writes waits, not even SIGKILL ends it; what reads goes on

The switch is in a network namespace too, without a link to the machine: a process outside of the nodes reaches none of
them, so that Ray needs no token there, and two clusters may use the same addresses. All namespaces are anonymous and
live by the node's first process (node_init.py), which ends when a pipe from this process closes: nothing is left behind
when the test fails or is killed with SIGKILL.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import pytest

from tests.support.node_init import NodeInit
from tests.support.switch import NETWORKS, Switch, address_of
from tests.support.wire import Quality

__all__ = ["Cluster", "Node", "address_of", "need_namespaces", "nodes"]

ROOT = Path(__file__).parents[2]
NEED = "MILES_LIKE_NEED_NAMESPACES"  # environment variable: without the right to make them, tests fail in place of skip
NAMESPACES = ("--net", "--uts", "--mount", "--pid")
RAY_PORT = 6379
_RAY_S = 300.0  # limit of `ray start`, which takes 4 s on an idle machine
_RAY_TRIES = 3  # Ray gives a node 30 s to join, which a busy machine may need twice
_RAY_AT_ONCE = 4  # nodes that start it at the same time
_SETTLES_S = 20.0
Disk = Literal["memory", "ext4"]
Hosts = Literal["good", "hostile", "empty"]  # of /etc/hosts; hostile: the node's name is 127.0.1.1, as Debian writes it
P = ParamSpec("P")
R = TypeVar("R")


class Node:
    """One machine of a cluster."""

    def __init__(self, index: int, number: int, init: _Init, switch: Switch, hosts: Path, disk: Path) -> None:
        self.index, self.name, self.address = index, f"node{index}", address_of(index)
        self.environment = _environment()  # of the processes that are started from here on
        self._init, self._switch, self._hosts, self._number, self._disk = init, switch, hosts, number, disk

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on the node, from the repository's root by default. It is killed with the returned process,
        by whatever signal that one ends, and with the node. options: of subprocess.Popen; env: added variables."""
        environment = {**self.environment, **options.pop("env", {})}
        return self._init.popen(command, cwd=options.pop("cwd", ROOT), env=environment, **options)

    def run(
        self, command: Sequence[str], *, check: bool = True, timeout_s: float = 120.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the node and capture its output as text. Raises AssertionError with its output where it
        fails and `check`, and where it does not end within the limit."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:  # background jobs may keep them
            process = self.popen(command, stdout=out, stderr=err, **options)
            try:
                code: int | str = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = f"a signal after {timeout_s:g} s"
            out.seek(0), err.seek(0)
            texts = out.read(), err.read()
        ended = isinstance(code, int) and (code == 0 or not check)
        assert ended, f"{self.name}: {command} ended with {code}:\n{texts[0]}{texts[1]}"
        return subprocess.CompletedProcess(command, process.returncode, *texts)

    def call(self, fn: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """fn(...) in a new Python process on the node. `fn`, arguments and result are pickled: `fn` is a function of
        a module. Raises what it raises, and AssertionError with the output of a process that died."""
        with tempfile.TemporaryDirectory(dir=self._init.work) as there:
            question, answer = Path(there, "question"), Path(there, "answer")
            question.write_bytes(pickle.dumps((fn, arguments, named)))
            modules = os.pathsep.join([str(Path(inspect.getfile(fn)).parent), str(ROOT)])
            command = [sys.executable, "-c", _CALL, str(question), str(answer)]
            done = self.run(command, check=False, timeout_s=300.0, env={"PYTHONPATH": modules})
            assert answer.exists(), f"{self.name}: {fn} died:\n{done.stdout}{done.stderr}"
            failed, result = pickle.loads(answer.read_bytes())
        if failed:
            raise result
        return result  # type: ignore[no-any-return]

    def set_hosts(self, kind: Hosts) -> None:
        """Write the node's /etc/hosts; look-ups read it again each time."""
        self._hosts.write_text(_hosts_file(kind, self.index, self._number))

    def unplug(self, *networks: int) -> None:
        """Pull the cable of a network, or of all: packets are lost without an error, until `plug_in`."""
        self._switch.plug(self.index, networks or range(NETWORKS), up=False)

    def plug_in(self, *networks: int) -> None:
        self._switch.plug(self.index, networks or range(NETWORKS), up=True)

    def narrow(self, mbit: float | None) -> None:
        """Megabits a second of each cable and direction; None: no limit."""
        self._switch.narrow(self.index, mbit)

    def worsen(self, *, delay_s: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        """Each frame of both cables, in each direction, is late or is lost, until `restore`."""
        self._switch.degrade(self.index, Quality(delay_s=delay_s, loss=loss, seed=seed))

    def restore(self) -> None:
        self._switch.restore(self.index)

    def refuse(self, other: Node, *, refused: bool = True) -> None:
        """Connections and packets from this node to another fail at once; `refused=False` ends that."""
        change = "add" if refused else "del"
        for network in range(NETWORKS):
            self.run(["ip", "route", change, "prohibit", address_of(other.index, network)])

    def pause(self) -> None:
        """Stop all processes at once; network and disks stay."""
        self._init.signal_all("STOP")

    def go_on(self) -> None:
        self._init.signal_all("CONT")

    def crash(self) -> None:
        """End all processes with the cables pulled, so that no other node is sent the end of a connection."""
        self.unplug()
        self._init.signal_all("KILL")

    def boot(self) -> None:
        """After a crash: what is in memory is gone, what is on the disk is there; no process runs."""
        self.run(["sh", "-c", "rm -rf /dev/shm/* /tmp/ray/*"])
        self.plug_in()

    def fill_disk(self) -> None:
        """Until not a byte fits on it, with a file that `empty_disk` removes."""
        self.run([sys.executable, "-S", "-c", _FILL, str(self._disk / _FULL)])

    def empty_disk(self) -> None:
        self.run(["rm", str(self._disk / _FULL)])

    def hang_disk(self) -> None:
        """Only of `disk="ext4"`."""
        self.run(["fsfreeze", "--freeze", str(self._disk)])

    def go_on_disk(self) -> None:
        self.run(["fsfreeze", "--unfreeze", str(self._disk)])


class Cluster(Sequence[Node]):
    """The nodes. disk: the directory that is a separate file system on each of them."""

    def __init__(self, members: Sequence[Node], switch: Switch, disk: Path) -> None:
        self._members, self._switch, self.disk = tuple(members), switch, disk
        self.ray_address = f"{address_of(0)}:{RAY_PORT}"

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: Any) -> Any:
        return self._members[index]

    @contextlib.contextmanager
    def apart(self, *islands: Sequence[int]) -> Iterator[None]:
        """A partition: while the context lasts packets between nodes of different islands vanish. Nodes that are in
        none are one more island."""
        self._switch.part(islands)
        try:
            yield
        finally:
            self._switch.part([])

    def start_ray(
        self, *, cpus: int = 2, gpus: int | Sequence[int] = 0, on: Sequence[int] | None = None, network: int = 0
    ) -> str:
        """Start Ray on all nodes or on those of `on`, node 0 being the head; return its address, which processes on
        the nodes have as RAY_ADDRESS too. gpus: pretended GPUs, of each node or one number per node. network: whose
        addresses Ray has."""
        chosen = range(len(self)) if on is None else on
        number = [gpus] * len(self) if isinstance(gpus, int) else gpus
        self.ray_address = f"{address_of(0, network)}:{RAY_PORT}"

        ray = str(Path(sys.executable).with_name("ray"))

        def start(k: int) -> subprocess.Popen[Any]:
            node = self._members[k]
            where = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
            where = where if k == 0 else [f"--address={self.ray_address}"]
            size = [f"--num-cpus={cpus}", f"--num-gpus={number[k]}", "--object-store-memory=80000000"]
            less = ["--disable-usage-stats", "--include-log-monitor=false"]  # a process that prints workers' lines
            command = [ray, "start", *less, *where, *size, f"--node-ip-address={address_of(k, network)}"]
            return node.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

        others = [k for k in chosen if k]
        batches = [others[i : i + _RAY_AT_ONCE] for i in range(0, len(others), _RAY_AT_ONCE)]
        for left in ([k for k in chosen if k == 0], *batches):
            for _ in range(_RAY_TRIES):
                outputs = {
                    k: (process, process.communicate(timeout=_RAY_S)[0]) for k, process in [(k, start(k)) for k in left]
                }
                left = [k for k, (process, _) in outputs.items() if process.returncode]
                for k in left:  # it sees the processes of its node alone
                    self._members[k].run([ray, "stop", "--force"], check=False, timeout_s=_RAY_S)
                if not left:
                    break
            assert not left, f"Ray did not start on node{left[0]}:\n{outputs[left[0]][1]}"
        for node in self._members:
            node.environment["RAY_ADDRESS"] = self.ray_address
        return self.ray_address


@contextlib.contextmanager
def nodes(
    number: int,
    *,
    work: Path,
    hosts: Hosts | Sequence[Hosts] = "good",
    disk_mib: int | Sequence[int] = 64,
    shm_mib: int | Sequence[int] = 512,
    disk: Disk = "memory",
) -> Iterator[Cluster]:
    """A cluster. work: a directory of this test, for the nodes' hosts files and the images of ext4 disks; lists have
    one entry per node."""
    need_namespaces()
    work = work / "namespaces"
    work.mkdir()
    (own := work / "disk").mkdir()
    (work / "resolv.conf").write_text("")
    kinds, disks, shared = (_each(value, number) for value in (hosts, disk_mib, shm_mib))
    with contextlib.ExitStack() as stack:
        none: NodeInit = {"name": "switch", "binds": {}, "tmpfs": {}, "ext4": {}}
        switch = Switch(stack.enter_context(_Init(none, work)).pid)
        stack.callback(switch.end)
        members = []
        for k in range(number):
            (file := work / f"hosts{k}").write_text(_hosts_file(kinds[k], k, number))
            spec: NodeInit = {
                "name": f"node{k}",
                "binds": {"/etc/hosts": str(file), "/etc/resolv.conf": str(work / "resolv.conf")},
                "tmpfs": {"/dev/shm": shared[k], "/tmp/ray": None},
                "ext4": {},
            }
            if disk == "ext4":
                spec["ext4"][str(own)] = str(_ext4(work / f"disk{k}.img", disks[k]))
            else:
                spec["tmpfs"][str(own)] = disks[k]
            init = stack.enter_context(_Init(spec, work))
            switch.connect(k, init.pid)
            members.append(Node(k, number, init, switch, file, own))
        yield Cluster(members, switch, own)


@functools.cache
def why_no_namespaces() -> str | None:
    """Why this process cannot make nodes, as one sentence; None where it can."""
    test = ["unshare", *NAMESPACES, "--fork", "sh", "-c", "mount -t tmpfs none /mnt && ip link add port type veth"]
    try:
        done = subprocess.run(test, capture_output=True, text=True, timeout=30, check=False)
    except OSError as e:
        return f"nodes of a test's cluster are made with unshare and ip, which this machine lacks ({e})"
    if done.returncode:
        return f"this process has no right to make Linux namespaces ({done.stderr.strip()}): run as root"
    return None


def need_namespaces() -> None:
    """Skip the test where no nodes can be made, or fail it with MILES_LIKE_NEED_NAMESPACES=1, which .ci/run sets."""
    if (why := why_no_namespaces()) is not None:
        (pytest.fail if os.environ.get(NEED) == "1" else pytest.skip)(why)


class _Init:
    """The first process of a node, and so the node. As a context manager it ends the node on exit."""

    def __init__(self, spec: NodeInit, work: Path) -> None:
        self.work = work
        self._started: list[subprocess.Popen[Any]] = []
        program = [sys.executable, "-S", "-E", str(Path(__file__).with_name("node_init.py")), json.dumps(spec)]
        self._process = subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--kill-child", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.end()
            raise AssertionError(f"{spec['name']} was not made: its first process wrote why")
        self.pid = int(line)

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        # nsenter forks, for only a child is in the PID namespace; the child must not outlive it
        enter = ["nsenter", f"--target={self.pid}", *NAMESPACES, f"--wd={options.pop('cwd')}"]
        # Where its child is stopped nsenter stops itself. In a separate process group it ends with this process then
        # too: the kernel sends SIGHUP to a stopped group that nothing is left to continue.
        process = subprocess.Popen([*enter, "setpriv", "--pdeathsig=KILL", *command], process_group=0, **options)
        self._started = [*self._running(), process]
        return process

    def signal_all(self, name: Literal["STOP", "CONT", "KILL"]) -> None:
        """Send a signal to all processes of the node but the first, at once; return when it has acted on those that
        were started from here."""
        self._signal(name)
        until = time.monotonic() + _SETTLES_S
        while any(_stopped(p.pid) == (name != "STOP") for p in self._running()):
            assert time.monotonic() < until, f"SIG{name} has not acted after {_SETTLES_S:g} s"
            if name != "STOP":
                for process in self._running():
                    process.send_signal(signal.SIGCONT)
            time.sleep(0.01)

    def _signal(self, name: str) -> None:
        enter = ["nsenter", f"--target={self.pid}", "--pid", "sh", "-c", f"kill -s {name} -- -1"]
        done = subprocess.run(enter, capture_output=True, text=True, check=False, timeout=_SETTLES_S)
        assert not done.returncode or "No such process" in done.stderr, done.stderr  # none runs there

    def _running(self) -> list[subprocess.Popen[Any]]:
        return [process for process in self._started if process.poll() is None]

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for process in self._running():
            if _stopped(process.pid):
                process.kill()

    def __enter__(self) -> _Init:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _ext4(image: Path, mib: int) -> Path:
    with image.open("wb") as f:
        f.truncate(mib << 20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", str(image)], check=True)
    return image


def _hosts_file(kind: Hosts, index: int, number: int) -> str:
    names = [f"{address_of(k)} node{k}" for k in range(number)]
    if kind == "hostile":
        names[index] = f"127.0.1.1 node{index}"
    return "\n".join(["127.0.0.1 localhost", *(names if kind != "empty" else []), ""])


def _each(value: Any, number: int) -> list[Any]:
    out = [value] * number if isinstance(value, int | str) else list(value)
    assert len(out) == number, f"{value}: want {number}"
    return out


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTEST_"))}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",  # no process outside of the nodes reaches Ray
        "RAY_worker_niceness": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_metrics_collection": "0",
    }


_CALL = """
import pickle, sys
question, answer = sys.argv[1:]
with open(question, "rb") as f:
    fn, arguments, named = pickle.load(f)
try:
    out = pickle.dumps((False, fn(*arguments, **named)))
except BaseException as e:
    out = pickle.dumps((True, e))
with open(answer, "wb") as f:
    f.write(out)
"""

_FULL = "full"
_FILL = """
import os, sys
with open(sys.argv[1], "wb", buffering=0) as f:
    size = 1 << 24
    while size:
        try:
            f.write(bytes(size))
        except OSError:
            size //= 2
"""
