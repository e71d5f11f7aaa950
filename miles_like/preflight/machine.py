"""Check the machines of a run before its first stage: Ray, nodes, disks, packages, GPUs, ports, servers.

A dry run checks this machine only, and only if the run would use no other.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from miles_like.check_results import CheckResult, NotCheckedError, Outcome, run_check
from miles_like.cluster.environment import driver_secrets, secret_names
from miles_like.cluster.placement import PlacementPlan, plan_placement
from miles_like.cluster.server_ports import server_ports
from miles_like.config.run import RunConfig
from miles_like.config.sections.distillation import MadeServer
from miles_like.nodes.facts import ServerPort
from miles_like.nodes.probe import EngineFound, NodeProbe, ProbeResult, disk_of, ephemeral_ports, gpus
from miles_like.nodes.sight import Probe, existing, probe_in
from miles_like.pipeline.stages import Stage
from miles_like.preflight.disks import DiskNeed, check_directories, check_disks, disk_needs
from miles_like.preflight.run_needs import cache_needs, run_dir_needs
from rollout.config import VLLM_VERSION

if TYPE_CHECKING:
    from miles_like.cluster.run_nodes import RunNodes
    from miles_like.nodes.members import Node

ANSWER_S = 5.0  # time limit of a connection to a server or a cluster
_EMBEDDED = "rollout.embedded"
SGLANG_VERSION = "0.5.23"
_REQUIREMENTS = {"sglang": "docs/cluster/engine-requirements.txt", "vllm": f"vllm=={VLLM_VERSION}"}
_STOCK = {"sglang": ("SGLang", SGLANG_VERSION), "vllm": ("vLLM", VLLM_VERSION)}  # engine -> its name, its version
_RUN_DIR, _CACHE = "--run-dir", "--cache-dir"  # the options of directories of the driver that nodes may have to see


def _raise_unwritable(name: str, unwritable: Mapping[str, str]) -> None:
    path, why = next(iter(unwritable.items()))
    raise ValueError(
        f"{name}: {path} cannot be written ({why}): mount the disk there, or set another cluster.stage_dir"
    )


def _raise_unseen(name: str, directory: Path, why: str, option: str) -> None:
    raise ValueError(
        f"{name} does not see the directory {directory} of the machine that starts the run, but its {why}: use "
        f"{option} with a directory on a file system that every node mounts at the same path"
    )


def check_address(address: str) -> None:
    """Raises ValueError where nothing answers at a Ray cluster's HOST:PORT or ray://HOST:PORT, and for any other text;
    NotCheckedError for "auto" and "local"."""
    if address in ("auto", "local"):
        raise NotCheckedError("Ray finds the cluster itself")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--ray-address {address!r} is not HOST:PORT: pass the address that `ray start --head` prints")
    _connect(
        host,
        int(port),
        f"no Ray cluster answers at {address}",
        "start one (`ray start --head`) or remove --ray-address",
    )


def check_url(key: str, url: str) -> None:
    """Raises ValueError where no server accepts connections at a URL's host and port."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    _connect(
        str(parts.hostname),
        port,
        f"{key} = {url!r}: no server answers there",
        "start the server, or correct the address",
    )


def _connect(host: str, port: int, failure: str, remedy: str) -> None:
    try:
        socket.create_connection((host.strip("[]"), port), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as e:
        raise ValueError(f"{failure} ({getattr(e, 'strerror', None) or e}): {remedy}") from None


class Cluster(Protocol):
    """The cluster of a run, whose nodes are chosen once."""

    ray_address: str | None

    def join(self) -> None: ...
    def nodes(self) -> RunNodes: ...  # with their GPUs reserved
    def hosts(self) -> tuple[Node, ...]: ...  # for work without GPUs


class Machines:
    """The machine checks of one run."""

    def __init__(self, config: RunConfig, stages: Sequence[Stage], to_do: Sequence[str], cluster: Cluster) -> None:
        self.config, self.cluster, self.ray_address = config, cluster, cluster.ray_address
        self.trains = "train" in to_do
        self.needs = disk_needs(config, stages, to_do, joins_cluster=cluster.ray_address is not None)
        by_name = {s.name: s.directory for s in stages}
        self.run_dir, self.cache = by_name["train"], by_name["convert"].parent
        teachers = [teacher.part for teacher in config.distillation.teachers.values()]
        self.makes = config.model.make is not None and "fetch" in to_do
        self.makes |= self.trains and any(isinstance(part, MadeServer) for part in teachers)
        self.directories = [s.directory for s in stages if s.name in to_do]
        self.starts_ranks = self.trains or self.makes
        spreads = self.ray_address is not None and config.cluster.nodes > 1 and "convert" in to_do
        self.uses_ray = self.starts_ranks or "stage" in to_do or spreads
        self.stages = "stage" in to_do
        self.ports: Mapping[int, Sequence[ServerPort]] = {}  # node -> what its servers bind

    @cached_property
    def placement(self) -> PlacementPlan:
        """Raises ValueError as `plan_placement`."""
        return plan_placement(
            self.config.cluster, self.config.parallel, self.config.servers, self.config.teacher_rollouts
        )

    # a dry run

    def local_checks(self) -> list[CheckResult]:
        """Checks of this machine; those of other machines are listed as not checked."""
        c = self.config.cluster
        out = self._misplaced()
        if out:
            return out
        if self.ray_address is not None:
            address = self.ray_address
            out.append(run_check(f"Ray at {address}", lambda: check_address(address)))
        others = self._why_others()
        out += self._secret_checks(here=False)
        out.append(run_check("directories", lambda: check_directories(self.directories)))
        own = [n for n in self.needs if n.on == "here"]
        out.append(run_check("disk space", lambda: self._check_local_disks(own, others)))
        if others is None:
            probe = self._probe(imports=False)()
            out += [run_check(name, check) for name, check in self._node_checks(0, probe, here=True).items()]
        elif self.trains:
            what = "nodes, GPUs, packages and ports" if c.gpus_per_node else "nodes, packages and ports"
            out.append(CheckResult(what, Outcome.NOT_CHECKED, others))
        return out

    def _misplaced(self) -> list[CheckResult]:
        """Why ranks and servers have no place; empty where they have."""
        placed = run_check("placement", lambda: self.placement)
        return [placed] if placed.outcome is Outcome.WRONG else []

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
            return f"the nodes are those of the Ray cluster at {self.ray_address}"
        if c.nodes > 1:
            return f"the run needs {c.nodes} nodes"
        if c.gpus_per_node > (have := gpus()):
            return f"the run needs {c.gpus_per_node} GPUs, but this machine has {have}"
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
        misplaced = self._misplaced()
        out = [
            *misplaced,
            *self._secret_checks(here=True),
            run_check("directories", lambda: check_directories([*self.directories, *self._staged_to()])),
            run_check("disk space", lambda: check_disks([n for n in self.needs if n.on == "here"], disk_of)),
        ]
        if not self.uses_ray or misplaced:
            return out
        ray = run_check("Ray", self.cluster.join)
        out.append(ray)
        if ray.outcome is not Outcome.OK:
            return out
        nodes = run_check("nodes", self.cluster.nodes if self.starts_ranks else self.cluster.hosts)
        out.append(nodes)
        if nodes.outcome is Outcome.OK:
            chosen = self.cluster.hosts()
            probes = self._probes(chosen)
            out.append(run_check("ports", lambda: self._check_planned_ports(probes, chosen)))
            for i, probe in enumerate(probes):
                out += [run_check(name, check) for name, check in self._node_checks(i, probe, here=False).items()]
            if self.trains or (self.ray_address is not None and len(chosen) > 1):
                examined: list[CheckResult] = []
                run = run_check("examination of the nodes", lambda: examined.extend(self._brief_checks(chosen)))
                out += examined or [run]
        return out

    def _brief_checks(self, chosen: Sequence[Node]) -> list[CheckResult]:
        from miles_like.preflight.examination import brief_checks

        devices = [facts.devices for facts in self.cluster.nodes().facts] if self.starts_ranks else None
        here = self.ray_address is None and len(chosen) == 1
        return brief_checks(self.config, chosen, devices, here=here)

    def _probes(self, chosen: Sequence[Node]) -> list[ProbeResult]:
        from miles_like.nodes.work import on_every_node

        with contextlib.ExitStack() as stack:
            probe = self._probe(imports=True, sees=self._watched(stack))
            found = on_every_node(probe, chosen)
        # ranks get only the GPUs that Ray was started with
        return [{**one, "gpus": of.gpus} for one, of in zip(found, chosen, strict=True)]

    def _watched(self, stack: contextlib.ExitStack) -> dict[str, Probe]:
        """Probes of directories of this machine which other nodes may have to see, while `stack` lasts. One that cannot
        be written is reported by another check."""
        out = {}
        if self.ray_address is not None:
            for option, directory in ((_RUN_DIR, self.run_dir), (_CACHE, self.cache)):
                with contextlib.suppress(OSError):
                    out[option] = stack.enter_context(probe_in(existing(directory)))
        return out

    def _check_planned_ports(self, probes: Sequence[ProbeResult], chosen: Sequence[Node]) -> None:
        """Plan the ports by the nodes' ephemeral ranges, and look at those that were not looked at yet. Raises
        ValueError where a range leaves no room for them."""
        from miles_like.nodes.work import on_every_node

        asked = {port.number for ports in self.ports.values() for port in ports}
        self._plan_ports([probe["ephemeral"] for probe in probes])
        more = {port.number for ports in self.ports.values() for port in ports} - asked
        if more:
            again = on_every_node(NodeProbe(ports=tuple(sorted(more))), chosen)
            for probe, other in zip(probes, again, strict=True):
                probe["used"] = [*probe["used"], *other["used"]]

    def _plan_ports(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Raises ValueError as `server_ports`."""
        self.ports = {}
        if self.trains and self.config.servers is not None:
            local = self.ray_address is None
            teachers = self.config.teacher_rollouts
            self.ports = server_ports(self.placement, self.config.servers, ranges, teachers=teachers, local=local)

    def _staged_to(self) -> list[Path]:
        """The node-local directory: this process stages the small files there too."""
        stage_dir = self.config.cluster.stage_dir
        return [Path(stage_dir)] if self.stages and stage_dir is not None else []

    # checks of one node

    def _probe(self, *, imports: bool, sees: Mapping[str, Probe] | None = None) -> NodeProbe:
        """imports: import SGLang, which takes 30 s, in place of only asking for its version. sees: by their options."""
        c = self.config
        paths = tuple(str(n.directory) for n in self.needs if n.on != "here")
        if not self.trains:
            return NodeProbe(paths=paths, sees=sees or {})
        found = ["megatron.core", *(["transformer_engine_torch"] if c.kernels.spec == "te" else [])]
        with contextlib.suppress(ValueError):  # the nodes' own ranges may leave room
            self._plan_ports([ephemeral_ports()])
        stock = c.servers is not None and c.rollout.engine in _STOCK
        return NodeProbe(
            paths=paths,
            found=(*found, *((_EMBEDDED,) if c.servers is not None and not stock else ())),
            ports=tuple(sorted({port.number for ports in self.ports.values() for port in ports})),
            sees=sees or {},
            engine=(c.rollout.python or "") if stock else None,
            engine_package=c.rollout.engine if stock else "sglang",
            imports=imports,
        )

    def _node_checks(self, node: int, probe: ProbeResult, *, here: bool) -> dict[str, Callable[[], None]]:
        name = "this machine" if here else f"node {node} ({probe['node']})"
        apart = not probe["sees"].get(_CACHE, True)
        on_it = [n for n in self.needs if n.on == "nodes" or (n.on == "apart" and apart)]
        needs = [n.of_node(node, probe["held"][str(n.directory)]) for n in on_it]
        out: dict[str, Callable[[], None]] = {}
        if unwritable := {str(n.directory): why for n in needs if (why := probe["unwritable"].get(str(n.directory)))}:
            out[f"directories of {name}"] = partial(_raise_unwritable, name, unwritable)
        for option, (directory, why) in self._unseen(node, probe["sees"]).items():
            out[f"{option} on {name}"] = partial(_raise_unseen, name, directory, why, option)
        if needs:
            out[f"disk space of {name}"] = lambda: check_disks(
                needs, lambda path: probe["disks"][str(path)], f"{name}: "
            )
        if self.trains:
            out[f"packages of {name}"] = lambda: self._check_packages(name, probe)
            if (engine := probe["engine"]) is not None:
                out[f"engine of {name}"] = partial(self._check_engine, name, engine)
            out[f"GPUs of {name}"] = lambda: self._check_gpus(node, name, probe)
        if ports := self.ports.get(node):
            out[f"ports of {name}"] = partial(self._check_ports, name, probe, ports)
        return out

    def _unseen(self, node: int, sees: Mapping[str, bool]) -> dict[str, tuple[Path, str]]:
        """Option -> (its directory, why the node must see it) of those that it does not see."""
        needed = {_RUN_DIR: (self.run_dir, run_dir_needs(self.config, self.placement) if self.trains else {})}
        needed[_CACHE] = (self.cache, cache_needs(self.config, self.placement) if self.makes else {})
        return {
            option: (directory, whys[node])
            for option, (directory, whys) in needed.items()
            if node in whys and not sees.get(option, True)
        }

    def _check_packages(self, name: str, probe: ProbeResult) -> None:
        for package, why in probe["missing"].items():
            key = f"rollout.engine = {self.config.rollout.engine!r}" if package == _EMBEDDED else "the trainer"
            raise ValueError(f"{name} cannot import {package}, which {key} needs ({why}): install it there")

    def _check_engine(self, name: str, found: EngineFound) -> None:
        rollout = self.config.rollout
        engine, wanted = _STOCK[rollout.engine]
        install, python = _REQUIREMENTS[rollout.engine], rollout.python
        where = f"rollout.{rollout.engine}.python = {python!r}" if python else "the trainer's Python"
        other = f"and set rollout.{rollout.engine}.python to its interpreter, or set rollout.engine = 'embedded'"
        version, wrong = found["version"], found["wrong"]
        if version is None:
            raise ValueError(
                f"{name}: {where} has no {engine} {wanted} ({wrong}): install {install} into a virtual "
                f"environment there, {other}"
            )
        if version.partition("+")[0] != wanted:
            raise ValueError(
                f"{name}: {where} has {engine} {version}, but this version of miles-like supports only {wanted}: "
                f"install {install} into a virtual environment there, {other}"
            )
        if wrong is not None:
            raise ValueError(
                f"{name}: {where} has {engine} {version}, which it cannot import ({wrong}): install {install} again"
            )

    def _check_gpus(self, node: int, name: str, probe: ProbeResult) -> None:
        want = self.config.cluster.gpus_per_node
        if node < self.placement.nodes and probe["gpus"] < want:
            raise ValueError(
                f"{name} has {probe['gpus']} GPUs, but cluster.gpus_per_node = {want}: lower "
                "cluster.gpus_per_node, or join a cluster of such nodes with --ray-address"
            )

    def _check_ports(self, name: str, probe: ProbeResult, ports: Sequence[ServerPort]) -> None:
        for port in ports:
            if port.number in probe["used"]:
                raise ValueError(
                    f"{name}: port {port.number} of {port.server} ({port.purpose}) is in use: set {port.key} to a "
                    "different port, or stop the process that uses it"
                )
