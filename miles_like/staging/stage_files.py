"""Which files each node of a run needs on its own disk, and how many bytes that is.

A node with a part of a rollout server needs the complete served checkpoint: stock SGLang opens every safetensors file
of a directory, whichever experts it serves. A node with trainer or critic ranks needs config.json, the tokenizer and
the other small files, and of the shards those files that its ranks read in the run's layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bridge.convert.directory.manifest import MANIFEST, Manifest
from megatron_bridge.convert.directory.rank_reads import bytes_read, files_read
from megatron_bridge.families.base import HFConfig, TensorMap
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.resolve import trained_config
from miles_like.cluster.placement import PlacementPlan, plan_placement
from miles_like.config.ranks import critic_config, trainer_config
from miles_like.config.run import RunConfig
from miles_like.hf.checkpoint import companions, read_config
from miles_like.storage.completion import Output, OutputFile, file_sha256
from miles_like.storage.verified_copy import Copy, FileSum, LocalSource, StageFiles
from quant.hf_config import MODELOPT_FILE

HF, MEGATRON = "hf", "megatron"  # folders of a staged directory


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeed:
    """Bytes that one node copies to its disk."""

    served: int  # of the checkpoint that servers load
    shards: int  # of tensors that its ranks load; whole files are copied, which hold somewhat more

    @property
    def total(self) -> int:
        return self.served + self.shards


def node_needs(config: RunConfig, hf: HFConfig, served_bytes: int) -> tuple[NodeNeed, ...]:
    """The need of each node of the run. hf: config.json of the served checkpoint, which has `served_bytes`. Raises
    ValueError as `plan_placement`."""
    plan = plan_placement(config.cluster, config.parallel, config.servers)
    tables, whole = _trained_tables(config, hf), _server_nodes(plan)
    return tuple(
        NodeNeed(
            served=served_bytes if node in whole else 0,
            shards=max((bytes_read(t, config.parallel, _ranks(plan, node)) for t in tables), default=0),
        )
        for node in range(plan.nodes)
    )


def layout_inputs(config: RunConfig) -> dict[str, Any]:
    """What determines the files of each node, beside the files themselves: inputs of the stage's key."""
    servers = config.servers
    return {
        "parallel": config.parallel.model_dump(mode="json"),
        "cluster": config.cluster.model_dump(mode="json", include={"nodes", "gpus_per_node", "colocate", "pools"}),
        "servers": None if servers is None else [servers.engine, servers.servers, servers.sglang.tp_size],
        "models": [config.algorithm.name, config.algorithm.has_critic, bool(config.train.mtp_coefficient)],
    }


def pieces_of(out: Path, local: Path | None) -> Path:
    """Where a node that does not see the output `out` of a conversion keeps the pieces that it converts."""
    return out.with_name(f"{out.name}.pieces") if local is None else local / f"{out.parent.name}.{out.name}.pieces"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The copies of a run."""

    nodes: tuple[StageFiles, ...]  # by number of the node
    driver: StageFiles  # small files that the driver reads, on whichever machine it runs


def stage_plan(config: RunConfig, data: Path, served: Output, shards: Output) -> StagePlan:
    """The copies to `data`/hf and `data`/megatron, as if all nodes saw the directories of `served` and `shards`. Raises
    ValueError as `Manifest.read` and `plan_placement`."""
    plan = plan_placement(config.cluster, config.parallel, config.servers)
    small = _small_files(served)
    read_hf, read_shards = LocalSource(served.root), LocalSource(shards.root)
    listed = _shard_files(shards)
    manifest = Manifest.read(shards.root) if Manifest.there(shards.root) else None
    tables = [] if manifest is None else _trained_tables(config, read_config(served.root))
    nodes = []
    for node in range(plan.nodes):
        ranks = _ranks(plan, node)
        if manifest is None:  # made by another program, which says of no file what is in it
            names = set(listed) if ranks else set()
        else:
            names = set().union(*(files_read(manifest, t, config.parallel, ranks) for t in tables))
        hf = served.files if node in _server_nodes(plan) else small
        copies = (
            Copy(read_hf, data / HF, _sums(hf)),
            Copy(read_shards, data / MEGATRON, {name: listed[name] for name in sorted(names)}),
        )
        nodes.append(StageFiles(data, copies))
    driver = StageFiles(data, (Copy(LocalSource(served.root), data / HF, _sums(small)),))
    return StagePlan(nodes=tuple(nodes), driver=driver)


def _shard_files(shards: Output) -> dict[str, FileSum]:
    """All files of the converted directory, by its manifest if there is one: some may be on other nodes."""
    listed = _sums(shards.files)
    if Manifest.there(shards.root):
        listed |= {n: {"size": f.size, "sha256": f.sha256} for n, f in Manifest.read(shards.root).files.items()}
        path = shards.root / MANIFEST
        listed.setdefault(MANIFEST, {"size": path.stat().st_size, "sha256": file_sha256(path)})
    return listed


def _small_files(served: Output) -> dict[str, OutputFile]:
    """config.json, tokenizer, chat templates and the like: all that a process without the weights reads."""
    names = {"config.json", MODELOPT_FILE} | {str(p.relative_to(served.root)) for p in companions(served.root)}
    return {name: fact for name, fact in served.files.items() if name in names}


def _sums(files: Mapping[str, OutputFile]) -> dict[str, FileSum]:
    return {name: {"size": fact["size"], "sha256": fact["sha256"]} for name, fact in files.items()}


def _ranks(plan: PlacementPlan, node: int) -> list[int]:
    """Numbers of the ranks on a node: of trainer, critic and reference."""
    ranks = (*plan.of("trainer"), *plan.critics(), *plan.of("reference"))
    return sorted({s.index for s in ranks if s.node == node})


def _server_nodes(plan: PlacementPlan) -> frozenset[int]:
    return frozenset(s.node for s in plan.of("rollout"))


def _trained_tables(config: RunConfig, hf: HFConfig) -> list[TensorMap]:
    """The tensors of each trained model: the policy's, and the critic's if there is one."""
    trainer = trainer_config(config, Path())
    models = [m for m in (trainer, critic_config(config, trainer)) if m is not None]
    configs = [(trained_config(m, hf), bool(m.mtp_coefficient)) for m in models]
    return [family_of(own).bind(own, mtp=mtp) for own, mtp in configs]
