"""One node's side of the examination: a picklable value makes the object that lives in a process of the node."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypedDict

from miles_like.doctor.disks import DiskFacts, disk_facts, forget, seen
from miles_like.doctor.gpus import GpuFacts, query_gpus
from miles_like.doctor.links import Linker, LinkTimes
from miles_like.doctor.machine import MachineFacts, machine_facts
from miles_like.doctor.software import Software, engine_software, software
from miles_like.nodes.probe import is_free
from miles_like.sandbox.config import NO_SANDBOX, SandboxConfig
from miles_like.sandbox.make import try_sandbox
from miles_like.variables import set_variables


class NodeReport(TypedDict):
    """What a node reports of itself."""

    machine: MachineFacts
    software: Software
    engine: Software | str  # of the engine's interpreter; a text: why it reports none
    gpus: list[GpuFacts] | str  # a text: why none is reported
    disks: dict[str, DiskFacts]
    sandbox: str | None  # why it runs no program; "": it does; None: the run has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Examiner:
    """Examines the node on which it is called."""

    engine: str
    paths: tuple[str, ...]
    sandbox: SandboxConfig = NO_SANDBOX
    gpus: bool = True  # ask nvidia-smi, which may take seconds a GPU
    network: Callable[[str | None], Mapping[str, str]]  # as that of `Needs`

    def __call__(self) -> ExaminedNode:
        return ExaminedNode(self)


class ExaminedNode:
    """The examination of this machine."""

    def __init__(self, asked: Examiner) -> None:
        self._asked, self._linker = asked, Linker()
        self._interface: str | None = None

    def warm(self) -> None:
        """First of the messages: gives this process the variables of a rank, whatever it inherited from the node's Ray,
        and imports torch."""
        set_variables(self._asked.network(self._interface))
        self._linker.warm()

    def listen(self, address: str) -> int:
        return self._linker.listen(address)

    def meet(self, backend: str, side: int, address: str, port: int) -> LinkTimes:
        return self._linker.meet(backend, side, address, port)

    def clock(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def report(self, address: str | None, token: str) -> NodeReport:
        """address: of the node in the cluster. token: of its markers on the disks."""
        asked, machine = self._asked, machine_facts(address)
        self._interface = machine["interface"]
        return {
            "machine": machine,
            "software": software(),
            "engine": engine_software(asked.engine),
            "gpus": query_gpus() if asked.gpus else "not requested",
            "disks": {path: disk_facts(path, token) for path in asked.paths},
            "sandbox": _sandbox_fault(asked.sandbox),
        }

    def used(self, ports: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the ports that a process listens on."""
        return tuple(port for port in ports if not is_free(port))

    def seen(self, tokens: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Path -> tokens of the nodes whose markers this node sees there."""
        return {path: seen(path, tokens) for path in self._asked.paths}

    def forget(self, token: str) -> None:
        for path in self._asked.paths:
            forget(path, token)


def _sandbox_fault(config: SandboxConfig) -> str | None:
    if config.kind is None:
        return None
    try:
        try_sandbox(config)
    except ValueError as e:
        return str(e)
    return ""
