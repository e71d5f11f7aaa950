"""Check the machines of a run before its first stage: Ray, nodes, disks, packages, GPUs, ports, servers.

A dry run checks this machine only, and only if the run would use no other.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from miles_like.cluster.environment import driver_secrets, secret_names
from miles_like.cluster.placement import PlacementPlan, plan_placement
from miles_like.config.loop import CheckpointConfig
from miles_like.config.run import RunConfig
from miles_like.nodes.probe import EngineFound, NodeProbe, ProbeResult, bytes_under, disk_of, gpus
from miles_like.pipeline.check_results import CheckResult, NotCheckedError, Outcome, run_check
from miles_like.pipeline.stages import Stage

if TYPE_CHECKING:
    from miles_like.cluster.run_nodes import RunNodes

ANSWER_S = 5.0  # time limit of a connection to a server or a cluster
_GIB = 1 << 30
# size of a checkpoint over that of BF16 weights: BF16 weights, FP32 masters and two FP32 moments
_CHECKPOINT = 7
_FILE = 1 << 30  # a data file of the shards has at most this many bytes, unless it holds one larger tensor
_EMBEDDED = "rollout.embedded"
SGLANG_VERSION = "0.5.23"
_OTHER_ENGINE = "and give its interpreter as rollout.sglang.python, or set rollout.engine = 'embedded'"
_REQUIREMENTS = "docs/cluster/engine-requirements.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeed:
    """Bytes that a stage will write below a directory."""

    stage: str
    directory: Path
    bytes: int  # of the node with most, if `on_nodes`
    on_nodes: bool = False  # on each node, not on the shared file system
    by_node: tuple[int, ...] = ()  # bytes of each node, if `on_nodes`

    def of_node(self, node: int, held: int) -> DiskNeed:
        """What one node, which has `held` bytes of it, needs still; a node that the run does not use needs nothing."""
        return replace(self, bytes=max(0, self.by_node[node] - held) if node < len(self.by_node) else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Bytes that a run writes from the start: by stage to the shared file system, and to each node's own disk."""

    shared: Mapping[str, int]
    by_node: tuple[int, ...]  # empty without a node-local directory


def stage_bytes(config: RunConfig, stages: Sequence[Stage]) -> StageBytes | None:
    """None where sizes are known only after the fetch stage."""
    by_name = {s.name: s for s in stages}
    bf16, fetched, nodes = by_name["convert"].size, by_name["fetch"].size, by_name["stage"].by_node
    if bf16 is None or fetched is None or nodes is None:
        return None
    served = max((n.served for n in nodes), default=0)
    again = 0 if served == fetched else served  # encoded into the cache before it is copied
    local = config.cluster.stage_dir is not None
    trained = 0 if config.lora.rank else 1 + config.algorithm.has_critic
    shared = {
        "fetch": fetched + (2 * bf16 if config.model.make is not None else 0),  # made from BF16 weights and shards
        "dequantize": 0 if fetched == bf16 or not by_name["dequantize"].size else bf16,
        "convert": bf16,
        "stage": again if local else served + bf16 + again,
        "train": trained * checkpoint_size(bf16) * saved_checkpoints(config.checkpoint, config.train.steps),
    }
    own = tuple(n.served + _whole_files(n.shards, bf16) for n in nodes) if local else ()
    return StageBytes(shared=shared, by_node=own)


def disk_needs(config: RunConfig, stages: Sequence[Stage], to_do: Sequence[str]) -> list[DiskNeed]:
    """The needs of the stages that will run; empty where sizes are known only after the fetch stage."""
    if (written := stage_bytes(config, stages)) is None:
        return []
    by_name, out = {s.name: s for s in stages}, list[DiskNeed]()
    for name, nbytes in written.shared.items():
        if name in to_do and nbytes > 0:
            where = by_name[name].directory
            left = nbytes - bytes_under(where)  # existing files are kept or replaced
            out.append(DiskNeed(stage=name, directory=where, bytes=max(left, 0)))
        if name == "stage" and name in to_do and max(written.by_node, default=0) > 0:
            assert config.cluster.stage_dir is not None
            where, own = Path(config.cluster.stage_dir) / by_name["stage"].directory.name, written.by_node
            out.append(DiskNeed(stage="stage", directory=where, bytes=max(own), on_nodes=True, by_node=own))
    return out


def checkpoint_size(bf16: int) -> int:
    """Bytes of a checkpoint of a model with `bf16` bytes of BF16 weights."""
    return _CHECKPOINT * bf16


def saved_checkpoints(checkpoint: CheckpointConfig, steps: int) -> int:
    """The most checkpoints of a run that are on disk at a time, with the one being written."""
    every = checkpoint.every
    saves = 1 + (steps - 1) // every if every else 1
    kept = checkpoint.keep + (1 if checkpoint.keep_best else 0)
    if checkpoint.keep_every and every:
        kept += steps // math.lcm(every, checkpoint.keep_every)
    return min(saves, kept + 1)


def _whole_files(read: int, bf16: int) -> int:
    """Bytes of the data files that hold `read` bytes which ranks read: files at the border hold tensors of others."""
    return min(bf16, read + read // 8 + _FILE) if read else 0


def check_disks(needs: Sequence[DiskNeed], disks: Callable[[Path], tuple[int, int]], where: str = "") -> None:
    """Raises ValueError for the first file system that cannot hold the sum of what stages will write to it.

    disks: directory -> (file system, free bytes). where: prefix of the message.
    """
    by_device: dict[int, list[DiskNeed]] = {}
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


def _raise_unwritable(name: str, unwritable: Mapping[str, str]) -> None:
    path, why = next(iter(unwritable.items()))
    raise ValueError(
        f"{name}: {path} cannot be written ({why}): mount the disk there, or set another cluster.stage_dir"
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
    """Raises ValueError where nothing answers at a Ray cluster's HOST:PORT or ray://HOST:PORT, and for any other text;
    NotCheckedError for "auto" and "local"."""
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


def _connect(host: str, port: int, failure: str, remedy: str) -> None:
    try:
        socket.create_connection((host.strip("[]"), port), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as e:
        raise ValueError(f"{failure} ({getattr(e, 'strerror', None) or e}): {remedy}") from None


class Cluster(Protocol):
    """The cluster of a run, whose nodes are chosen once."""

    ray_address: str | None
    reserves: bool  # whether `nodes` reserves the nodes' GPUs

    def join(self) -> None: ...
    def nodes(self) -> RunNodes: ...


class Machines:
    """The machine checks of one run."""

    def __init__(self, config: RunConfig, stages: Sequence[Stage], to_do: Sequence[str], cluster: Cluster) -> None:
        self.config, self.cluster, self.ray_address = config, cluster, cluster.ray_address
        self.trains = "train" in to_do
        self.needs = disk_needs(config, stages, to_do)
        self.directories = [s.directory for s in stages if s.name in to_do]
        self.starts_ranks = self.trains or (config.model.make is not None and "fetch" in to_do)
        spreads = self.ray_address is not None and config.cluster.nodes > 1 and "convert" in to_do
        self.uses_ray = self.starts_ranks or "stage" in to_do or spreads
        self.stages = "stage" in to_do

    @cached_property
    def placement(self) -> PlacementPlan:
        """Raises ValueError as `plan_placement`."""
        return plan_placement(self.config.cluster, self.config.parallel, self.config.servers)

    # a dry run

    def local_checks(self) -> list[CheckResult]:
        """Checks of this machine; those of other machines are listed as not checked."""
        c = self.config.cluster
        out = []
        if self.ray_address is not None:
            address = self.ray_address
            out.append(run_check(f"Ray at {address}", lambda: check_address(address)))
        others = self._why_others()
        out += self._secret_checks(here=False)
        out.append(run_check("directories", lambda: check_directories(self.directories)))
        shared = [n for n in self.needs if not n.on_nodes]
        out.append(run_check("disk space", lambda: self._check_local_disks(shared, others)))
        if others is None:
            probe = self._probe(imports=False)()
            out += [run_check(name, check) for name, check in self._node_checks(0, probe, here=True).items()]
        elif self.trains:
            what = "nodes, GPUs, packages and ports" if c.gpus_per_node else "nodes, packages and ports"
            out.append(CheckResult(what, Outcome.NOT_CHECKED, others))
        return out

    def _secret_checks(self, *, here: bool) -> list[CheckResult]:
        """here: this process starts the run; otherwise the run may be started where they are set."""
        env = self.config.cluster.env | self.config.rollout.env
        if not self.trains or not secret_names(env):
            return []

        def check() -> None:
            try:
                driver_secrets(env)
            except ValueError as e:
                raise e if here else NotCheckedError(f"here, {e}") from None

        return [run_check("environment variables", check)]

    def _why_others(self) -> str | None:
        """Why the run uses other machines; None where it uses this one only."""
        c = self.config.cluster
        if self.ray_address is not None:
            return f"they are those of the Ray cluster at {self.ray_address}"
        if c.nodes > 1:
            return f"the run is for {c.nodes} nodes"
        if c.gpus_per_node > (have := gpus()):
            return f"the run is for {c.gpus_per_node} GPUs, this machine has {have}"
        return None

    def _check_local_disks(self, needs: Sequence[DiskNeed], others: str | None) -> None:
        try:
            check_disks(needs, disk_of)
        except ValueError as e:
            if others is None or self.ray_address is not None:
                raise
            raise NotCheckedError(f"{others}; here, {e}") from None

    # the start of a run

    def cluster_checks(self) -> list[CheckResult]:
        """Start or join Ray if a stage needs it, and check every node."""
        out = [
            *self._secret_checks(here=True),
            run_check("directories", lambda: check_directories([*self.directories, *self._staged_to()])),
            run_check("disk space", lambda: check_disks([n for n in self.needs if not n.on_nodes], disk_of)),
        ]
        if not self.uses_ray:
            return out
        from miles_like.nodes.work import on_every_node

        ray = run_check("Ray", self.cluster.join)
        out.append(ray)
        if ray.outcome is not Outcome.OK:
            return out
        self.cluster.reserves = self.starts_ranks
        nodes = run_check("nodes", self.cluster.nodes)
        out.append(nodes)
        if nodes.outcome is Outcome.OK:
            chosen = self.cluster.nodes().nodes
            probes = on_every_node(self._probe(imports=True), chosen)
            for i, (probe, of) in enumerate(zip(probes, chosen, strict=True)):
                node: ProbeResult = {**probe, "gpus": of.gpus}  # ranks get only the GPUs that Ray was started with
                out += [run_check(name, check) for name, check in self._node_checks(i, node, here=False).items()]
            if len(chosen) > 1 or self.ray_address is not None:
                from miles_like.preflight.examination import brief_checks

                out += brief_checks(self.config, chosen)
        return out

    def _staged_to(self) -> list[Path]:
        """The node-local directory: this process stages the small files there too."""
        stage_dir = self.config.cluster.stage_dir
        return [Path(stage_dir)] if self.stages and stage_dir is not None else []

    # checks of one node

    def _probe(self, *, imports: bool) -> NodeProbe:
        """imports: import SGLang, which takes 30 s, in place of only asking for its version."""
        c = self.config
        paths = tuple(str(n.directory) for n in self.needs if n.on_nodes)
        if not self.trains:
            return NodeProbe(paths=paths)
        found = ["megatron.core", *(["transformer_engine"] if c.kernels.spec == "te" else [])]
        ports = () if c.rollout.port is None else tuple(c.rollout.port + i for i in range(c.rollout.servers))
        stock = c.servers is not None and c.rollout.engine == "sglang"
        return NodeProbe(
            paths=paths,
            found=(*found, *((_EMBEDDED,) if c.servers is not None and not stock else ())),
            ports=ports if c.servers is not None else (),
            engine=(c.rollout.sglang.python or "") if stock else None,
            imports=imports,
        )

    def _node_checks(self, node: int, probe: ProbeResult, *, here: bool) -> dict[str, Callable[[], None]]:
        name = "this machine" if here else f"node {node} ({probe['node']})"
        needs = [n.of_node(node, probe["held"][str(n.directory)]) for n in self.needs if n.on_nodes]
        out: dict[str, Callable[[], None]] = {}
        if probe["unwritable"]:
            out[f"directories of {name}"] = partial(_raise_unwritable, name, probe["unwritable"])
        if needs:
            out[f"disk space of {name}"] = lambda: check_disks(
                needs, lambda path: probe["disks"][str(path)], f"{name}: "
            )
        if self.trains:
            out[f"packages of {name}"] = lambda: self._check_packages(name, probe)
            if (engine := probe["engine"]) is not None:
                out[f"engine of {name}"] = partial(self._check_engine, name, engine)
            out[f"GPUs of {name}"] = lambda: self._check_gpus(node, name, probe)
        if self.trains and self.config.servers is not None and (port := self.config.rollout.port) is not None:
            out[f"ports of {name}"] = partial(self._check_ports, node, name, probe, port)
        return out

    def _check_packages(self, name: str, probe: ProbeResult) -> None:
        for package, why in probe["missing"].items():
            key = f"rollout.engine = {self.config.rollout.engine!r}" if package == _EMBEDDED else "the trainer"
            raise ValueError(f"{name} cannot import {package}, which {key} needs ({why}): install it there")

    def _check_engine(self, name: str, found: EngineFound) -> None:
        python = self.config.rollout.sglang.python
        where = f"rollout.sglang.python = {python!r}" if python else "the trainer's Python"
        version, wrong = found["version"], found["wrong"]
        if version is None:
            raise ValueError(
                f"{name}: {where} has no SGLang {SGLANG_VERSION} ({wrong}): install {_REQUIREMENTS} into a virtual "
                f"environment there, {_OTHER_ENGINE}"
            )
        if version != SGLANG_VERSION:
            raise ValueError(
                f"{name}: {where} has SGLang {version}, this version of miles-like works with {SGLANG_VERSION} alone: "
                f"install {_REQUIREMENTS} into a virtual environment there, {_OTHER_ENGINE}"
            )
        if wrong is not None:
            raise ValueError(
                f"{name}: {where} has SGLang {version}, which it cannot import ({wrong}): install {_REQUIREMENTS} again"
            )

    def _check_gpus(self, node: int, name: str, probe: ProbeResult) -> None:
        want = self.config.cluster.gpus_per_node
        if node < self.placement.nodes and probe["gpus"] < want:
            raise ValueError(
                f"{name} has {probe['gpus']} GPUs, cluster.gpus_per_node = {want}: lower it, or join a cluster of such "
                "nodes with --ray-address"
            )

    def _check_ports(self, node: int, name: str, probe: ProbeResult, first: int) -> None:
        """first: the port of server 0."""
        for slot in self.placement.of("rollout"):
            if slot.node == node and first + slot.index in probe["used"]:
                raise ValueError(
                    f"{name}: port {first + slot.index} of rollout server {slot.index} is in use: set rollout.port to "
                    "another one, or leave it out for any free port"
                )
