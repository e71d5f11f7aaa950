"""The configuration section of the cluster, and which GPUs each role of a run may use. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from miles_like.device_table import device
from miles_like.section import Section
from miles_like.variables import read_variables

PoolName = Literal["trainer", "rollout", "critic", "reference", "teachers"]
POOLS: tuple[PoolName, ...] = get_args(PoolName)
MOST_NODES = 100_000  # limit of a number in a range


def parse_ranges(text: str) -> tuple[int, ...]:
    """The numbers of "0-3,8": ascending, each once. Raises ValueError for any other form."""
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if not first <= last < MOST_NODES:
            raise ValueError(f"{text!r} is not a list of numbers and ranges: write it as '0-3' or '0,2,4-7'")
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{text!r} has a number twice: write each once")
    return tuple(sorted(numbers))


def format_ranges(numbers: tuple[int, ...]) -> str:
    """`0-3,8` of ascending numbers."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


class PoolConfig(Section):
    """Nodes and GPUs for the processes of one role."""

    nodes: str | None = None  # node numbers in the order of the run, for example "0-11"; None: all
    gpus: str | None = None  # GPU indices on each of these nodes, for example "0-3"; None: all

    @field_validator("nodes", "gpus", mode="before")
    @classmethod
    def one_number_is_a_range(cls, value: Any) -> Any:
        """`--set cluster.pools.critic.nodes=3` gives a number."""
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def ranges_are_readable(self) -> PoolConfig:
        for key, value in (("nodes", self.nodes), ("gpus", self.gpus)):
            if value is not None:
                try:
                    parse_ranges(value)
                except ValueError as e:
                    raise ValueError(f"{key} = {e}") from None
        return self


class PoolsConfig(Section):
    """GPUs of each role. docs/configuration.md describes the GPUs of a role without a pool."""

    trainer: PoolConfig | None = None
    rollout: PoolConfig | None = None
    critic: PoolConfig | None = None
    reference: PoolConfig | None = None  # separate forward-only ranks with the reference weights
    teachers: PoolConfig | None = None  # servers that the run starts for teachers; embedded servers run on CPU

    def of(self, name: PoolName) -> PoolConfig | None:
        pool: PoolConfig | None = getattr(self, name)
        return pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """GPUs that a role may use: the same positions on each of its nodes. The role fills them node by node."""

    nodes: tuple[int, ...]
    gpus: tuple[int, ...]  # empty on CPU
    keys: str  # of the configuration, for messages

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(node, GPU) in the order in which they are filled."""
        return tuple((node, gpu) for node in self.nodes for gpu in self.gpus)

    def described(self) -> str:
        return f"{len(self.nodes)} nodes x {len(self.gpus)} GPUs = {len(self.places)}"


def server_places(pool: Pool, widths: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """(node, GPU) of each of several servers of so many GPUs, in order. A server that fits into a node does not begin
    in one and end in another; where the pool is too small the last ones have fewer."""
    used, out = 0, []
    for width in widths:
        unit = min(width, len(pool.gpus))
        used = -(-used // unit) * unit
        out.append(pool.places[used : used + width])
        used += width
    return out


class ClusterConfig(Section):
    """Resources of the Ray cluster."""

    nodes: int = Field(1, ge=1)  # nodes of the Ray cluster that the run uses
    gpus_per_node: int = Field(0, ge=0)  # GPUs of each node that the run uses; 0: CPU ranks
    device: str = "H100"  # GPU model, whose memory and speed `miles-like plan` uses
    # time limit of a call to trainer or critic ranks (or ten times the longest such call so far), after which the run
    # fails; also of the wait for nodes that have not joined the cluster yet
    timeout_s: float = Field(1800.0, gt=0)
    # how often trainer, critic and reference ranks that are lost are rebuilt from the last checkpoint while the run's
    # other processes stay, within rebuild_window_s; 0: the run ends with the first rank that it loses
    rebuilds: int = Field(3, ge=0)
    rebuild_window_s: float = Field(3600.0, gt=0)  # seconds within which `rebuilds` are counted
    peak_tflops: float | None = Field(None, gt=0)  # peak of one rank's device in the training dtype, to report perf/mfu
    # trainer and rollout share GPUs and take turns: one releases its memory while the other computes. None: true on
    # GPUs; CPU ranks take turns only if true is given
    colocate: bool | None = None
    when_busy: Literal["refuse", "queue"] = "refuse"  # if other jobs use the GPUs: fail, or wait until they are free
    pools: PoolsConfig = PoolsConfig()
    stage_dir: str | None = None  # node-local directory for copies of checkpoints; None: inside the run directory
    env: dict[str, str] = Field(
        {}
    )  # environment variables of trainer and critic ranks; "" takes a secret from the driver's

    @field_validator("env", mode="before")
    @classmethod
    def variables_can_be_set(cls, given: Any) -> Any:
        return read_variables("cluster.env", given)

    @field_validator("device")
    @classmethod
    def the_device_is_known(cls, name: str) -> str:
        device(name)
        return name

    @model_validator(mode="after")
    def pools_are_in_the_cluster(self) -> ClusterConfig:
        for name in POOLS:
            if (pool := self.pools.of(name)) is None:
                continue
            key = f"cluster.pools.{name}"
            if pool.nodes is not None and (last := parse_ranges(pool.nodes)[-1]) >= self.nodes:
                raise ValueError(
                    f"{key}.nodes = {pool.nodes!r} includes node {last}, but cluster.nodes = {self.nodes} has "
                    f"nodes 0 to {self.nodes - 1}: lower it or raise cluster.nodes"
                )
            if pool.gpus is None:
                continue
            if not self.gpus_per_node:
                raise ValueError(
                    f"{key}.gpus = {pool.gpus!r} has no effect, because with cluster.gpus_per_node = 0 all "
                    "processes run on CPU: remove it"
                )
            if (last := parse_ranges(pool.gpus)[-1]) >= self.gpus_per_node:
                raise ValueError(
                    f"{key}.gpus = {pool.gpus!r} includes GPU {last}, but cluster.gpus_per_node = "
                    f"{self.gpus_per_node} has GPUs 0 to {self.gpus_per_node - 1}: lower it or raise "
                    "cluster.gpus_per_node"
                )
        return self

    @property
    def without_turns(self) -> ClusterConfig:
        """The section as a run without a rollout may have it: `colocate` is not set, or false."""
        return self.model_copy(update={"colocate": self.colocate and None})

    def pools_of(self, world: int) -> Mapping[PoolName, Pool]:
        """The GPUs of every role, for `world` trainer ranks.

        A role without [cluster.pools.ROLE]: the trainer may use the whole cluster; critic and reference the trainer's;
        the rollout the trainer's, and the whole nodes after the trainer's if `colocate` is false; the servers of
        teachers run on node 0, on CPU. Raises ValueError where a pool has fewer GPUs than the ranks need, where the
        ranks of the reference would share a GPU with another role, and where `colocate` is false and trainer and
        rollout share one.
        """
        every = Pool(
            nodes=tuple(range(self.nodes)), gpus=tuple(range(self.gpus_per_node)), keys="cluster.nodes, gpus_per_node"
        )
        trainer = self._named("trainer") or every
        after = trainer.nodes
        if self.gpus_per_node and self.pools.trainer is None:
            after = tuple(range(min(self.nodes, -(-world // self.gpus_per_node))))
        others = [pool for name in ("critic", "reference") if (pool := self._named(name)) is not None]
        last = max((after[-1], *(pool.nodes[-1] for pool in others)))
        free = tuple(n for n in range(self.nodes) if n > last)
        together = self.colocate is not False or not self.gpus_per_node
        rest = trainer if together else Pool(nodes=free, gpus=every.gpus, keys=every.keys)
        pools: dict[PoolName, Pool] = {
            "trainer": trainer,
            "rollout": self._named("rollout") or rest,
            "critic": self._named("critic") or trainer,
            "reference": self._named("reference") or trainer,
            "teachers": self._named("teachers") or Pool(nodes=(0,), gpus=(), keys=every.keys),
        }
        if self.gpus_per_node:
            self._check(pools, world)
        return pools

    def _named(self, name: PoolName) -> Pool | None:
        if (pool := self.pools.of(name)) is None:
            return None
        nodes = range(self.nodes) if pool.nodes is None else parse_ranges(pool.nodes)
        gpus = range(self.gpus_per_node) if pool.gpus is None else parse_ranges(pool.gpus)
        return Pool(nodes=tuple(nodes), gpus=tuple(gpus), keys=f"cluster.pools.{name}")

    def _check(self, pools: Mapping[PoolName, Pool], world: int) -> None:
        for name in ("trainer", "critic", "reference"):
            pool = pools[name]
            if world > len(pool.places):
                one = "cluster has" if name == "trainer" and self.pools.trainer is None else f"{pool.keys} has"
                more = "cluster.nodes" if one == "cluster has" else pool.keys
                raise ValueError(
                    f"parallel needs {world} ranks, but {one} {pool.described()}: lower parallel.dp or raise {more}"
                )
        used = {name: set(pools[name].places[:world]) for name in ("trainer", "critic", "reference")}
        sides = {"trainer": used["trainer"], "rollout": set(pools["rollout"].places)}
        if self.pools.critic is not None:
            sides["critic"] = used["critic"]
        if self.pools.reference is not None:
            for name, places in sides.items():
                if shared := sorted(used["reference"] & places):
                    raise ValueError(
                        f"cluster.pools.reference and the {name} share node {shared[0][0]} GPU {shared[0][1]}, "
                        "but the ranks of the reference keep their memory: assign them different GPUs, or remove "
                        "the pool, so that the trainer's ranks swap in the reference weights"
                    )
        trained = sides["trainer"] | sides.get("critic", set())
        if self.colocate is False and (shared := sorted(trained & sides["rollout"])):
            raise ValueError(
                f"cluster.colocate = false, but trained models and the rollout share node {shared[0][0]} GPU "
                f"{shared[0][1]}: assign them different GPUs, or set cluster.colocate = true"
            )
