"""Convert checkpoints between Hugging Face and Megatron form, in this process, others, or on a cluster's nodes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_bridge.config import ParallelConfig
from megatron_bridge.convert.units import ConvertReport, Spread, Watch, unwatched
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.layout import check_layout
from miles_like.hf.checkpoint import read_config

if TYPE_CHECKING:
    from miles_like.nodes.members import Node


@dataclass(frozen=True, slots=True)
class Conversion:
    """A finished conversion; as text, a summary of one line."""

    out: Path
    tensors: int
    bytes: int  # of the tensors written
    seconds: float
    kept: tuple[int, int]  # (parts kept from an interrupted run, all parts)
    skipped: tuple[str, ...]  # tensors that have no place in the other form

    def __str__(self) -> str:
        parts, of = self.kept
        kept = f", {parts} of {of} parts kept from an interrupted run" if parts else ""
        less = f"; {len(self.skipped)} tensors omitted, the first is {self.skipped[0]}" if self.skipped else ""
        return (
            f"{self.tensors:,} tensors, {self.bytes:,} bytes -> {self.out} in {self.seconds:.1f} s "
            f"({speed(self.bytes, self.seconds)}{kept}){less}"
        )


@dataclass(frozen=True, slots=True)
class ConvertWork:
    """The processes and the memory of a conversion."""

    memory_limit: int  # bytes, of all processes of one machine
    workers: int  # processes on each machine
    nodes: Callable[[], Sequence[Node]] | None  # the nodes of a joined cluster, which share it; None: this machine
    timeout_s: float = 1800.0  # without progress of a process on a cluster's node, after which the conversion fails
    # The cluster's nodes may have separate disks: pieces stay where they are converted, and the output lists them.
    apart: bool = False
    local: Path | None = None  # node-local directory for pieces, if `apart`; None: beside the output
    watch: Watch = unwatched  # shows the progress

    def spread(self) -> Spread | None:
        if self.nodes is None:
            return None
        if self.apart:
            from miles_like.staging.separate_disks import SpreadApart

            nodes = tuple(self.nodes())
            return SpreadApart(nodes=nodes, each=self.workers, timeout_s=self.timeout_s, local=self.local)
        from miles_like.nodes.work import over_nodes

        return partial(over_nodes, nodes=self.nodes(), each=self.workers, timeout_s=self.timeout_s)


def cluster_nodes(ray_address: str | None) -> Callable[[], Sequence[Node]] | None:
    """Joins the cluster at the address and returns all its nodes; None without an address."""
    if ray_address is None:
        return None

    def nodes() -> Sequence[Node]:
        from miles_like.nodes.members import living_nodes
        from miles_like.nodes.session import start_ray

        start_ray(ray_address)
        return living_nodes()

    return nodes


def to_megatron(
    hf_dir: Path, out_dir: Path, work: ConvertWork, *, tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1
) -> Conversion:
    """Convert a Hugging Face directory. Raises ValueError for a layout that the model does not fit. `pp` need not
    divide the number of layers, because shards are not cut by stage."""
    from megatron_bridge.convert.to_megatron import to_megatron

    dp = ep * etp // math.gcd(ep * etp, tp)  # the least that these experts need
    hf = read_config(hf_dir)
    check_layout(ParallelConfig(tp=tp, ep=ep, etp=etp, dp=dp), hf)
    if pp > (layers := family_of(hf).num_layers(hf)):
        raise ValueError(
            f"--pp {pp}: the model has {layers} layers, and each stage needs at least one: use fewer stages"
        )
    began = time.monotonic()
    report = to_megatron(
        hf_dir.resolve(),  # other nodes have other working directories
        out_dir.resolve(),
        memory_limit=work.memory_limit,
        workers=work.workers,
        spread=work.spread(),
        watch=work.watch,
        tp=tp,
        etp=etp,
    )
    return _done(report, out_dir, time.monotonic() - began)


def to_hf(
    megatron_dir: Path,
    out_dir: Path,
    work: ConvertWork,
    *,
    format: str,
    hf_config: Path | None,
    lora_alpha: float | None,
) -> Conversion:
    """Convert a torch_dist directory."""
    from megatron_bridge.convert.to_hf import to_hf

    began = time.monotonic()
    report = to_hf(
        megatron_dir.resolve(),
        out_dir.resolve(),
        format=format,
        hf_config=hf_config,
        lora_alpha=lora_alpha,
        memory_limit=work.memory_limit,
        workers=work.workers,
        spread=work.spread(),
        watch=work.watch,
    )
    return _done(report, out_dir, time.monotonic() - began)


def _done(report: ConvertReport, out: Path, seconds: float) -> Conversion:
    kept = report.units_kept, report.units
    return Conversion(out, report.tensors, report.bytes, seconds, kept, tuple(report.skipped))


def speed(nbytes: int, seconds: float) -> str:
    """Bytes per second in the unit that leaves a digit before the point."""
    rate = nbytes / max(seconds, 1e-9)
    unit, name = next(((u, n) for u, n in ((1e9, "GB/s"), (1e6, "MB/s")) if rate >= u), (1e3, "kB/s"))
    return f"{rate / unit:.2f} {name}"


def check(directory: Path, *, memory_limit: int, workers: int) -> str:
    """Verify a converted directory against its manifest; return a one-line summary. Raises ValueError naming the first
    tensor or file that differs."""
    from megatron_bridge.convert.check import check

    report = check(directory, memory_limit=memory_limit, workers=workers)
    return f"{directory} is complete: {report.tensors:,} tensors, {report.files:,} files, {report.bytes:,} bytes"
