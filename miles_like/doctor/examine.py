"""Examine the nodes of a Ray cluster, or this machine alone, within a time limit for each step."""

from __future__ import annotations

import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles_like.check_results import Outcome
from miles_like.doctor.check_machine import check_disks, check_gpus, check_limits, check_memory, check_ports
from miles_like.doctor.check_network import (
    ClockOffset,
    Link,
    check_clocks,
    check_links,
    check_names,
    check_nodes,
)
from miles_like.doctor.check_software import check_software
from miles_like.doctor.examiner import Examiner, NodeReport
from miles_like.doctor.findings import Finding, Needs
from miles_like.doctor.links import LIMIT_S, STORE_S, LinkTimes, ring, tournament
from miles_like.nodes.facts import NodeName, Unanswered
from miles_like.nodes.racks import in_fewest_racks

REPORT_S = 300.0  # Ray starts the process, the engine's interpreter and nvidia-smi answer, disks are measured
CLOCK_CALL_S = 30.0
IMPORT_S = 300.0  # torch from a cold shared disk
_PINGS = 5


class Nodes(Protocol):
    """Processes on nodes, each with an `ExaminedNode`."""

    @property
    def names(self) -> Sequence[NodeName]: ...

    @property
    def ray_gpus(self) -> Sequence[int]:
        """GPUs that Ray was started with on each; empty without Ray, as the next three."""

    @property
    def racks(self) -> Sequence[str | None]:
        """The rack of each."""

    @property
    def object_store(self) -> Sequence[int]:
        """Bytes of Ray's object store."""

    @property
    def departed(self) -> Sequence[str]:
        """Addresses of nodes that were in the cluster and left it."""

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout_s: float) -> dict[int, Any]: ...


class ThisMachine:
    """`Nodes` of this machine alone. ray_gpus: as that of `Nodes`, of a Ray on this machine."""

    racks: Sequence[str | None] = ()
    object_store: Sequence[int] = ()
    departed: Sequence[str] = ()

    def __init__(self, examiner: Examiner, ray_gpus: Sequence[int] = ()) -> None:
        self.ray_gpus = ray_gpus
        self.names = (NodeName(host=socket.gethostname(), address="127.0.0.1"),)
        self._target = examiner()

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout_s: float) -> dict[int, Any]:
        return {k: getattr(self._target, method)(*given) for k, given in arguments.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All measurements and findings."""

    findings: tuple[Finding, ...]
    reports: Mapping[str, NodeReport] = field(default_factory=dict)  # by node
    clocks: Mapping[str, ClockOffset] = field(default_factory=dict)
    links: tuple[Link, ...] = ()

    @property
    def ok(self) -> bool:
        return all(finding.outcome is not Outcome.WRONG for finding in self.findings)


def examiner_of(needs: Needs, *, brief: bool = False) -> Examiner:
    """The examiner of each node. brief: without disks, which a run's other checks cover, and without GPUs of a run that
    uses none."""
    paths, gpus = (() if brief else needs.paths), not brief or bool(needs.gpus_per_node)
    return Examiner(engine=needs.engine, paths=paths, gpus=gpus, network=needs.network, sandbox=needs.sandbox)


def examine(
    nodes: Nodes,
    needs: Needs,
    *,
    brief: bool = False,
    held: Sequence[Collection[str]] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Examination:
    """brief: only versions, limits, memory, clocks, names, gloo between neighbours, and the GPUs in `held`: UUIDs of
    those that the run holds on each node; None: none. report: gets a line before a step."""
    report(f"examining {len(nodes.names)} node{'s' * (len(nodes.names) > 1)}")
    labels = unique_labels(nodes.names)
    tokens = tuple(f"{secrets.token_hex(8)}-{k}" for k in range(len(labels)))
    asked = {k: (name.address, tokens[k]) for k, name in enumerate(nodes.names)}
    answers = nodes.call("report", asked, REPORT_S)
    reports = {labels[k]: a for k, a in sorted(answers.items()) if not isinstance(a, Unanswered)}
    silent = {
        labels[k]: f"{nodes.names[k].address}: {a.why}" for k, a in sorted(answers.items()) if isinstance(a, Unanswered)
    }
    here = [k for k in range(len(labels)) if labels[k] in reports]
    findings = check_nodes(list(reports), silent, nodes.departed, needs)
    findings += check_software(reports, needs) + check_limits(reports)
    if len({name.address for name in nodes.names}) > 1:  # several nodes of one machine reach each other in any case
        findings += check_names(reports, needs)
    if not brief or held is not None:
        own = reports if held is None else _with_gpus(reports, dict(zip(labels, held, strict=True)))
        findings += check_gpus(own, needs, dict(zip(labels, nodes.ray_gpus, strict=False)))
    findings += check_memory(reports, dict(zip(labels, nodes.object_store, strict=False)))
    if not brief:
        chosen = _chosen(nodes, here, needs)
        findings += _ports(nodes, labels, chosen, reports, needs)
        seen = _reach(nodes, labels, here, tokens, needs)
        findings += check_disks(reports, needs, seen, [labels[k] for k in chosen])
    clocks = measure_clocks(nodes, labels, here) if len(here) > 1 else {}
    findings += check_clocks(clocks)
    links: list[Link] = []
    if len(here) > 1:
        report("messages between the nodes")
        links, found = _links(nodes, labels, here, reports, needs, brief=brief)
        findings += found
    return Examination(findings=tuple(findings), reports=reports, clocks=clocks, links=tuple(links))


def _with_gpus(reports: Mapping[str, NodeReport], held: Mapping[str, Collection[str]]) -> dict[str, NodeReport]:
    """The reports with those GPUs alone whose UUIDs are in `held`: another job may use the others."""
    out = {}
    for node, report in reports.items():
        gpus = report["gpus"]
        own = gpus if isinstance(gpus, str) else [gpu for gpu in gpus if gpu["uuid"] in held[node]]
        out[node] = NodeReport(**{**report, "gpus": own})
    return out


def unique_labels(names: Sequence[NodeName]) -> tuple[str, ...]:
    """Host names; with the address, and a number, where two nodes have the same."""
    hosts, pairs = Counter(n.host for n in names), Counter(names)
    return tuple(
        n.host if hosts[n.host] == 1 else str(n) if pairs[n] == 1 else f"{n} number {k}" for k, n in enumerate(names)
    )


def measure_clocks(
    nodes: Nodes, labels: Sequence[str], here: Sequence[int], now: Callable[[], float] = time.time
) -> dict[str, ClockOffset]:
    """Each node's clock against `now`, by the fastest of some round trips, one node at a time."""
    out: dict[str, ClockOffset] = {}
    for k in here:
        for _ in range(_PINGS):
            began = now()
            there = nodes.call("clock", {k: ()}, CLOCK_CALL_S)[k]
            ended = now()
            if isinstance(there, Unanswered):
                break
            offset = ClockOffset(offset_s=there - (began + ended) / 2, error_s=(ended - began) / 2)
            if labels[k] not in out or offset.error_s < out[labels[k]].error_s:
                out[labels[k]] = offset
    return out


def _chosen(nodes: Nodes, here: Sequence[int], needs: Needs) -> list[int]:
    """The nodes that the run takes while no other has GPUs, in its order: of those with enough of them, in the fewest
    racks."""
    enough = [k for k in here if not nodes.ray_gpus or nodes.ray_gpus[k] >= (needs.gpus_per_node or 0)]
    racks = [nodes.racks[k] if nodes.racks else None for k in enough]
    return [enough[i] for i in in_fewest_racks(racks, len(enough) if needs.nodes is None else needs.nodes)]


def _ports(
    nodes: Nodes, labels: Sequence[str], chosen: Sequence[int], reports: Mapping[str, NodeReport], needs: Needs
) -> list[Finding]:
    ranges = [reports[labels[k]]["machine"]["ephemeral_ports"] for k in chosen]
    try:
        planned = needs.ports(ranges)
    except ValueError as e:
        return check_ports(reports, str(e), {})
    asked = {k: (tuple(port.number for port in planned[i]),) for i, k in enumerate(chosen) if i in planned}
    answers = nodes.call("used", asked, REPORT_S)
    used = {labels[k]: a for k, a in answers.items() if not isinstance(a, Unanswered)}
    return check_ports(reports, {labels[k]: planned.get(i, ()) for i, k in enumerate(chosen)}, used)


def _reach(
    nodes: Nodes, labels: Sequence[str], here: Sequence[int], tokens: tuple[str, ...], needs: Needs
) -> dict[str, dict[str, tuple[str, ...]]]:
    """Path -> node -> nodes whose markers it sees; the markers are removed."""
    answers = nodes.call("seen", dict.fromkeys(here, (tokens,)), REPORT_S)
    nodes.call("forget", {k: (tokens[k],) for k in here}, REPORT_S)
    by_token = dict(zip(tokens, labels, strict=True))
    return {
        path: {
            labels[k]: tuple(by_token[token] for token in answer[path])
            for k, answer in sorted(answers.items())
            if not isinstance(answer, Unanswered)
        }
        for path in needs.paths
    }


def _links(
    nodes: Nodes,
    labels: Sequence[str],
    here: Sequence[int],
    reports: Mapping[str, NodeReport],
    needs: Needs,
    *,
    brief: bool,
) -> tuple[list[Link], list[Finding]]:
    warmed = nodes.call("warm", dict.fromkeys(here, ()), IMPORT_S)
    cold = {labels[k]: a.why for k, a in warmed.items() if isinstance(a, Unanswered)}
    able = [k for k in here if labels[k] not in cold]
    findings = [
        Finding(check="messages", where=(n,), found="", outcome=Outcome.WRONG,
                text=f"{n}: torch cannot be imported ({why}): install it there as on the other nodes")
        for n, why in cold.items()
    ]  # fmt: skip
    names = dict(zip(labels, nodes.names, strict=True))
    links = measure_links(nodes, labels, able, "gloo", needs, brief=brief)
    findings += check_links("gloo", links, reports, names, needs)
    if brief:
        return links, findings
    with_gpus = [k for k in able if not isinstance(gpus := reports[labels[k]]["gpus"], str) and gpus]
    if len(with_gpus) < 2:
        reason = "no GPU: not checked"
        where = tuple(labels[k] for k in able)
        return links, [
            *findings,
            Finding(check="nccl", where=where, found="", outcome=Outcome.NOT_CHECKED, text=reason),
        ]
    by_nccl = measure_links(nodes, labels, with_gpus, "nccl", needs, brief=False)
    return links + by_nccl, findings + check_links("nccl", by_nccl, reports, names, needs)


def measure_links(
    nodes: Nodes, labels: Sequence[str], able: Sequence[int], backend: str, needs: Needs, *, brief: bool
) -> list[Link]:
    """Disjoint pairs at once: all pairs, or with `brief` neighbours alone."""
    limit = 8 * LIMIT_S[backend] + STORE_S
    out = []
    for pairs in (ring if brief else tournament)(len(able)):
        met = [(able[a], able[b]) for a, b in pairs]
        ports = nodes.call("listen", {a: (nodes.names[a].address,) for a, _ in met}, CLOCK_CALL_S)
        arguments: dict[int, tuple[Any, ...]] = {}
        for pair in met:
            if not isinstance(ports[pair[0]], Unanswered):
                for side, k in enumerate(pair):
                    store = (nodes.names[pair[0]].address, ports[pair[0]])
                    arguments[k] = (backend, side, *store)
        answers = ports | nodes.call("meet", arguments, limit)
        for a, b in met:
            result = _of_pair(answers[a], answers.get(b))
            out.append(Link(backend=backend, ends=(labels[a], labels[b]), result=result))
    return out


def _of_pair(first: Any, second: Any) -> LinkTimes | Unanswered:
    """The first side's times, unless a side failed."""
    failed = [side for side in (first, second) if isinstance(side, Unanswered)]
    if failed:
        # a side that only waited knows no cause
        return min(failed, key=lambda side: "Connect timeout" in side.why)
    assert isinstance(first, LinkTimes)
    return first
