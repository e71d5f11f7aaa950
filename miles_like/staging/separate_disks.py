"""Conversion and staging over nodes that do not share a disk.

A node that does not see the source of a conversion pulls the bytes of its units from the driver's node, and keeps the
pieces that it converts; the driver gets their indexes and writes manifest and metadata. While files are staged, each
node reads from where it sees a file, and otherwise from the node that holds it. Whether a node sees a directory of the
driver is found out with a probe, so with a shared disk no byte goes through Ray. Imported when Ray has been started.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megatron_bridge.convert.directory.manifest import Manifest
from megatron_bridge.convert.mirror import MirroredWork, source_times
from megatron_bridge.convert.to_megatron import Conversion
from megatron_bridge.convert.units import ELSEWHERE, UnitWork, finished_indexes, note_elsewhere, read_unit
from miles_like.nodes.blocks import NodeFiles, own_address
from miles_like.nodes.members import Node, living_nodes
from miles_like.nodes.sight import Probe, probe_in, probe_of
from miles_like.nodes.work import on_every_node, on_nodes, over_nodes
from miles_like.staging.stage_files import pieces_of
from miles_like.storage.verified_copy import Copy, LocalSource, Source, Staged, StageFiles

Alive = Callable[[], None]
Indexes = dict[str, str]  # file -> text of its index


@dataclass(frozen=True)
class ApartWork:
    """Runs units on a node with what the node sees; picklable."""

    job: Conversion
    out: Path  # the driver's directory of the units
    pieces: Path  # the directory of a node that does not see it
    sees_out: Probe
    sees_source: Probe
    times: Mapping[str, tuple[int, int]]
    source: NodeFiles

    def __call__(self, number: int) -> None:
        self._own(number)

    @cached_property
    def _own(self) -> UnitWork | MirroredWork:
        directory = self.out if self.sees_out.is_seen() else self.pieces
        directory.mkdir(parents=True, exist_ok=True)
        if self.sees_source.is_seen():
            return UnitWork(self.job, directory)
        return MirroredWork(self.job, directory, self.times, self.source.pull)


@dataclass(frozen=True, slots=True)
class _Collect:
    """A node's (address, indexes of the units that it holds)."""

    sees_out: Probe
    pieces: Path

    def __call__(self, alive: Alive) -> tuple[str, Indexes]:
        return own_address(), {} if self.sees_out.is_seen() else finished_indexes(self.pieces)


@dataclass(frozen=True, slots=True)
class SpreadApart:
    """A `Spread` over nodes of a Ray cluster. local: a node-local directory for pieces; None: beside the output."""

    nodes: tuple[Node, ...]
    each: int  # processes of a node
    timeout_s: float
    local: Path | None = None

    def __call__(self, work: UnitWork, numbers: Sequence[int]) -> None:
        """Units that nodes hold from an interrupted run are kept. Raises as `over_nodes`."""
        job, out = work.job, work.directory
        assert isinstance(job, Conversion), job
        pieces = pieces_of(out.with_suffix(""), self.local)
        source = job.source.hf.path
        with probe_in(out) as sees_out:
            collect = _Collect(sees_out, pieces)
            self._bring(collect, out)
            left = [n for n in numbers if read_unit(job, out, n, elsewhere=True) is None]
            if not left:
                return
            apart = ApartWork(
                job=job,
                out=out,
                pieces=pieces,
                sees_out=sees_out,
                sees_source=probe_of(source / "config.json"),
                times=source_times(job),
                source=NodeFiles(own_address(), source),
            )
            over_nodes(apart, left, nodes=self.nodes, each=self.each, timeout_s=self.timeout_s)
            self._bring(collect, out)

    def _bring(self, collect: _Collect, out: Path) -> None:
        for address, indexes in on_every_node(collect, self.nodes, timeout_s=self.timeout_s):
            for file, index in indexes.items():
                note_elsewhere(out, file, index, (address, str(collect.pieces)))


# staging


@dataclass(frozen=True, slots=True)
class HeldFiles:
    """A `Source` of files that lie in several places."""

    usual: Source
    other: Mapping[str, Source]

    def reader(self, name: str) -> Callable[[int, int], bytes]:
        return self.other.get(name, self.usual).reader(name)


@dataclass(frozen=True, slots=True)
class Sees:
    """A node's (address, whether it sees each probe)."""

    probes: tuple[Probe, ...]

    def __call__(self, alive: Alive) -> tuple[str, tuple[bool, ...]]:
        return own_address(), tuple(probe.is_seen() for probe in self.probes)


def stage_on_nodes(works: Sequence[StageFiles], nodes: Sequence[Node], *, timeout_s: float) -> list[Staged]:
    """Run the copies of node k on `nodes[k]`, each file read from where the node sees it, else from the node that holds
    it. Raises ValueError as `StageFiles` and `on_nodes`."""
    copies = [c for work in works for c in work.copies]
    roots = list(dict.fromkeys(c.source.root for c in copies if isinstance(c.source, LocalSource) and c.files))
    here, moved = own_address(), {root: _elsewhere(root) for root in roots}
    with contextlib.ExitStack() as stack:
        probes = tuple(_probe(root, stack) for root in roots)
        seen = on_every_node(Sees(probes), nodes, timeout_s=timeout_s)
        placed = []
        for work, (address, sees) in zip(works, seen, strict=False):
            visible = {root for root, is_seen in zip(roots, sees, strict=True) if is_seen}
            own = tuple(_placed(c, address, here, visible, moved) for c in work.copies)
            placed.append(replace(work, copies=own))
        return on_nodes([*placed, *works[len(placed) :]], nodes, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class _Missing:
    """Those of a node's files, of these sizes, that it no longer has."""

    files: Mapping[str, tuple[Path, int]]

    def __call__(self, alive: Alive) -> list[str]:
        return [name for name, (path, size) in self.files.items() if not path.is_file() or path.stat().st_size != size]


def lost_pieces(root: Path, *, timeout_s: float) -> tuple[str, ...]:
    """The files of the converted directory `root` that other nodes held and none holds any more: the node has left the
    cluster, or its disk has lost them. Raises as `on_nodes`."""
    sizes = {name: fact.size for name, fact in Manifest.read(root).files.items()}
    held: dict[str, dict[str, tuple[Path, int]]] = {}
    for name, (address, directory) in _elsewhere(root).items():
        held.setdefault(address, {})[name] = (directory / name, sizes[name])
    there = [node for node in living_nodes() if node.address in held]
    lost = [name for address in held.keys() - {node.address for node in there} for name in held[address]]
    if there:
        asked = [_Missing(held[node.address]) for node in there]
        lost += [name for names in on_nodes(asked, there, timeout_s=timeout_s) for name in names]
    return tuple(sorted(lost))


def _placed(
    copy: Copy,
    address: str,
    here: str,
    visible: set[Path],
    moved: Mapping[Path, Mapping[str, tuple[str, Path]]],
) -> Copy:
    """The copy as the node with this address reads it. here: the driver's address."""
    source = copy.source
    if not isinstance(source, LocalSource) or not copy.files:
        return copy
    usual: Source = source if source.root in visible else NodeFiles(here, source.root)
    other: dict[str, Source] = {
        name: LocalSource(directory) if holder == address else NodeFiles(holder, directory)
        for name, (holder, directory) in moved[source.root].items()
        if name in copy.files
    }
    return replace(copy, source=HeldFiles(usual, other) if other else usual)


def _elsewhere(root: Path) -> dict[str, tuple[str, Path]]:
    """File -> (address, directory) of the files of a converted directory that other nodes hold."""
    path = root / ELSEWHERE
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {str(name): (str(address), Path(directory)) for name, (address, directory) in found.items()}


def _probe(root: Path, stack: contextlib.ExitStack) -> Probe:
    try:
        return stack.enter_context(probe_in(root))
    except OSError:  # a checkpoint that this user may only read
        return probe_of(root / "config.json")
