"""What a run needs of machines, checked before its first stage: Ray, nodes, disks, packages, GPUs, ports, servers.

A dry run looks at this machine alone, and only where it is the one that would do the work.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from miles_like.checks import Check, NotCheckedError, Outcome, checked
from miles_like.config import RunConfig
from miles_like.node_probe import NodeProbe, bytes_under, disk_of, gpus
from miles_like.pipeline import Stage
from miles_like.placement import plan_placement

ANSWER_S = 5.0  # for a connection to a server or a cluster
_GIB = 1 << 30
# of bytes of BF16 weights: BF16 weights, FP32 masters and two FP32 moments
_CHECKPOINT = 7
_ENGINES = {"embedded": "rollout.embedded", "sglang": "sglang"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes that a stage will write below a directory."""

    stage: str
    directory: Path
    bytes: int
    on_nodes: bool = False  # of each node, not of the shared file system


def disk_needs(config: RunConfig, stages: Sequence[Stage], to_do: Sequence[str]) -> list[Need]:
    """Of the stages that will run; less than nothing is known of one whose sizes are known only once fetched."""
    by_name = {s.name: s for s in stages}
    bf16, fetched, staged = (by_name[name].size for name in ("convert", "fetch", "stage"))
    out: list[Need] = []

    def need(name: str, nbytes: int, directory: Path | None = None, *, on_nodes: bool = False) -> None:
        if name in to_do and nbytes > 0:
            where = directory or by_name[name].directory
            left = nbytes if on_nodes else nbytes - bytes_under(where)  # what is there is kept or replaced
            out.append(Need(stage=name, directory=where, bytes=max(left, 0), on_nodes=on_nodes))

    if bf16 is None or fetched is None or staged is None:
        return []
    served = staged // config.cluster.nodes - bf16
    need("fetch", fetched + (2 * bf16 if config.model.make is not None else 0))  # made of BF16 weights and shards
    need("dequantize", 0 if fetched == bf16 or not by_name["dequantize"].size else bf16)
    need("convert", bf16)
    again = 0 if served == fetched else served  # encoded beside the cache's files before it is copied
    if config.cluster.stage_dir is None:
        need("stage", served + bf16 + again)
    else:
        need("stage", again)
        need("stage", served + bf16, Path(config.cluster.stage_dir), on_nodes=True)
    if not config.lora.rank:
        every, steps, keep = config.checkpoint.every, config.train.steps, config.checkpoint.keep
        saves = 1 + (steps - 1) // every if every else 1
        need("train", _CHECKPOINT * bf16 * min(saves, keep + 1))  # one more is there while it is written
    return out


def check_disks(needs: Sequence[Need], disks: Callable[[Path], tuple[int, int]], where: str = "") -> None:
    """Raises ValueError for the first file system that cannot hold what stages will write to it, all summed.

    disks: directory -> (file system, free bytes). where: put before the sentence.
    """
    by_device: dict[int, list[Need]] = {}
    free: dict[int, int] = {}
    for n in needs:
        device, free_bytes = disks(n.directory)
        by_device.setdefault(device, []).append(n)
        free[device] = free_bytes
    for device, of_device in by_device.items():
        total = sum(n.bytes for n in of_device)
        if total > free[device]:
            parts = ", ".join(f"{n.stage} {_gib(n.bytes)}" for n in of_device)
            raise ValueError(
                f"{where}the file system of {of_device[0].directory} has {_gib(free[device])} GiB free, the stages "
                f"will write {_gib(total)} GiB to it ({parts}): free some, or give a larger one with --cache-dir, "
                "--run-dir or cluster.stage_dir"
            )


def check_directories(directories: Sequence[Path]) -> None:
    """Raises ValueError for the first that cannot be made or written."""
    for directory in directories:
        there = next(p for p in (directory.absolute(), *directory.absolute().parents) if os.path.lexists(p))
        if not there.is_dir():
            raise ValueError(
                f"{directory} cannot be made: {there} is no directory; give another --run-dir or --cache-dir"
            )
        if not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(
                f"{directory} cannot be written: no permission in {there}; give another --run-dir or --cache-dir"
            )


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:,.1f}" if nbytes >= _GIB // 10 else f"{nbytes / _GIB:,.4f}"


def check_address(address: str) -> None:
    """Raises ValueError where nothing answers at a Ray cluster's HOST:PORT or ray://HOST:PORT, and for other text;
    NotCheckedError for the words with which Ray finds a cluster itself."""
    if address in ("auto", "local"):
        raise NotCheckedError("Ray finds the cluster itself")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--ray-address {address!r} is no HOST:PORT: give the one that `ray start --head` prints")
    _connect(host, int(port), f"no Ray cluster answers at {address}", "start one (`ray start --head`) or leave it out")


def check_url(key: str, url: str) -> None:
    """Raises ValueError where no server accepts connections at a URL's host and port."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    _connect(str(parts.hostname), port, f"{key} = {url!r}: no server answers there", "start it, or correct the address")


def _connect(host: str, port: int, said: str, remedy: str) -> None:
    try:
        socket.create_connection((host.strip("[]"), port), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as e:
        raise ValueError(f"{said} ({getattr(e, 'strerror', None) or e}): {remedy}") from None


class Machines:
    """What one run asks of machines."""

    def __init__(
        self, config: RunConfig, stages: Sequence[Stage], to_do: Sequence[str], ray_address: str | None
    ) -> None:
        self.config, self.ray_address = config, ray_address
        self.trains = "train" in to_do
        self.needs = disk_needs(config, stages, to_do)
        self.directories = [s.directory for s in stages if s.name in to_do]
        self.uses_ray = bool({"stage", "train"} & set(to_do)) or (config.model.make is not None and "fetch" in to_do)

    # a dry run

    def from_here(self) -> list[Check]:
        """This machine's part of it; what others must tell is listed as not checked."""
        c = self.config.cluster
        out = []
        if self.ray_address is not None:
            address = self.ray_address
            out.append(checked(f"Ray at {address}", lambda: check_address(address)))
        others = self._others()
        out.append(checked("directories", lambda: check_directories(self.directories)))
        shared = [n for n in self.needs if not n.on_nodes]
        out.append(checked("disk space", lambda: self._disks_from_here(shared, others)))
        if others is None:
            probe = self._probe(imports=False)()
            out += [checked(name, check) for name, check in self._of_node(0, probe, here=True).items()]
        elif self.trains:
            what = "nodes, GPUs, packages and ports" if c.gpus_per_node else "nodes, packages and ports"
            out.append(Check(what, Outcome.NOT_CHECKED, others))
        return out

    def _others(self) -> str | None:
        """Why another machine than this one does the work; None: this one does."""
        c = self.config.cluster
        if self.ray_address is not None:
            return f"they are those of the Ray cluster at {self.ray_address}"
        if c.nodes > 1:
            return f"the run is for {c.nodes} nodes"
        if c.gpus_per_node > (have := gpus()):
            return f"the run is for {c.gpus_per_node} GPUs, this machine has {have}"
        return None

    def _disks_from_here(self, needs: Sequence[Need], others: str | None) -> None:
        try:
            check_disks(needs, disk_of)
        except ValueError as e:
            if others is None or self.ray_address is not None:
                raise
            raise NotCheckedError(f"{others}; here, {e}") from None

    # the start of a run

    def of_cluster(self) -> list[Check]:
        """Starts or joins Ray where a stage to be run needs it, and asks every node."""
        out = [
            checked("directories", lambda: check_directories(self.directories)),
            checked("disk space", lambda: check_disks([n for n in self.needs if not n.on_nodes], disk_of)),
        ]
        if not self.uses_ray:
            return out
        from miles_like.node_work import on_every_node
        from miles_like.workers import check_nodes, gpus_of_nodes, start_ray

        ray = checked("Ray", lambda: start_ray(self.ray_address))
        out.append(ray)
        if ray.outcome is not Outcome.OK:
            return out
        plan = plan_placement(self.config.cluster, self.config.parallel, self.config.servers)
        nodes = checked("nodes", lambda: check_nodes(plan))
        out.append(nodes)
        if nodes.outcome is Outcome.OK:
            probes = on_every_node(self._probe(imports=True))
            for i, (probe, given_out) in enumerate(zip(probes, gpus_of_nodes(), strict=True)):
                told = {**probe, "gpus": given_out}  # what Ray was told, which is what ranks can be given
                out += [checked(name, check) for name, check in self._of_node(i, told, here=False).items()]
        return out

    # of a node

    def _probe(self, *, imports: bool) -> NodeProbe:
        """imports: SGLang is imported and not only looked for, which takes half a minute."""
        c = self.config
        paths = tuple(str(n.directory) for n in self.needs if n.on_nodes)
        if not self.trains:
            return NodeProbe(paths=paths)
        found = ["megatron.core", *(["transformer_engine"] if c.kernels.spec == "te" else [])]
        engine = () if c.servers is None else (_ENGINES[c.rollout.engine],)
        really = engine if imports and c.rollout.engine == "sglang" else ()
        ports = () if c.rollout.port is None else tuple(c.rollout.port + i for i in range(c.rollout.servers))
        return NodeProbe(
            paths=paths,
            found=(*found, *(name for name in engine if name not in really)),
            imported=really,
            ports=ports if c.servers is not None else (),
        )

    def _of_node(self, node: int, probe: Mapping[str, Any], *, here: bool) -> dict[str, Callable[[], None]]:
        name = "this machine" if here else f"node {node} ({probe['node']})"
        needs = [n for n in self.needs if n.on_nodes]
        out: dict[str, Callable[[], None]] = {}
        if needs:
            out[f"disk space of {name}"] = lambda: check_disks(
                needs, lambda path: probe["disks"][str(path)], f"{name}: "
            )
        if self.trains:
            out[f"packages of {name}"] = lambda: self._check_packages(name, probe)
            out[f"GPUs of {name}"] = lambda: self._check_gpus(node, name, probe)
        if self.trains and self.config.servers is not None and self.config.rollout.port is not None:
            out[f"ports of {name}"] = lambda: self._check_ports(node, name, probe)
        return out

    def _check_packages(self, name: str, probe: Mapping[str, Any]) -> None:
        for package, why in probe["missing"].items():
            key = f"rollout.engine = {self.config.rollout.engine!r}" if package in _ENGINES.values() else "the trainer"
            other = ", or set rollout.engine = 'embedded'" if package == "sglang" else ""
            raise ValueError(f"{name} cannot import {package}, which {key} needs ({why}): install it there{other}")

    def _check_gpus(self, node: int, name: str, probe: Mapping[str, Any]) -> None:
        want = self.config.cluster.gpus_per_node
        plan = plan_placement(self.config.cluster, self.config.parallel, self.config.servers)
        if node < plan.nodes and probe["gpus"] < want:
            raise ValueError(
                f"{name} has {probe['gpus']} GPUs, cluster.gpus_per_node = {want}: lower it, or join a cluster of such "
                "nodes with --ray-address"
            )

    def _check_ports(self, node: int, name: str, probe: Mapping[str, Any]) -> None:
        first = self.config.rollout.port
        assert first is not None
        plan = plan_placement(self.config.cluster, self.config.parallel, self.config.servers)
        for slot in plan.of("rollout"):
            if slot.node == node and first + slot.index in probe["used"]:
                raise ValueError(
                    f"{name}: port {first + slot.index} of rollout server {slot.index} is in use: set rollout.port to "
                    "another one, or leave it out for any free port"
                )
