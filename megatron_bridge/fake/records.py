"""Records of executed ranks, and a cache of them by everything that determines them."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import megatron_bridge
from megatron_bridge.fake.substitutes.facts import RankCounts, RankRun

_PACKAGES = ("torch", "megatron-core")  # whose versions determine a record
_SOURCES = ("megatron_bridge", "quant", "routing_replay")  # packages whose code a rank runs


class ExecutedRank(TypedDict):
    """Counts from executing one rank; bytes and elements are of this rank, without allocator and libraries."""

    key: str  # of everything that determines the record
    config: str  # name of the configuration
    overrides: list[str]  # of its keys: section.key=value
    role: str  # "trainer", "critic" or "reference"
    device: str  # "cuda" or "cpu": of the fake tensors
    rank: int
    world: int
    stage: int  # of the pipeline
    parameters: int  # elements
    expert_parameters: int  # of them, of routed experts
    static: dict[str, int]  # device bytes by part, between steps
    peaks: dict[str, dict[str, int]]  # phase -> part -> device bytes when their sum is largest in the phase
    host: dict[str, dict[str, int]]  # the same of the host
    micro_batches: int  # of the training step
    pack_tokens: int  # of a micro-batch, over all context-parallel ranks
    sample_tokens: int  # of the longest sample in it
    imbalance: float  # tokens of this rank's experts, in units of the mean
    flops: dict[str, float]  # of one micro-batch, as executed: "linears", "core attention"
    stubbed: list[str]  # functions that were replaced


def record(
    run: RankRun, counts: RankCounts, *, name: str, overrides: Sequence[str], role: str, key: str
) -> ExecutedRank:
    return ExecutedRank(
        key=key,
        config=name,
        overrides=list(overrides),
        role=role,
        device=run.device,
        rank=run.rank,
        world=run.config.parallel.world_size,
        stage=counts.stage,
        parameters=counts.parameters,
        expert_parameters=counts.expert_parameters,
        static=_ordered(counts.static),
        peaks={phase: _ordered(parts) for phase, parts in counts.peaks.items()},
        host={phase: _ordered(parts) for phase, parts in counts.host.items()},
        micro_batches=run.micro_batches,
        pack_tokens=run.pack.tokens,
        sample_tokens=max(run.pack.lengths),
        imbalance=run.imbalance,
        flops=counts.flops,
        stubbed=counts.stubbed,
    )


def _ordered(parts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(parts.items(), key=lambda pair: -pair[1]))


def key_of(run: RankRun, hf: Mapping[str, Any], role: str) -> str:
    """sha256 of the rank's configuration, the model's config.json, what is executed, the code, and versions."""
    config = run.config.model_dump(mode="json", exclude={"hf_config"})
    facts = {
        "config": config,
        "hf": dict(hf),
        "rank": run.rank,
        "lengths": run.pack.lengths,
        "loss_share": run.pack.loss_share,
        "micro_batches": run.micro_batches,
        "device": run.device,
        "imbalance": run.imbalance,
        "colocated": run.colocated,
        "role": role,
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "sources": sources_hash(Path(megatron_bridge.__file__).parents[1]),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def sources_hash(root: Path) -> str:
    """sha256 of the code that a rank runs, without comments and docstrings."""
    digest = hashlib.sha256()
    for package in _SOURCES:
        for path in sorted((root / package).rglob("*.py")):
            code = ast.dump(_without_docstrings(ast.parse(path.read_text(encoding="utf-8"))))
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + code.encode() + b"\0")
    return digest.hexdigest()


def _without_docstrings(module: ast.Module) -> ast.Module:
    for node in ast.walk(module):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        ):
            del node.body[0]
    return module


class Cache:
    """A directory with a file for each record, by key."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def get(self, key: str) -> ExecutedRank | None:
        path = self.directory / f"{key}.json"
        if not path.is_file():
            return None
        found: ExecutedRank = json.loads(path.read_text(encoding="utf-8"))
        return found

    def put(self, found: ExecutedRank) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{found['key']}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(found), encoding="utf-8")
        new.rename(path)


def read_records(path: Path) -> list[ExecutedRank]:
    found: list[ExecutedRank] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write_records(path: Path, records: Iterable[ExecutedRank]) -> None:
    """Replaces `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = sorted(records, key=lambda r: (bool(r["overrides"]), r["config"], r["overrides"], r["role"], r["rank"]))
    new = path.with_suffix(".new")
    new.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    new.rename(path)


GIB = 1 << 30


def table(found: ExecutedRank) -> str:
    """The record as text: a row per part, a column per phase, in GiB."""
    phases = list(found["peaks"])
    lines = [
        " ".join([found["config"], *found["overrides"]]),
        f"{found['role']} rank {found['rank']} of {found['world']} (pipeline stage "
        f"{found['stage']}): {found['parameters'] / 1e9:.3f} B parameters, {found['expert_parameters'] / 1e9:.3f} B of "
        f"routed experts; {found['micro_batches']} micro-batches of {found['pack_tokens']} tokens",
        *_rows("device, GiB", {"between steps": found["static"]} | found["peaks"]),
        *_rows("host, GiB", {phase: found["host"][phase] for phase in phases}),
    ]
    if found["flops"]:
        work = ", ".join(f"{value / 1e12:.2f} T {name}" for name, value in found["flops"].items())
        lines.append(f"operations of a micro-batch: {work}")
    return "\n".join(lines)


def _rows(title: str, columns: Mapping[str, Mapping[str, int]]) -> list[str]:
    parts = dict.fromkeys(part for column in columns.values() for part in column)
    lines = [f"{title:20}" + "".join(f"{name:>15}" for name in columns)]
    for part in parts:
        values = [column.get(part, 0) / GIB for column in columns.values()]
        if max(values) >= 0.005:
            lines.append(f"{part:20}" + "".join(f"{value:15.2f}" if value >= 0.005 else f"{'':15}" for value in values))
    totals = "".join(f"{sum(column.values()) / GIB:15.2f}" for column in columns.values())
    return [*lines, f"{'sum':20}{totals}"]
