"""`Finding`, one row of the doctor's table, and `Needs`, the numbers of a run that nodes are checked against."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from miles_like.check_results import Outcome
from miles_like.nodes.facts import ServerPort
from miles_like.sandbox.config import NO_SANDBOX, SandboxConfig

Ports = Mapping[int, Sequence[ServerPort]]  # number of a run's node -> what its servers bind


def no_ports(ranges: Sequence[tuple[int, int]]) -> Ports:
    return {}


def no_variables(interface: str | None) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of the table.

    where: labels of the nodes, or of the pair of nodes. found: the measured value. text: for WRONG the fault and the
    remedy, for NOT_CHECKED the reason, for OK a remark, or empty.
    """

    check: str
    where: tuple[str, ...]
    found: str
    outcome: Outcome = Outcome.OK
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The numbers of a run that nodes are checked against. A field that is None or empty is not checked, as all are
    without a run."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    # ephemeral ranges of the run's nodes -> what its servers bind; raises ValueError where no ports are left
    ports: Callable[[Sequence[tuple[int, int]]], Ports] = no_ports
    # directory that several nodes must see as one -> number of each of those nodes in the run -> why it must
    shared: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    either: tuple[str, ...] = ()  # directories that all nodes may see, or each may have to itself
    local: tuple[str, ...] = ()  # directories that each node must have to itself
    packages: tuple[str, ...] = ("torch", "megatron-core", "ray")  # of the trainer's environment
    engine: str = sys.executable  # interpreter of the rollout engine
    engine_packages: tuple[str, ...] = ()
    sandbox: SandboxConfig = NO_SANDBOX  # where programs of the model run on every node
    environment: Mapping[str, str] = field(default_factory=dict)  # of the run's ranks on every node
    # interface of a node's address -> variables by which gloo and NCCL of its ranks choose their network; picklable
    network: Callable[[str | None], Mapping[str, str]] = no_variables

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.shared, *self.either, *self.local]))

    def names_interface(self, interface: str | None) -> bool:
        """Whether gloo is given its interface, so that it does not resolve the host name."""
        return "GLOO_SOCKET_IFNAME" in self.network(interface)


def by_value(check: str, values: Mapping[str, str]) -> list[Finding]:
    """One row for each distinct value, with the nodes that have it."""
    return [
        Finding(check=check, where=tuple(node for node, v in values.items() if v == value), found=value)
        for value in dict.fromkeys(values.values())
    ]


def one_row(check: str, values: Mapping[str, str], wrong: Mapping[str, str]) -> list[Finding]:
    """One row for each distinct value of the nodes without a fault, and one for each node in `wrong`, which maps a node
    to its fault and remedy."""
    out = by_value(check, {node: value for node, value in values.items() if node not in wrong})
    return out + [
        Finding(check=check, where=(node,), found=values.get(node, ""), outcome=Outcome.WRONG, text=text)
        for node, text in wrong.items()
    ]


def gib(nbytes: float) -> str:
    return "no limit" if nbytes < 0 else f"{nbytes / (1 << 30):,.1f} GiB"


def rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else "".join(names)
