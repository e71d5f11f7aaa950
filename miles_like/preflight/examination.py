"""The examination of a cluster's nodes, for the command and for the start of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from miles_like.check_results import CheckResult, Outcome
from miles_like.config.run import RunConfig
from miles_like.doctor.examine import Examination, ThisMachine, examine, examiner_of
from miles_like.doctor.findings import Finding, Needs
from miles_like.nodes.facts import Device
from miles_like.preflight.run_needs import run_needs

if TYPE_CHECKING:
    from miles_like.nodes.members import Node

SETTLES_S = 15.0  # in which servers that were killed end and their GPUs are free
_LOOK_S = 3.0  # between two looks


def examine_nodes(
    config: RunConfig | None, ray_address: str | None, console: Console, run_dir: Path | None = None
) -> Examination:
    """All nodes of the Ray cluster at `ray_address`, or this machine where it is None, with everything that is checked.

    config: the run to whose numbers they are held. run_dir: its directory, if that is examined too. Raises ValueError
    where the cluster does not answer.
    """
    needs = run_needs(config, run_dir) if config is not None else Needs()

    def report(line: str) -> None:
        console.print(line, style="dim", highlight=False)

    if ray_address is None:
        return examine(ThisMachine(examiner_of(needs)), needs, report=report)
    from miles_like.nodes.services import NodeServices
    from miles_like.nodes.session import start_ray

    start_ray(ray_address)
    with NodeServices(examiner_of(needs), _environment(needs)) as nodes:
        return examine(nodes, needs, report=report)


def brief_checks(
    config: RunConfig, chosen: Sequence[Node], devices: Sequence[Sequence[Device]] | None = None, *, here: bool = False
) -> list[CheckResult]:
    """Before a run, with Ray joined or started: versions, limits, memory, clocks, names, gloo between neighbours, GPUs.

    devices: the run's on each node; None or empty: it has none there. here: the only node is this machine, which is
    examined in this process. On one node limits refuse nothing, and without GPUs nothing does: a laptop's or a
    workstation's may do. GPUs that processes use are looked at again for a while, because servers that were killed need
    seconds to end.
    """
    needs = run_needs(config)
    examiner, held = examiner_of(needs, brief=True), None
    if devices is not None and any(devices):
        held = [{device.uuid for device in of_node} for of_node in devices]
    if here:
        found = _settled(lambda: examine(ThisMachine(examiner, [n.gpus for n in chosen]), needs, brief=True, held=held))
    else:
        from miles_like.nodes.services import NodeServices

        with NodeServices(examiner, _environment(needs), chosen) as nodes:
            found = _settled(lambda: examine(nodes, needs, brief=True, held=held))
    one, gpus = len(chosen) == 1, bool(config.cluster.gpus_per_node)
    return [_result(f, refuses=not one or (gpus and not f.check.startswith("ulimit"))) for f in found.findings]


def _settled(examined: Callable[[], Examination]) -> Examination:
    """The first examination without a fault of a GPU, or the last within `SETTLES_S`."""
    began = time.monotonic()
    while True:
        found = examined()
        faults = [f for f in found.findings if f.outcome is Outcome.WRONG and f.check.startswith("GPU ")]
        if not faults or time.monotonic() - began >= SETTLES_S:
            return found
        time.sleep(_LOOK_S)


def _result(finding: Finding, *, refuses: bool) -> CheckResult:
    name = " of ".join(filter(None, [finding.check, ", ".join(finding.where)]))
    outcome = Outcome.OK if not refuses and finding.outcome is Outcome.WRONG else finding.outcome
    return CheckResult(name, outcome, finding.text)


def _environment(needs: Needs) -> Mapping[str, str]:
    """The run's variables, and the first GPU: Ray would hide all GPUs from a process that asks for none."""
    return {"CUDA_VISIBLE_DEVICES": "0", **needs.environment}
