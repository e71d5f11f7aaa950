"""Servers as Ray actors: watched while they start and after a failure; ports that no two servers share.

The servers are the embedded engine, and a script in the place of `sglang.launch_server` for one that spans nodes. Not
covered: several machines.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from miles_like.cluster import rollout_servers
from miles_like.cluster.placement import Slot
from miles_like.cluster.rollout_servers import RayServers, with_ports
from miles_like.nodes.session import start_ray, stop_ray
from rollout.config import RolloutConfig, SGLangFlags
from rollout.sglang.phases import last_error
from rollout.sglang.ports import stock_ports
from rollout.sglang.servers import ServerLaunch
from rollout.sglang.startup import Progress
from tests.support.fakes import wait_until
from tests.support.own_ray import this_node
from tests.support.refusals import Facts, refuses
from tests.support.skewed_servers import AHEAD, SkewedServer
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

ROOT = Path(__file__).parents[3]
SCRIPT = """
import os, sys, time
from pathlib import Path
where = Path(__file__).parent
rank = sys.argv[sys.argv.index("--node-rank") + 1]
(where / f"pid{rank}").write_text(str(os.getpid()))
print("Load weight begin", flush=True)
if rank == "1":
    while not (where / "pid0").exists():
        time.sleep(0.05)
    (where / "failed").touch()
    raise RuntimeError("no space left on device 5")
while not (os.environ.get("FOLLOWS") and (where / "failed").exists()):
    time.sleep(0.05)
time.sleep(1.5)
print("lost\\n" * 10, flush=True)
raise ConnectionResetError("Connection reset by peer")
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a model and a package `sglang`, which Ray's workers find."""
    home = tmp_path_factory.mktemp("servers")
    write_checkpoint(home / "hf", tiny(), random_tensors(tiny()))
    (home / "sglang").mkdir()
    (home / "sglang" / "__init__.py").write_text("")
    (home / "sglang" / "launch_server.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{home}{os.pathsep}{ROOT}")
        start_ray(None)
        yield home
        stop_ray()


def launch(home: Path, engine: Any = "embedded", **more: Any) -> ServerLaunch:
    config = RolloutConfig(engine=engine, start_timeout_s=100)
    return ServerLaunch(**{"model_path": home / "hf", "config": config, "log_dir": home / "logs", **more})


def slot(index: int, **more: Any) -> Slot:
    return Slot(role="rollout", index=index, node=0, gpus=(), **more)


def test_servers_report_their_phases_and_are_named_when_they_die(home: Path) -> None:
    """A client of a dead server knows only that it does not answer."""
    servers = RayServers([(slot(i), launch(home)) for i in range(2)], this_node(), home / "logs")
    seen: list[str] = []
    try:
        urls = servers.wait(seen.append)
        assert [httpx.get(f"{url}/health").status_code for url in urls] == [200, 200]
        for i in range(2):
            assert seen.count(f"rollout server {i} of 2: ready") == 1
        assert seen[0] == "rollout server 0 of 2: starting" and servers.failure() is None
        with pytest.raises(RuntimeError, match=r"^no connection$"), servers.naming_failures():
            raise RuntimeError("no connection")
        port = urls[1].rpartition(":")[2]
        found = [p for p in Path("/proc").glob("[0-9]*") if f"--port\0{port}\0" in _command(p)]
        for process in found:
            if "rollout.guard" not in _command(process):
                os.kill(int(process.name), signal.SIGKILL)
        assert found and wait_until(lambda: servers.failure() is not None, 30)
        facts: Facts = ("no connection", "rollout server 1", "SIGKILL", home / "logs" / f"embedded_{port}.log")
        with refuses(RuntimeError, *facts, unrecorded="a free port"), servers.naming_failures():
            raise RuntimeError("no connection")
        _one_dies_and_is_restarted(servers, urls)
        _one_takes_its_place(servers, urls)
        _one_is_added(servers, home)
    finally:
        servers.stop()


def _one_dies_and_is_restarted(servers: RayServers, urls: list[str]) -> None:
    """As the watch of a run does it (miles_like.fleet): nothing waits."""
    assert wait_until(lambda: servers.deaths().keys() == {1}, 30), "it was killed"
    servers.halt(1)
    assert servers.deaths() == {} and servers.failure() is None, "it is not wanted"
    servers.restart(1)
    assert wait_until(lambda: (found := servers.look(1)).ready and found.url == urls[1], 60)
    assert httpx.get(f"{urls[1]}/health").status_code == 200 and servers.deaths() == {}


def _one_is_added(servers: RayServers, home: Path) -> None:
    servers.add(slot(2), launch(home))
    assert wait_until(lambda: servers.look(2).ready, 60)
    url = servers.look(2).url
    assert httpx.get(f"{url}/health").status_code == 200
    servers.halt(2)
    assert _started(url) is None and servers.failure() is None


def _one_takes_its_place(servers: RayServers, urls: list[str]) -> None:
    """At the same URL, as the one that is replaced while it runs; the other server is not touched."""
    started = _started(urls[0])
    for _ in range(2):
        seen: list[str] = []
        before = _started(urls[1])
        servers.replace([urls[1]], seen.append)
        assert seen[-1] == "rollout server 1 of 2: ready" and all(s.startswith("rollout server 1") for s in seen)
        assert _started(urls[1]) not in (None, before) and servers.failure() is None
    assert _started(urls[0]) == started


def _started(url: str) -> float | None:
    try:
        return float(httpx.get(f"{url}/server_info").json()["started_ts"])
    except httpx.HTTPError:
        return None


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


def test_a_part_on_another_node_that_dies_ends_the_wait_at_once(home: Path) -> None:
    """It is named with its log and its last error; the first node's part, which would wait for it, is stopped."""
    parts = [(slot(0, node_rank=rank, nnodes=2), launch(home, "sglang", node_rank=rank, nnodes=2)) for rank in range(2)]
    began = time.monotonic()
    servers = RayServers(parts, this_node(), home / "logs")
    facts = ("rollout server 0, part 1 of 2", "exit code 1", "RuntimeError: no space left on device 5", home / "logs")
    with refuses(RuntimeError, *facts, unrecorded="a free port") as caught:
        servers.wait()
    assert "\n" not in str(caught.value) and ".1.log" in str(caught.value)
    assert time.monotonic() - began < 60
    head = int((home / "sglang" / "pid0").read_text())
    assert wait_until(lambda: not Path(f"/proc/{head}").exists() or "\nState:\tZ" in _status(head), 20)


@pytest.mark.long(beside="tests/rollout/sglang/test_startup.py")
def test_of_parts_that_follow_one_another_the_first_to_fail_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three parts on three nodes: the second fails, then the others lose it. The driver, which built its trainer
    meanwhile, looks when all have ended. By the clocks of their nodes the second would be the last."""
    monkeypatch.setattr(rollout_servers, "_Server", SkewedServer)
    for name in ("pid0", "failed"):
        (home / "sglang" / name).unlink(missing_ok=True)
    parts = []
    for rank, ahead in enumerate((0, 3600, -3600)):
        part = Slot(role="rollout", index=0, node=rank, gpus=(), node_rank=rank, nnodes=3)
        env = {"FOLLOWS": "1", AHEAD: str(ahead)}
        one = launch(home, "sglang", node_rank=rank, nnodes=3, env=env, log_dir=home / "follows")
        parts.append((part, one))
    here = this_node()
    servers = RayServers(parts, replace(here, nodes=here.nodes * 3, facts=here.facts * 3), home / "logs")
    assert wait_until(lambda: all(look.failure for look in servers._look(60, range(3)).values()), 60)
    times = [look.failed_at for look in servers._look(60, range(3)).values()]
    assert times[2] < times[0] < times[1]
    logs = sorted((home / "follows").glob("*.log"), key=lambda log: log.name.split(".")[1])
    assert [str(last_error(log)).split(":")[0] for log in logs] == [
        "ConnectionResetError", "RuntimeError", "ConnectionResetError",
    ]  # fmt: skip
    facts = ("rollout server 0, part 1 of 3", "RuntimeError: no space left on device 5", logs[1])
    with refuses(RuntimeError, *facts, unrecorded="a free port") as caught:
        servers.wait()
    assert "reset" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_failure_whose_clock_cannot_be_asked_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks of two nodes have nothing in common: without its offset it would be the first or the last at random."""

    def get_result(ref: str, name: str, timeout_s: float) -> float:
        if ref == "lost":
            raise RuntimeError(f"{name} does not answer")
        return time.monotonic()

    monkeypatch.setattr(rollout_servers, "get_result", get_result)
    servers: Any = object.__new__(RayServers)
    servers._slots = [slot(0, node_rank=rank, nnodes=2) for rank in range(2)]
    servers._slots = [replace(s, node=rank) for rank, s in enumerate(servers._slots)]
    servers._names = ["part 0", "part 1"]
    servers._actors = [SimpleNamespace(clock=SimpleNamespace(remote=lambda ref=ref: ref)) for ref in ("lost", "here")]
    for failed_at in (-1e9, 1e9):
        looks = {
            0: Progress("url", "up", failure="of the lost node", failed_at=failed_at),
            1: Progress("url", "up", failure="of the other", failed_at=time.monotonic()),
        }
        assert servers._first_failure(looks) == "of the other"


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "\nState:\tZ"


@pytest.mark.parametrize("local", [False, True])
def test_no_two_servers_share_a_port(monkeypatch: pytest.MonkeyPatch, local: bool) -> None:
    """Four servers over four nodes each, as on a cluster; and two servers on each of two nodes."""
    monkeypatch.setattr(rollout_servers, "is_local", lambda: local)
    flags = SGLangFlags(tp_size=2, dp_size=2, enable_dp_attention=True)
    config = RolloutConfig(engine="sglang", sglang=flags)
    for spans in (1, 4):
        slots = [
            Slot(role="rollout", index=i, node=(i * spans + k) // (1 if spans > 1 else 2), gpus=(0,), node_rank=k,
                 nnodes=spans)
            for i in range(4) for k in range(spans)
        ]  # fmt: skip
        launches = [
            ServerLaunch(
                model_path=Path("/m"), config=config, log_dir=Path("/l"), host=f"10.0.0.{s.node}", nnodes=spans
            )
            for s in slots
        ]
        placed = with_ports(slots, launches, [(32768, 60999)] * len(slots))
        used: dict[tuple[int, int], int] = {}
        for s, one in zip(slots, placed, strict=True):
            assert one.dist_init_addr is not None
            host, _, dist_init = one.dist_init_addr.rpartition(":")
            assert host == ("127.0.0.1" if spans == 1 else f"10.0.0.{s.index * spans}")
            assert one.port == (None if local else 30000 + s.index)
            assert local or int(dist_init) == 20000 + 64 * s.index
            ports = stock_ports(one.port or 1, int(dist_init), attention_dp=True, nnodes=spans)
            for number, _, _ in ports[1 if local else 0 :]:
                assert used.setdefault((s.node, number), s.index) == s.index
                assert number < 32768
    given = RolloutConfig(engine="sglang", port=25000, sglang=SGLangFlags(dist_init_port=26000))
    launches = [ServerLaunch(model_path=Path("/m"), config=given, log_dir=Path("/l"), port=25000 + i) for i in range(2)]
    placed = with_ports([slot(0), slot(1)], launches, [(32768, 60999)] * 2)
    assert [(p.port, p.dist_init_addr) for p in placed] == [(25000, "127.0.0.1:26000"), (25001, "127.0.0.1:26064")]
