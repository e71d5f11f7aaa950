"""Checks of nodes that answer, of their clocks and names, and of messages between pairs of them."""

from __future__ import annotations

import ipaddress
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles_like.check_results import Outcome
from miles_like.doctor.examiner import NodeReport
from miles_like.doctor.findings import Finding, Needs, by_value, listed, one_row, rate
from miles_like.doctor.links import LinkTimes
from miles_like.nodes.facts import NodeName, Unanswered

CLOCK_S = 1.0  # most by which a clock may differ from the driver's: files and log lines of nodes are put in order by it
_EACH_PAIR = 6  # pairs that have a row each; more are summed up
_SLOW_SHARE = 0.25  # of the median bandwidth of all pairs, below which a pair is remarked


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """A node's clock minus the driver's, in seconds; the true value is within `error_s` of it."""

    offset_s: float
    error_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One pair's result by one backend."""

    backend: str  # "gloo" or "nccl"
    ends: tuple[str, str]
    result: LinkTimes | Unanswered


def check_nodes(
    answered: Sequence[str], unanswered: Mapping[str, str], departed: Sequence[str], needs: Needs
) -> list[Finding]:
    """unanswered: node -> its address and why. departed: addresses of nodes that have left the Ray cluster."""
    out = [
        Finding(
            check="node",
            where=(node,),
            found="no answer",
            outcome=Outcome.WRONG,
            text=f"{node}: {why}: check that it runs and can be reached (`ray status`), and start Ray there again",
        )
        for node, why in unanswered.items()
    ]
    for address in departed:
        text = f"the node {address} left the Ray cluster: check that it runs, and start Ray there again"
        out.append(Finding(check="node", where=(address,), found="left", outcome=Outcome.WRONG, text=text))
    if (needs.nodes or 0) > len(answered):
        text = f"{len(answered)} nodes answer, but cluster.nodes = {needs.nodes}: start Ray on more nodes, or lower it"
        out.append(Finding(check="nodes", where=(), found=str(len(answered)), outcome=Outcome.WRONG, text=text))
    return [Finding(check="node", where=tuple(answered), found="answers"), *out]


def check_clocks(offsets: Mapping[str, ClockOffset]) -> list[Finding]:
    wrong = {
        node: f"the clock of {node} differs by {c.offset_s:+.2f} s from this machine's, more than {CLOCK_S:g} s: run "
        "chrony or another NTP client on both"
        for node, c in offsets.items()
        if abs(c.offset_s) - c.error_s > CLOCK_S
    }
    right = {
        node: f"within {CLOCK_S:g} s" if node not in wrong else f"{c.offset_s:+.2f} s" for node, c in offsets.items()
    }
    return one_row("clock", right, wrong)


def check_names(reports: Mapping[str, NodeReport], needs: Needs) -> list[Finding]:
    """Whether gloo would give other nodes a loopback address of this one, because its name resolves to one."""
    shown = {n: ", ".join(r["machine"]["name_resolves_to"]) or "nothing" for n, r in reports.items()}
    trapped = {n: _name_remedy(n, r) for n, r in reports.items() if is_trapped(r)}
    values = {n: shown[n] if n in trapped else "its address" for n in shown}
    covered = {n for n, r in reports.items() if needs.names_interface(r["machine"]["interface"])}
    if not trapped.keys() <= covered:
        return one_row("host name", values, {n: why for n, why in trapped.items() if n not in covered})
    text = "a loopback address, which is not used, because the run sets gloo's interface"
    return [
        Finding(check=row.check, where=row.where, found=row.found, text=text if row.where[0] in trapped else "")
        for row in by_value("host name", values)
    ]


def is_trapped(report: NodeReport) -> bool:
    """Whether the machine's name resolves to loopback addresses alone, or to none."""
    found = report["machine"]["name_resolves_to"]
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def _name_remedy(node: str, report: NodeReport) -> str:
    machine = report["machine"]
    found = ", ".join(machine["name_resolves_to"]) or "nothing"
    interface = machine["interface"] or "the interface of its address"
    return (
        f"the host name of {node} resolves to {found}, which gloo sends to the other nodes as its address: write "
        f"the node's network address into its /etc/hosts, or set GLOO_SOCKET_IFNAME={interface} in [cluster.env]"
    )


def check_links(
    backend: str, links: Sequence[Link], reports: Mapping[str, NodeReport], names: Mapping[str, NodeName], needs: Needs
) -> list[Finding]:
    """reports and names: by node."""
    good = {link.ends: link.result for link in links if isinstance(link.result, LinkTimes)}
    out: list[Finding] = []
    if good and len(links) > _EACH_PAIR:
        slowest = min(good, key=lambda ends: good[ends].bytes_per_s)
        latency = max(times.latency_s for times in good.values())
        found = f"{len(good)} of {len(links)} pairs; slowest {_times(good[slowest])}; latency up to {_milli(latency)}"
        out.append(Finding(check=f"{backend}, all pairs", where=slowest, found=found))
    else:
        out += [Finding(check=_pair(backend, ends), where=ends, found=_times(times)) for ends, times in good.items()]
    median = statistics.median([times.bytes_per_s for times in good.values()]) if good else 0.0
    for ends, times in good.items():
        if times.bytes_per_s < _SLOW_SHARE * median:
            text = (
                f"{ends[0]} and {ends[1]}: {rate(times.bytes_per_s)}, but the median of all pairs is "
                f"{rate(median)}: check cable and switch port"
            )
            out.append(Finding(check=_pair(backend, ends), where=ends, found=_times(times), text=text))
    for link in links:
        if isinstance(link.result, Unanswered):
            text = f"{backend} between {link.ends[0]} and {link.ends[1]} failed ({_cause(link.result.why)}): "
            text += _link_remedy(backend, link.ends, reports, names, needs)
            check = _pair(backend, link.ends)
            out.append(Finding(check=check, where=link.ends, found="failed", outcome=Outcome.WRONG, text=text))
    return out


def _link_remedy(
    backend: str,
    ends: tuple[str, str],
    reports: Mapping[str, NodeReport],
    names: Mapping[str, NodeName],
    needs: Needs,
) -> str:
    named = [n for n in ends if n in reports and needs.names_interface(reports[n]["machine"]["interface"])]
    trapped = [n for n in ends if n in reports and n not in named and is_trapped(reports[n])]
    if backend == "gloo" and trapped:
        return "; ".join(_name_remedy(node, reports[node]) for node in trapped)
    between = listed([names[node].address for node in ends])
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    if (given := needs.environment.get(variable)) is not None:
        return (
            f"{variable} = {given!r} in [cluster.env] must be an interface that exists on both nodes and connects "
            f"them; remove it to use the interface of their addresses, {between}"
        )
    if backend == "nccl":
        return (
            "run with NCCL_DEBUG=INFO in [cluster.env], set NCCL_SOCKET_IFNAME and NCCL_IB_HCA there, and open all "
            f"ports between {between}"
        )
    return f"check cable and routes, and open all ports in the firewall between {between}"


def _cause(why: str) -> str:
    """Without the source files that gloo names."""
    return re.sub(r"\[/\S+\] ?", "", why)


def _pair(backend: str, ends: tuple[str, str]) -> str:
    return f"{backend} {ends[0]} - {ends[1]}"


def _times(times: LinkTimes) -> str:
    return f"{_milli(times.latency_s)}, {rate(times.bytes_per_s)}"


def _milli(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
