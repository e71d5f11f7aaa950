"""The ports that are looked at before a run are those that its servers get, on each node, for every shipped cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from miles_like.cluster import rollout_servers
from miles_like.cluster.placement import plan_placement
from miles_like.cluster.rollout_servers import with_ports
from miles_like.cluster.server_ports import server_ports
from miles_like.config.load import load_config
from miles_like.run.setup.rollout_side import server_launch
from rollout.sglang.ports import stock_ports
from tests.support.refusals import refuses

CONFIGS = Path(__file__).parents[3] / "configs"
LINUX = (32768, 60999)
CLUSTERS = [path.stem for path in sorted(CONFIGS.glob("*.toml")) if "tiny" not in path.stem]


@pytest.mark.parametrize("ranges", [[LINUX], [LINUX, (15000, 60999)]], ids=["linux", "one narrow"])
@pytest.mark.parametrize(
    "settings", [[], ["rollout.port=25000", "rollout.sglang.dist_init_port=26000"]], ids=["free", "given"]
)
@pytest.mark.parametrize("name", CLUSTERS)
def test_they_are_those_that_the_servers_get(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: list[str], ranges: Sequence[tuple[int, int]]
) -> None:
    monkeypatch.setattr(rollout_servers, "is_local", lambda: False)
    config = load_config(CONFIGS / f"{name}.toml", settings)
    plan = plan_placement(config.cluster, config.parallel, config.servers)
    slots, dp = plan.of("rollout"), config.rollout.sglang.enable_dp_attention
    launches = [server_launch(config, Path("/m"), Path("/l"), slot, routes=False) for slot in slots]
    started: dict[int, set[int]] = {}
    for slot, launch in zip(slots, with_ports(slots, launches, ranges), strict=True):
        assert launch.port is not None and launch.dist_init_addr is not None
        dist_init = int(launch.dist_init_addr.rpartition(":")[2])
        bound = stock_ports(launch.port, dist_init, attention_dp=dp, nnodes=slot.nnodes)
        started.setdefault(slot.node, set()).update(port.number for port in bound)
    planned = server_ports(plan, config.rollout, ranges)
    assert {node: {p.number for p in ports} for node, ports in planned.items()} == started
    for node, ports in planned.items():
        assert {p.server.split(" part")[0] for p in ports} == {
            f"rollout server {s.index}" for s in slots if s.node == node
        }
        for server in {p.server for p in ports}:
            (http,) = [p for p in ports if p.server == server and p.key == "rollout.port"]
            rest = [p for p in ports if p.server == server and p is not http]
            assert http.purpose == "HTTP" and {p.key for p in rest} == {"rollout.sglang.dist_init_port"}
            assert len(rest) == (1 if not dp else 7 if config.rollout.sglang.tp_size <= 8 else 8)


@pytest.mark.parametrize("port", [[], ["rollout.port=25000"]], ids=["free", "given"])
@pytest.mark.parametrize("range_", [LINUX, (15000, 60999)], ids=["linux", "narrow"])
def test_servers_of_teachers_have_other_ports_than_the_rollout_s(
    monkeypatch: pytest.MonkeyPatch, range_: tuple[int, int], port: list[str]
) -> None:
    """On the same node, and with other `RayServers`: two of each."""
    monkeypatch.setattr(rollout_servers, "is_local", lambda: False)
    teachers = [f"distillation.teachers.{name}={{path='owner/{name}',sources=['{name}']}}" for name in "ab"]
    pools = ["trainer.nodes=1", "rollout={nodes='0',gpus='0-3'}", "teachers={nodes='0',gpus='4-7'}"]
    settings = ["distillation.mode=added", "parallel.dp=2", "rollout.servers=2", *teachers, *port]
    config = load_config(CONFIGS / "qwen3_30b_a3b.toml", [*settings, *(f"cluster.pools.{pool}" for pool in pools)])
    plan = plan_placement(config.cluster, config.parallel, config.servers, config.teacher_rollouts)
    bound: list[int] = []
    for role in ("rollout", "teachers"):
        slots = plan.of(role)
        assert len(slots) == 2 and {s.node for s in slots} == {0}
        launches = [server_launch(config, Path("/m"), Path("/l"), slot, routes=False) for slot in slots]
        launches = [replace(launch, port=launch.port if role == "rollout" else None) for launch in launches]
        for launch in with_ports(slots, launches, [range_], plan.ports_of(role)):
            assert launch.port is not None and launch.dist_init_addr is not None
            dist_init = int(launch.dist_init_addr.rpartition(":")[2])
            ports = stock_ports(launch.port, dist_init, attention_dp=False, nnodes=1)
            bound += [port.number for port in ports]
    planned = server_ports(plan, config.rollout, [range_], teachers=config.teacher_rollouts)
    assert [p.number for p in planned[0]] == bound and len(set(bound)) == len(bound) and planned.keys() == {0}
    assert port or max(bound) < range_[0]
    servers = [f"{kind} {i}" for kind in ("rollout server", "server of teacher") for i in range(2)]
    assert list(dict.fromkeys(p.server for p in planned[0])) == servers
    alone = server_ports(plan, config.rollout, [range_], teachers=config.teacher_rollouts, local=True)
    # there a teacher's server takes any free port
    assert {p.server for ports in alone.values() for p in ports} == (set(servers[:2]) if port else set())


def test_a_port_that_is_any_free_one_is_not_looked_at() -> None:
    """Of an embedded server, and where Ray is started for the run."""
    for settings, local, numbers in (
        ([], False, {}),
        (["rollout.port=21000"], False, {0: {21000}, 1: {21001}}),
        (["rollout.engine=sglang"], True, {}),
        (["rollout.engine=sglang", "rollout.port=21000"], True, {0: {21000}, 1: {21001}}),
        (["rollout.engine=sglang"], False, {0: {30000, 20000}, 1: {30001, 20064}}),
    ):
        config = load_config(CONFIGS / "tiny.toml", ["cluster.nodes=2", "rollout.servers=2", *settings])
        plan = plan_placement(config.cluster, config.parallel, config.servers)
        found = server_ports(plan, config.rollout, [LINUX], local=local)
        assert {node: {p.number for p in ports} for node, ports in found.items() if ports} == numbers, settings


def test_ranges_that_leave_no_room_are_refused() -> None:
    config = load_config(CONFIGS / "qwen3_30b_a3b.toml")
    plan = plan_placement(config.cluster, config.parallel, config.servers)
    with refuses(ValueError, 1024, 65535, "rollout.port", "net.ipv4.ip_local_port_range"):
        server_ports(plan, config.rollout, [(1024, 65535)])
