"""What is known of a node: address, interface, cores, GPUs; why it does not answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU of a node."""

    index: int  # as in CUDA_VISIBLE_DEVICES
    uuid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node of a run."""

    host: str  # host name
    address: str  # by which the other nodes reach it
    interface: str | None  # the network interface with that address; None: not found
    cores: int
    devices: tuple[Device, ...]  # reserved for the run, in the order of a slot's `gpus`
    scratch: str | None = None  # directory of this user on its own disk; None: there is none, or no device


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeName:
    """How messages and results name a node."""

    host: str  # host name
    address: str

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPort:
    """A port that a rollout server of the run binds on a node."""

    number: int
    server: str  # its name in messages
    purpose: str  # what listens on it
    key: str  # of the configuration, which moves it


@dataclass(frozen=True, slots=True)
class Unanswered:
    """In place of a node's answer: why there is none."""

    why: str
