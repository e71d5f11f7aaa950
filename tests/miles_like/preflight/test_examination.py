"""What the doctor's short checks find on the only node of a run, from facts alone, and which of it refuses the run.

Not covered: whether a machine reports these facts (tests/miles_like/doctor/test_machine_facts.py), several nodes
(tests/cluster/test_doctor.py), GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from miles_like.check_results import CheckResult, Outcome
from miles_like.cluster.run_nodes import RunNodes
from miles_like.config.load import load_config
from miles_like.doctor.examine import Examination
from miles_like.doctor.findings import Finding
from miles_like.nodes import session, work
from miles_like.nodes.facts import Device, NodeFacts
from miles_like.nodes.members import Node
from miles_like.pipeline.stage_names import STAGES
from miles_like.preflight import examination
from miles_like.preflight.machine import Machines
from miles_like.run.setup.run_cluster import RunCluster
from tests.support import node_reports
from tests.support.planned import planned
from tests.support.refusals import Facts, check_refusal

TINY = Path(__file__).parents[3] / "configs" / "tiny.toml"
NODE = Node(id="a", address="10.0.0.1", host="node0", gpus=2, cores=96)
OWN = Device(index=1, uuid="GPU-1")  # of the two
BUSY: Mapping[str, Any] = {"processes": ["77 python"], "free_mib": 100}


def checks(
    patch: pytest.MonkeyPatch, gpus_per_node: int, machine: Mapping[str, Any], gpus: Mapping[int, Any] | None
) -> list[CheckResult]:
    """machine, gpus: facts that are not a healthy node's; of GPUs by their index. gpus: None: it must not be asked."""

    def query_gpus() -> list[Any]:
        assert gpus is not None, "nvidia-smi takes seconds without persistence mode"
        return [node_reports.gpu(i) | gpus.get(i, {}) for i in range(2)]

    patch.setattr(examination, "SETTLES_S", 0.0)
    patch.setattr("socket.gethostname", lambda: "node0")
    patch.setattr("miles_like.doctor.examiner.machine_facts", lambda address: node_reports.machine() | machine)
    patch.setattr("miles_like.doctor.examiner.software", node_reports.software)
    patch.setattr("miles_like.doctor.examiner.engine_software", lambda interpreter: node_reports.software())
    patch.setattr("miles_like.doctor.examiner.query_gpus", query_gpus)
    config = load_config(TINY, [f"cluster.gpus_per_node={gpus_per_node}", "parallel.dp=1", "parallel.ep=1"])
    return examination.brief_checks(config, [NODE], [[OWN] * gpus_per_node], here=True)


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_the_start_of_a_run_on_one_node_examines_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    """With the GPUs that it has reserved; this machine, where the run has started Ray."""
    config = load_config(TINY, ["cluster.gpus_per_node=1", "parallel.dp=1", "parallel.ep=1"])
    facts = NodeFacts(host="a", address="a", interface=None, cores=8, devices=(OWN,))
    nodes = RunNodes(nodes=(NODE,), facts=(facts,), cluster=config.cluster)
    seen: list[Any] = []
    wrong = [CheckResult("GPU 1", Outcome.WRONG, "it is used")]
    monkeypatch.setattr(session, "start_ray", lambda address: None)
    monkeypatch.setattr(work, "on_every_node", lambda probe, nodes: [probe()])
    monkeypatch.setattr(RunCluster, "nodes", lambda _: nodes)
    monkeypatch.setattr(RunCluster, "hosts", lambda _: nodes.nodes)
    monkeypatch.setattr(examination, "brief_checks", lambda *of, here: seen.append((*of, here)) or wrong)
    cluster = RunCluster(config, tmp_path / "runs" / "a", Console(quiet=True), address)
    found = Machines(config, planned(config, tmp_path / "runs" / "a"), STAGES, cluster).cluster_checks()
    assert seen == [(config, (NODE,), [(OWN,)], address is None)] and found[-1:] == wrong


def test_a_run_without_gpus_is_refused_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop's or a container's limits are remarks."""
    low = dict.fromkeys(("nofile", "memlock", "nproc", "stack"), 64)
    found = checks(monkeypatch, 0, {"ulimits": low, "shm": 0}, None)
    assert {c.outcome for c in found} == {Outcome.OK}
    assert [c.name for c in found if c.text] == [f"ulimit {name} of node0" for name in ("nofile", "nproc", "stack")]
    assert {c.name for c in found} >= {"memory of node0", "/dev/shm of node0", "trainer: torch of node0"}


@pytest.mark.parametrize(
    ("machine", "gpus", "facts"),
    [
        ({}, {}, ()),
        ({}, {1: BUSY}, ("GPU 1", "77 python", "stop")),
        ({}, {1: {"mig": "Enabled"}}, ("GPU 1", "MIG")),
        ({}, {1: {"ecc_errors": "2"}}, ("GPU 1", 2, "ECC")),
        ({"shm": 64 << 20}, {}, ("/dev/shm", "1.0 GiB", "0.1 GiB")),
        ({"cgroup_pids": 100}, {}, (100, "pids.max")),
        ({}, {1: {"free_mib": 70_000}}, ("GPU 1", "70,000", "81,559", "another container")),
        ({}, {1: {"memory_mib": 24_564, "free_mib": 22_000}}, ()),  # a desktop is drawn by it
        ({"ulimits": dict.fromkeys(("nofile", "memlock", "nproc", "stack"), 64)}, {}, ()),  # it has no peer
        ({}, {0: BUSY | {"mig": "Enabled", "name": "another"}}, ()),  # which another run has
    ],
)
def test_a_run_is_refused_for_the_gpus_that_it_has_reserved_and_for_memory(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], gpus: dict[int, dict[str, Any]], facts: Facts
) -> None:
    found = checks(monkeypatch, 1, machine, gpus)
    wrong = [c.text for c in found if c.outcome is not Outcome.OK]
    assert len(wrong) == bool(facts)
    for text in wrong:
        check_refusal(text, "node0", *facts)
    assert [c.name for c in found if c.name.startswith("GPU")][:1] == ["GPUs of node0"]


def test_gpus_of_servers_that_are_ending_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    used = (
        Finding(check="GPU 1", where=("node0",), found="used", outcome=Outcome.WRONG, text="it is used by process 77"),
        Finding(check="memory", where=("node0",), found="8 GiB"),
    )
    looks = [used, used, used[1:]]
    monkeypatch.setattr(examination, "_LOOK_S", 0.0)
    monkeypatch.setattr(examination, "examine", lambda *_, **__: Examination(findings=looks.pop(0)))
    config = load_config(TINY, ["cluster.gpus_per_node=1", "parallel.dp=1", "parallel.ep=1"])
    found = examination.brief_checks(config, [NODE], [[OWN]], here=True)
    assert [c.name for c in found] == ["memory of node0"] and not looks
